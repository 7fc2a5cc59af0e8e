"""The layer of experts as callers use it: arguments, transformations of JAX, the order of experts, what it keeps."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.experts.conformance import kept_choices, oracle
from tests.support.draws import draw
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.layer import MOE_MLP
from tilewright.modules import moe_mlp

TOKENS, D, N, EXPERTS, K = 12, 8, 10, 5, 2
CASE = ExpertsCase("", tokens=TOKENS, d=D, n=N, num_experts=EXPERTS, k=K, biases=True)
FLOATS = ("x", "weights", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
MATRICES = FLOATS[2:]
COTANGENT = draw(TOKENS, D, seed=9)


def arrays_of(case: ExpertsCase = CASE) -> dict[str, jax.Array]:
    """The arrays of a case by name."""
    args, options = case.arguments()
    named = dict(zip(("x", "weights", "experts", "gate", "up", "down"), args, strict=True))
    return named | dict(zip(FLOATS[5:], options.get("biases", ()), strict=False))


ARRAYS = arrays_of()
IDS = ARRAYS["experts"]


def layer(arrays: dict[str, Any], ids: Any = IDS, **options: Any) -> jax.Array:
    """The op of arrays by name, with the biases that are among them."""
    biases = tuple(arrays.get(name) for name in FLOATS[5:])
    matrices = (arrays[name] for name in MATRICES[:3])
    return moe_mlp(arrays["x"], arrays["weights"], ids, *matrices, biases=biases, **options)


def floats_of(arrays: dict[str, Any] = ARRAYS) -> dict[str, Any]:
    return {name: arrays[name] for name in FLOATS if name in arrays}


def both_ways(function: Callable[..., Any], arrays: dict[str, Any], cotangent: Any = COTANGENT) -> dict[str, Any]:
    """The result and the gradients of every array."""
    out, pull = jax.vjp(function, arrays)
    return {"out": out, **{f"d_{name}": x for name, x in pull(cotangent.astype(out.dtype))[0].items()}}


def close(got: Any, want: Any, **limits: float) -> None:
    limits = limits or {"rtol": 1e-4, "atol": 1e-5}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **limits), dict(got), dict(want))


def same(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def wanted(arrays: dict[str, Any], ids: Any = IDS, cotangent: Any = COTANGENT, **options: Any) -> dict[str, Any]:
    """Of the loop over choices in float64."""
    biases = tuple(arrays.get(name) for name in FLOATS[5:])
    matrices = (arrays[name] for name in MATRICES[:3])
    inputs = MOE_MLP.prepare(arrays["x"], arrays["weights"], ids, *matrices, biases=biases, **options)
    return oracle(inputs, cotangent)


def test_leading_dimensions() -> None:
    reference = both_ways(layer, floats_of())

    def of_batches(floats: dict[str, Any]) -> Any:
        x, weights = (floats[name].reshape(3, 4, -1) for name in ("x", "weights"))
        return layer(floats | {"x": x, "weights": weights}, IDS.reshape(3, 4, K)).reshape(TOKENS, D)

    same(both_ways(of_batches, floats_of()), reference)
    assert moe_mlp(*(ARRAYS[name].reshape(3, 4, -1) for name in ("x", "weights", "experts")),
                   *(ARRAYS[name] for name in MATRICES[:3])).shape == (3, 4, D)  # fmt: skip


def test_jit_has_the_values_of_a_call_without() -> None:
    eager = both_ways(layer, floats_of())
    close(jax.jit(lambda floats: both_ways(layer, floats))(floats_of()), eager)
    close(eager, wanted(ARRAYS))


@pytest.mark.parametrize("mapped", [("x", "weights", "experts"), MATRICES, (*FLOATS, "experts"), ("down_bias",)])
def test_vmap(mapped: tuple[str, ...]) -> None:
    """Over tokens, over the matrices of several layers, over both, and over one bias."""
    other = arrays_of(CASE) | {name: array[::-1] for name, array in ARRAYS.items()}
    stacked = {name: jnp.stack([x, other[name]]) if name in mapped else x for name, x in ARRAYS.items()}
    axes = {name: 0 if name in mapped else None for name in ARRAYS}

    def call(arrays: dict[str, Any]) -> Any:
        return both_ways(lambda floats: layer(floats, arrays["experts"]), floats_of(arrays))

    got = jax.jit(jax.vmap(call, in_axes=(axes,)))(stacked)
    for i in range(2):
        each = {name: x[i] if name in mapped else x for name, x in stacked.items()}
        close({name: x[i] for name, x in got.items()}, wanted(each, each["experts"]))


@pytest.mark.parametrize("name", FLOATS)
def test_the_gradient_of_one_array_alone(name: str) -> None:
    """Frozen experts, or all frozen but one bias: the same bits as beside all others, and fewer matmuls."""

    def of_one(value: Any) -> Any:
        return (layer(ARRAYS | {name: value}) * COTANGENT).sum()

    same(jax.grad(of_one)(ARRAYS[name]), both_ways(layer, floats_of())[f"d_{name}"])
    loss = lambda floats: (layer(floats) * COTANGENT).sum()
    alone = jax.jit(jax.grad(of_one)).lower(ARRAYS[name]).compile().cost_analysis()["flops"]
    assert alone < 0.9 * jax.jit(jax.grad(loss)).lower(floats_of()).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("unroll", [1, 2])
def test_checkpointed_layers_in_a_scan(unroll: int) -> None:
    layers = {name: jnp.stack([ARRAYS[name], ARRAYS[name][::-1]]) for name in MATRICES}

    def net(wrap: Any) -> Any:
        def step(x: Any, matrices: Any) -> Any:
            return x + wrap(lambda x, each: layer(each | {"x": x, "weights": ARRAYS["weights"]}))(x, matrices), None

        return lambda x, layers: jax.lax.scan(step, x, layers, unroll=unroll)[0]

    def plain(x: Any, layers: Any) -> Any:
        for i in range(2):
            x = x + layer({name: each[i] for name, each in layers.items()} | {"x": x, "weights": ARRAYS["weights"]})
        return x

    out, pull = jax.vjp(plain, ARRAYS["x"], layers)
    want = {"out": out, "gradients": pull(COTANGENT)}
    for wrap in (lambda f: f, jax.checkpoint):
        out, pull = jax.vjp(jax.jit(net(wrap)), ARRAYS["x"], layers)
        close({"out": out, "gradients": pull(COTANGENT)}, want)


def test_tangents() -> None:
    """Forward mode, of every array at once, against differences in float64."""
    along = {name: draw(*array.shape, seed=20 + i) for i, (name, array) in enumerate(floats_of().items())}
    with jax.enable_x64(True):
        at, along = (
            {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in each.items()} for each in (floats_of(), along)
        )
        slope = jax.jvp(layer, (at,), (along,))[1]
        moved = [layer({name: x + step * along[name] for name, x in at.items()}) for step in (1e-6, -1e-6)]
        np.testing.assert_allclose(slope, (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-6)
        gradients = both_ways(layer, at, cotangent := jnp.asarray(np.asarray(COTANGENT), jnp.float64))
        by_gradients = sum(jnp.vdot(gradients[f"d_{name}"], x) for name, x in along.items())
        np.testing.assert_allclose(by_gradients, jnp.vdot(cotangent, slope), rtol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_float64_is_exact(activation: str) -> None:
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(np.asarray(x), np.float64) for name, x in floats_of().items()}
        arrays |= {name: arrays[name] * 5 for name in ("gate", "up")}  # some beyond the limits of gpt-oss
        cotangent = jnp.asarray(np.asarray(COTANGENT), np.float64)
        options: dict[str, Any] = {"activation": activation, "capacity": 5}
        got = both_ways(lambda floats: layer(floats, **options), arrays, cotangent)
        assert {x.dtype.name for x in got.values()} == {"float64"}
        close(got, wanted(arrays, cotangent=cotangent, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_order_in_which_experts_are_stored_changes_no_bit(dtype: Any) -> None:
    floats = {name: x if name == "weights" else x.astype(dtype) for name, x in floats_of().items()}
    order = np.array([3, 0, 4, 2, 1])  # place i has what was expert order[i]
    moved = floats | {name: floats[name][order] for name in MATRICES}
    program = jax.jit(lambda floats, ids: both_ways(lambda floats: layer(floats, ids), floats))
    got, want = program(moved, jnp.asarray(np.argsort(order), jnp.int32)[IDS]), program(floats, IDS)
    same(got, want | {f"d_{name}": want[f"d_{name}"][order] for name in MATRICES})
    same(program(floats, IDS), want)


def test_no_sum_goes_by_index() -> None:
    """In both directions the only scatters write ids to places that differ."""
    program = jax.jit(lambda floats: both_ways(lambda floats: layer(floats, capacity=4), floats))
    text = program.lower(floats_of()).as_text()
    scatters = re.findall(r'"stablehlo.scatter".*?\}\) : \(tensor<24xi32>', text, flags=re.DOTALL)
    assert len(scatters) == text.count('"stablehlo.scatter"') > 0
    assert not [each for each in scatters if "unique_indices = true" not in each or "stablehlo.add" in each]


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu_oai", "capacity": 9}], ids=["plain", "all_options"])
def test_no_array_has_a_dimension_of_tokens_and_one_of_experts(options: dict[str, Any]) -> None:
    """In programs of both directions, before XLA and after; also no row has a copy for each expert."""
    tokens, experts, k = 1009, 211, 3  # primes, so that no other dimension is one of these or a multiple
    case = ExpertsCase("", tokens=tokens, d=7, n=11, num_experts=experts, k=k, biases=bool(options))
    arrays = arrays_of(case)
    ids, floats, cotangent = arrays["experts"], floats_of(arrays), draw(tokens, 7)
    program = jax.jit(lambda floats: both_ways(lambda floats: layer(floats, ids, **options), floats, cotangent))
    lowered = program.lower(floats)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        shapes = {tuple(map(int, re.findall(r"\d+", each))) for each in re.findall(r"(?:\d+[x,])+(?:\d+)?", text)}
        of_tokens = [shape for shape in shapes if any(size and size % tokens == 0 for size in shape)]
        assert any(shape[0] == tokens * k for shape in of_tokens)
        assert not [shape for shape in of_tokens if any(size and size % experts == 0 for size in shape)]


@pytest.mark.parametrize(("capacity", "rows"), [(None, 192), (20, 80), (64, 192)])
def test_the_backward_pass_keeps_x_both_pre_activations_and_the_routing(capacity: int | None, rows: int) -> None:
    """Nothing of the size of the rows of x, or of the results of experts; and no rows that a capacity rules out."""
    case = ExpertsCase("", tokens=64, d=48, n=20, num_experts=4, k=3, dtype="bfloat16")
    arrays = arrays_of(case)
    ids = arrays["experts"]
    _, pull = jax.vjp(lambda floats: layer(floats, ids, capacity=capacity), floats_of(arrays))
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(pull)}
    given = {id(array) for array in arrays.values()}
    beside = sorted((leaf.shape, leaf.dtype.name) for key, leaf in kept.items() if key not in given)
    pre_activation, source = ((rows, 20), "bfloat16"), ((rows,), "int32")
    assert beside == sorted([((4,), "int32"), ((64, 3), "int32"), source, pre_activation, pre_activation])


def test_xla_gathers_the_rows_of_x_again() -> None:
    """It finds equal gathers, and would take that of the forward pass and keep it: rows of x, of cotangents, of x."""
    compiled = jax.jit(lambda floats: both_ways(layer, floats)).lower(floats_of()).compile()
    assert len(re.findall(rf"= f32\[{TOKENS * K},1,{D}\]\S* gather\(", compiled.as_text())) == 3


FAR = (-1, EXPERTS, -(2**31), 2**31 - 1)


def test_choices_of_experts_that_do_not_exist_add_nothing() -> None:
    ids = IDS.at[1, 0].set(FAR[0]).at[3, 1].set(FAR[1]).at[4].set(jnp.array(FAR[2:]))
    got = jax.jit(lambda floats: both_ways(lambda floats: layer(floats, ids), floats))(floats_of())
    close(got, wanted(ARRAYS, ids))
    assert not got["out"][4].any()
    assert not got["d_x"][4].any()
    assert not got["d_weights"][np.array([1, 3, 4, 4]), np.array([0, 1, 0, 1])].any()


def test_all_choices_may_be_dropped() -> None:
    got = both_ways(lambda floats: layer(floats, jnp.full((TOKENS, K), -1)), floats_of())
    assert not any(np.any(x) for x in got.values())


@pytest.mark.parametrize(
    "ids",
    [np.full((TOKENS, K), 2), np.tile([[4, 4]], (TOKENS, 1)) % np.arange(1, TOKENS + 1)[:, None]],
    ids=["one_expert", "twice"],
)
@pytest.mark.parametrize("capacity", [None, 7])
def test_one_expert_for_all_tokens_and_twice_for_a_token(ids: np.ndarray, capacity: int | None) -> None:
    ids = jnp.asarray(ids, jnp.int32)
    got = both_ways(lambda floats: layer(floats, ids, capacity=capacity), floats_of())
    close(got, wanted(ARRAYS, ids, capacity=capacity))


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, TOKENS * K, 2**31 - 1])
def test_capacity_by_its_rule(capacity: int) -> None:
    """The first choices of an expert, counted one by one; a dropped one is as if its expert did not exist."""
    kept = {(t, j) for t, j, _ in kept_choices(MOE_MLP.prepare(*ARRAYS_OF_CALL, capacity=capacity))}
    used, literal = [0] * EXPERTS, np.full((TOKENS, K), -1)
    for t in range(TOKENS):
        for j in range(K):
            expert = int(IDS[t, j])
            if used[expert] < capacity:
                literal[t, j] = expert
                used[expert] += 1
    assert kept == set(zip(*map(np.ndarray.tolist, np.nonzero(literal >= 0)), strict=True))
    # Not to the bit: there are fewer rows, which XLA multiplies in another way.
    close(
        both_ways(lambda floats: layer(floats, capacity=capacity), floats_of()),
        both_ways(lambda floats: layer(floats, jnp.asarray(literal, jnp.int32)), floats_of()),
    )


ARRAYS_OF_CALL = tuple(ARRAYS[name] for name in ("x", "weights", "experts", "gate", "up", "down"))


def test_weights_of_zero_and_of_nan() -> None:
    """A weight of zero has a gradient; one of a dropped choice has none, and may be NaN."""
    weights = ARRAYS["weights"].at[2, 1].set(0.0).at[5, 0].set(jnp.nan).at[6].set(jnp.nan)
    ids = IDS.at[5, 0].set(-1).at[6].set(EXPERTS)
    got = both_ways(lambda floats: layer(floats, ids), floats_of() | {"weights": weights})
    close(got, wanted(ARRAYS | {"weights": jnp.nan_to_num(weights)}, ids))
    assert got["d_weights"][2, 1] != 0
    assert not got["d_weights"][6].any()
    nan = both_ways(layer, floats_of() | {"weights": ARRAYS["weights"].at[5, 0].set(jnp.nan)})
    assert np.isnan(nan["out"]).all(1).tolist() == [t == 5 for t in range(TOKENS)]


def test_weights_are_used_in_float32() -> None:
    """Whatever the dtype of the tokens: those of a router are not rounded, and bfloat16 ones are widened."""
    narrow = floats_of({name: x if name == "weights" else x.astype(jnp.bfloat16) for name, x in ARRAYS.items()})
    rounded = narrow | {"weights": ARRAYS["weights"].astype(jnp.bfloat16)}
    got, widened = layer(rounded), layer(rounded | {"weights": rounded["weights"].astype(jnp.float32)})
    same(got, widened)
    assert (layer(narrow) != got).any()
    assert both_ways(layer, rounded)["d_weights"].dtype == jnp.bfloat16
    assert both_ways(layer, narrow)["d_weights"].dtype == jnp.float32


def test_mixed_dtypes_are_promoted() -> None:
    mixed = floats_of() | {"x": ARRAYS["x"].astype(jnp.bfloat16)}
    got = both_ways(layer, mixed)
    assert got["out"].dtype == jnp.float32
    assert got["d_x"].dtype == jnp.bfloat16
    close({"out": got["out"]}, {"out": wanted(mixed)["out"]})


CALL = dict(zip(("x", "weights", "experts", "gate", "up", "down"), ARRAYS_OF_CALL, strict=True))
ONES: Any = jnp.ones
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": ONES((TOKENS, D), int)}, TypeError, "x must be a floating-point array of 16 bits or more"),
    ({"gate": ONES((EXPERTS, D, N), jnp.float8_e4m3fn)}, TypeError, "gate must be a floating-point array of 16 bits"),
    ({"weights": ONES((TOKENS, K), int)}, TypeError, "weights must be a floating-point array of 16 bits or more"),
    ({"experts": ONES((TOKENS, K))}, TypeError, "experts must hold integers"),
    ({"x": ONES(D)}, ValueError, r"x must be \[..., d\] and weights \[..., k\] of the same tokens, got x.shape=\(8,\)"),
    ({"weights": ONES((TOKENS + 1, K))}, ValueError, r"weights \[..., k\] of the same tokens, .*shape=\(13, 2\)"),
    ({"weights": ONES((3, 4, K))}, ValueError, r"weights \[..., k\] of the same tokens, .*shape=\(3, 4, 2\)"),
    ({"weights": ONES((TOKENS, 0)), "experts": ONES((TOKENS, 0), int)}, ValueError, "k must be at least 1"),
    ({"experts": ONES((TOKENS, K + 1), int)}, ValueError, r"experts must .*\(12, 2\).*\(12, 3\)"),
    ({"gate": ONES((D, N))}, ValueError, r"gate and up must be \[experts, d, n\] with d=8, got gate.shape=\(8, 10\)"),
    ({"up": ONES((EXPERTS, D, N + 1))}, ValueError, r"gate and up must be .* up.shape=\(5, 8, 11\)"),
    (
        {"gate": ONES((EXPERTS, N, D)), "up": ONES((EXPERTS, N, D))},
        ValueError,
        r"with d=8, got gate.shape=\(5, 10, 8\)",
    ),
    ({"down": ONES((EXPERTS, D, N))}, ValueError, r"down must be \[experts, n, d\], \(5, 10, 8\), got .*\(5, 8, 10\)"),
    ({"activation": "swish"}, ValueError, "activation='swish' must be one of 'silu'.*'swiglu_oai'"),
    ({"biases": ONES((EXPERTS, N))}, ValueError, r"biases must be \(gate, up, down\), arrays or None each"),
    ({"biases": (None, None)}, ValueError, r"biases must be \(gate, up, down\), arrays or None each"),
    ({"biases": (ONES((EXPERTS, D)), None, None)}, ValueError, r"the bias of gate must be \(5, 10\), got .*\(5, 8\)"),
    ({"biases": (None, ONES(N), None)}, ValueError, r"the bias of up must be \(5, 10\), got .*\(10,\)"),
    ({"biases": (None, None, ONES((EXPERTS, N)))}, ValueError, r"the bias of down must be \(5, 8\), got .*\(5, 10\)"),
    ({"biases": (ONES((EXPERTS, N), int), None, None)}, TypeError, "gate_bias must be a floating-point array"),
    ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
    ({"capacity": 2.0}, TypeError, "capacity must be an int, got 2.0"),
    ({"platform": "tpu"}, ValueError, "'tpu'"),
    ({"strategy": "ring"}, ValueError, "strategy='ring' needs experts that are split: axis_name, or"),
    ({"strategy": "all_gather"}, ValueError, "strategy='all_gather' needs experts that are split"),
    ({"axis": "e"}, TypeError, r"moe_mlp\(\) has no argument 'axis'; did you mean 'axis_name'"),
]


@pytest.mark.parametrize(
    ("given", "error", "said"), WRONG, ids=[f"{i}-{'-'.join(g)}" for i, (g, *_) in enumerate(WRONG)]
)
def test_what_it_does_not_take(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        moe_mlp(**(CALL | given))


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"moe_mlp\(\): missing a required argument: 'down'"):
        moe_mlp(*ARRAYS_OF_CALL[:5])  # type: ignore[call-arg]


def test_arrays_are_drawn_for_more_choices_than_experts():
    inputs = MOE_MLP.prepare(*ExpertsCase("", tokens=4, d=8, n=8, num_experts=3, k=5).arguments()[0])
    found = np.asarray(MOE_MLP.sampled(inputs.structs, jax.random.key(0)).experts)
    assert found.shape == (4, 5)
    assert [sorted(row[:3]) for row in found.tolist()] == [[0, 1, 2]] * 4
