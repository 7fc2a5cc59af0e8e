"""Linear attention by its models' names, against recurrences by token in float64 that share no code with it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.recurrences import (
    CONSTANT,
    NAMES,
    Arrays,
    draw,
    normed,
    of_tokens,
    oracle,
    relative_rms,
    sigmoid,
    softplus,
    state_shape,
)
from tilewright import modules

PACKINGS: dict[str, Arrays] = {
    "rows": {},
    "cum_seqlens": {"cum_seqlens": np.array([2, 2, 19, 20, 20, 37, 67])},
    "segment_ids": {"segment_ids": np.repeat([[7, 3, -1, 3, 0], [1, -4, 2, 2, 9]], [17, 1, 4, 35, 13], axis=1)},
    "seq_lengths": {"seq_lengths": np.array([70, 33])},
}


def function(name: str) -> Any:
    return getattr(modules, name)


def cast(arrays: Arrays, dtype: Any) -> Arrays:
    """Arguments as JAX arrays; what is no matrix operand is float32 at least."""
    exact = CONSTANT | {"g", "beta", "w", "dt"}
    wide = jnp.promote_types(dtype, jnp.float32)
    return {
        key: jnp.asarray(value, wide if key in exact else dtype) if isinstance(value, np.ndarray) else value
        for key, value in arrays.items()
    }


def poisoned(arrays: Arrays, packing: Arrays) -> Arrays:
    """The arrays with NaN and infinities in the tokens that belong to no sequence."""
    batch, length = next(value.shape[:2] for key, value in arrays.items() if key in ("x", "v"))
    owned = np.zeros((batch, length), bool)
    if not packing:
        owned[:] = True
    elif "cum_seqlens" in packing:
        owned[0, packing["cum_seqlens"][0] : packing["cum_seqlens"][-1]] = True
    elif "seq_lengths" in packing:
        owned = np.arange(length) < packing["seq_lengths"][:, None]
    else:
        owned = packing["segment_ids"] >= 0
    bad = np.where(np.arange(length) % 3 == 0, np.nan, np.where(np.arange(length) % 3 == 1, np.inf, -np.inf))
    return {
        key: np.where(np.expand_dims(owned, tuple(range(2, value.ndim))), value, bad[:, *[None] * (value.ndim - 2)])
        if of_tokens(key, value)
        else value
        for key, value in arrays.items()
    }


@pytest.mark.parametrize(
    ("name", "packing"),
    [(name, "cum_seqlens") for name in NAMES]
    + [(name, packing) for name in ("gated_delta_rule", "ssd") for packing in PACKINGS if packing != "cum_seqlens"],
)
def test_a_function_is_its_recurrence(name: str, packing: str):
    described = PACKINGS[packing]
    arrays = draw(name, batch=1 if packing == "cum_seqlens" else 2, length=70, value_heads=4, heads=2)
    keeps = packing != "segment_ids"
    sequences = len(described["cum_seqlens"]) - 1 if packing == "cum_seqlens" else 2
    state = np.random.default_rng(1).standard_normal((sequences, *state_shape(name, arrays))) if keeps else None
    options = {"initial_state": jnp.asarray(state, jnp.float32), "return_state": True} if keeps else {}
    found = function(name)(**cast(poisoned(arrays, described), jnp.float32), **described, **options)
    out, final = found if keeps else (found, None)
    wanted, wanted_final = oracle(name, arrays, described, state)
    assert relative_rms(out, wanted) < 2e-6
    assert out.dtype == jnp.float32
    assert (np.asarray(out)[wanted == 0] == 0).all()
    if keeps:
        assert relative_rms(final, wanted_final) < 2e-6
        assert final.dtype == jnp.float32


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in NAMES), ("gated_delta_rule", "float16")])
def test_low_precision_costs_little_more_than_its_inputs_and_outputs(name: str, dtype: str):
    arrays = draw(name, 3, length=70, key_dim=16, value_dim=16)
    low = cast(arrays, jnp.dtype(dtype))
    exact, _ = oracle(name, low)
    out, state = function(name)(**low, return_state=True)
    assert out.dtype == dtype
    assert state.dtype == jnp.float32
    # Of a form that is exact between inputs and outputs that are rounded.
    plain, _ = oracle(name, arrays)
    reference = np.asarray(jnp.asarray(exact, dtype), np.float64)
    scale = np.sqrt((plain**2).mean())
    allowed = np.hypot(relative_rms(reference, exact), np.sqrt(((exact - plain) ** 2).mean()) / scale)
    assert relative_rms(out, exact) < 1.5 * allowed


def loss_of(out: Any, state: Any, weights: tuple[Any, Any]) -> Any:
    return (out * weights[0]).sum() + (state * weights[1]).sum()


def finite_difference(value: Any, arrays: Arrays, key: str, direction: np.ndarray, step: float = 1e-4) -> float:
    """The derivative of a function of float64 arguments along a direction of one, of order step⁴."""
    at = [value(arrays | {key: arrays[key] + n * step * direction}) for n in (-2, -1, 1, 2)]
    return float((at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step))


RAW: dict[str, Arrays] = {
    "gated_delta_rule": {},
    "kimi_delta_attention": {},
    "bounded": {"lower_bound": -5.0},
    "doubled": {"allow_neg_eigval": True},
}


def raw_arguments(case: str, seed: int, **sizes: int) -> tuple[str, Arrays]:
    name = "kimi_delta_attention" if case == "bounded" else "gated_delta_rule" if case == "doubled" else case
    arrays = draw(name, seed, **sizes)
    random = np.random.default_rng(seed + 100)
    shape, heads = arrays.pop("g").shape, arrays.pop("beta").shape
    arrays["a"], arrays["b"] = random.standard_normal(shape) * 2, random.standard_normal(heads)
    arrays["A_log"] = np.log(random.uniform(0.05, 16, heads[2:]))
    arrays["dt_bias"] = random.standard_normal(shape[2:])
    return name, arrays


def by_raw_gates(case: str, name: str, arrays: Arrays, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
    """The oracle of a call with raw gates, by the formulas of the models' papers."""
    given = {key: value for key, value in arrays.items() if key in "qkv"}
    rate = np.exp(arrays["A_log"])
    rate = rate[:, None] if name == "kimi_delta_attention" else rate
    inner = arrays["a"] + arrays["dt_bias"]
    if case == "bounded":
        given["g"] = -5.0 * sigmoid(rate * inner)
    else:
        given["g"] = -rate * softplus(inner)
    given["beta"] = sigmoid(arrays["b"]) * (2 if case == "doubled" else 1)
    return oracle(name, given, *rest)


@pytest.mark.parametrize("case", RAW)
def test_raw_gates_are_those_of_the_models(case: str):
    name, arrays = raw_arguments(case, 0, batch=1)
    packing = {"cum_seqlens": np.array([1, 14, 14, 30])}
    low = {key: jnp.asarray(value, jnp.float32) for key, value in poisoned(arrays, packing).items()}
    out, state = function(name)(**low, **packing, **RAW[case], return_state=True)
    wanted = by_raw_gates(case, name, arrays, packing)
    assert relative_rms(out, wanted[0]) < 2e-6
    assert relative_rms(state, wanted[1]) < 2e-6
    flat = low | {"dt_bias": low["dt_bias"].reshape(-1)}
    np.testing.assert_array_equal(function(name)(**flat, **packing, **RAW[case]), out)
    without = {key: value for key, value in low.items() if key != "dt_bias"}
    zero = low | {"dt_bias": jnp.zeros_like(low["dt_bias"])}
    np.testing.assert_array_equal(
        function(name)(**without, **packing, **RAW[case]), function(name)(**zero, **packing, **RAW[case])
    )


@pytest.mark.parametrize("case", [*RAW, "ssd"])
def test_gradients_of_raw_gates_are_those_of_the_oracle(case: str):
    packing = {"cum_seqlens": np.array([2, 9, 9, 20])}
    if case == "ssd":
        name, arrays = "ssd", draw("ssd", 5, batch=1, length=23, key_dim=4, value_dim=3)
        options = {"dt_softplus": arrays.pop("dt_softplus")}
    else:
        (name, arrays), options = raw_arguments(case, 5, batch=1, length=23, key_dim=4, value_dim=3), RAW[case]
    random = np.random.default_rng(6)
    shapes = (arrays["x" if case == "ssd" else "v"].shape, (3, *state_shape(name, arrays)))
    weights = tuple(random.standard_normal(shape) for shape in shapes)
    arrays["initial_state"] = random.standard_normal(shapes[1])

    def wanted(given: Arrays) -> float:
        given = dict(given)
        state = given.pop("initial_state")
        if case == "ssd":
            return loss_of(*oracle("ssd", given | options, packing, state), weights)
        return loss_of(*by_raw_gates(case, name, given, packing, state), weights)

    with jax.enable_x64(True):
        state = arrays["initial_state"]
        given = poisoned({key: value for key, value in arrays.items() if value is not state}, packing)
        given = {key: jnp.asarray(value) for key, value in given.items()} | {"initial_state": jnp.asarray(state)}
        gradients = jax.jit(
            jax.grad(lambda x: loss_of(*function(name)(**x, **packing, **options, return_state=True), weights))
        )(given)
        for key, gradient in gradients.items():
            direction = random.standard_normal(gradient.shape)
            along = float((np.asarray(gradient) * direction).sum())
            assert along == pytest.approx(finite_difference(wanted, arrays, key, direction), rel=1e-7, abs=1e-7), key
            if of_tokens(key, gradient) and key != "initial_state":
                assert (np.asarray(gradient)[0, [0, 1, 20, 21, 22]] == 0).all(), key


def test_step_sizes_are_clipped_and_skips_may_be_per_channel():
    arrays = draw("ssd", 2)
    arrays["D"] = np.random.default_rng(0).standard_normal(arrays["x"].shape[2:])
    limits = (0.2, 0.9)
    out = modules.ssd(**cast(arrays, jnp.float32), dt_limit=limits)
    assert relative_rms(out, oracle("ssd", arrays | {"dt_limit": limits})[0]) < 2e-6
    plain = {key: arrays[key] for key in ("x", "dt", "A", "B", "C")}
    assert (plain["dt"] < 0).any()
    out = modules.ssd(**cast(plain, jnp.float32))  # clipped to 0, as mamba-ssm does by default
    assert relative_rms(out, oracle("ssd", plain)[0]) < 2e-6


def test_defaults():
    retained = draw("retention", value_heads=4)
    gammas = [1 - 2.0 ** (-5 - head) for head in range(4)]
    out = modules.retention(**{key: jnp.asarray(retained[key], jnp.float32) for key in "qkv"})
    assert relative_rms(out, oracle("retention", retained | {"slopes": -np.log(gammas)})[0]) < 2e-6
    arrays = cast(draw("delta_rule"), jnp.float32)
    raw = arrays | {"q": 3 * arrays["q"], "k": 5 * arrays["k"]}
    exact = {key: np.asarray(value, np.float64) for key, value in raw.items()}
    wanted, _ = oracle("delta_rule", exact | {"q": normed(exact["q"]), "k": normed(exact["k"])})
    assert relative_rms(modules.delta_rule(**raw, qk_l2norm=True), wanted) < 2e-6
    exact |= {"q": 0.25 * 8**0.5 * normed(exact["q"], 0.5), "k": normed(exact["k"], 0.5)}
    out = modules.delta_rule(**raw, scale=0.25, qk_l2norm=True, l2norm_eps=0.5)
    assert relative_rms(out, oracle("delta_rule", exact)[0]) < 2e-6


def test_arguments_stand_in_the_order_of_the_libraries():
    arrays = cast(draw("rwkv7"), jnp.float32)
    state = jnp.ones((2, 2, 8, 6))
    named = modules.rwkv7(**arrays, scale=0.5, initial_state=state, return_state=True)
    placed = modules.rwkv7(*(arrays[key] for key in "rwkvab"), 0.5, state, return_state=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, named))
    arrays = cast(draw("gated_delta_rule"), jnp.float32)
    named = modules.gated_delta_rule(**arrays, scale=0.5, initial_state=state, return_state=True)
    placed = modules.gated_delta_rule(
        *(arrays[key] for key in ("q", "k", "v", "g", "beta")), 0.5, state, return_state=True
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, named))


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_under_transformations(name: str):
    arrays = draw(name, batch=1, length=20)
    if name == "gated_delta_rule":
        _, arrays = raw_arguments(name, 0, batch=1, length=20)
    flags = {key: arrays.pop(key) for key in ("dt_softplus",) if key in arrays}
    call = functools.partial(function(name), **flags)
    low = cast(arrays, jnp.float32)
    mapped = [key for key in low if key not in CONSTANT]
    twice = low | {key: jnp.stack([low[key], low[key][:, ::-1]]) for key in mapped}
    axes = ({key: 0 if key in mapped else None for key in low},)
    found = jax.jit(jax.vmap(lambda x: call(**x), in_axes=axes))(twice)
    for n in range(2):
        np.testing.assert_allclose(
            found[n], call(**{key: each[n] if key in mapped else each for key, each in twice.items()}), atol=2e-6
        )
    loss = lambda x: (call(**x) ** 2).sum()
    for one, other in zip(
        jax.tree.leaves(jax.grad(loss)(low)), jax.tree.leaves(jax.grad(jax.checkpoint(loss))(low)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


X = jnp.ones((1, 4, 2, 8))
GATE = jnp.ones((1, 4, 2))
A = jnp.ones(2)


@pytest.mark.parametrize(
    ("kind", "said", "call"),
    [
        (ValueError, r"gated_delta_rule: the decay is given as g, .*got neither",
         lambda: modules.gated_delta_rule(X, X, X, beta=GATE)),
        (ValueError, r"gated_delta_rule: the decay is given as g, .*got both",
         lambda: modules.gated_delta_rule(X, X, X, GATE, GATE, a=GATE, A_log=A)),
        (ValueError, r"gated_delta_rule: beta is given, or b, .*got neither",
         lambda: modules.gated_delta_rule(X, X, X, GATE)),
        (ValueError, "gated_delta_rule: a raw gate, a, needs A_log",
         lambda: modules.gated_delta_rule(X, X, X, beta=GATE, a=GATE)),
        (ValueError, "kimi_delta_attention: lower_bound turns? a raw gate",
         lambda: modules.kimi_delta_attention(X, X, X, X, GATE, lower_bound=-5.0)),
        (ValueError, r"kimi_delta_attention: lower_bound must be in \[-5.0, 0\), got lower_bound=-6.0",
         lambda: modules.kimi_delta_attention(X, X, X, beta=GATE, a=X, A_log=A, lower_bound=-6.0)),
        (ValueError, r"lower_bound must be in \[-5.0, 0\), got lower_bound=0",
         lambda: modules.kimi_delta_attention(X, X, X, beta=GATE, a=X, A_log=A, lower_bound=0)),
        (ValueError, "allow_neg_eigval doubles the sigmoid of b",
         lambda: modules.gated_delta_rule(X, X, X, GATE, GATE, allow_neg_eigval=True)),
        (TypeError, "allow_neg_eigval must be True or False",
         lambda: modules.gated_delta_rule(X, X, X, GATE, b=GATE, allow_neg_eigval=2)),
        (ValueError, r"kimi_delta_attention: g must have the shape \[batch, length, value_heads, key_dim\] with",
         lambda: modules.kimi_delta_attention(X, X, X, GATE, GATE)),
        (ValueError, r"dt_bias must have the shape \[value_heads, key_dim\]",
         lambda: modules.kimi_delta_attention(X, X, X, beta=GATE, a=X, A_log=A, dt_bias=jnp.ones(9))),
        (ValueError, r"delta_rule: k must have the shape .*key_dim=8, got k.shape=\(1, 4, 2, 7\)",
         lambda: modules.delta_rule(X, X[..., :7], X, GATE)),
        (ValueError, "delta_rule: value_heads of v must be a multiple of heads of q, got 1 and 2",
         lambda: modules.delta_rule(X, X, X[:, :, :1], GATE)),
        (TypeError, "delta_rule: beta must be floating-point of 16 bits or more, got beta.dtype=int32",
         lambda: modules.delta_rule(X, X, X, GATE.astype(int))),
        (TypeError, "delta_rule.*cu_seqlens.*did you mean 'cum_seqlens'",
         lambda: modules.delta_rule(X, X, X, GATE, cu_seqlens=A)),
        (ValueError, "gated_linear_attention: .*a call describes its sequences in one way",
         lambda: modules.gated_linear_attention(X, X, X, X, segment_ids=GATE[..., 0].astype(int), seq_lengths=[4])),
        (ValueError, r"rwkv6: u must have the shape \[value_heads, key_dim\]", lambda: modules.rwkv6(X, X, X, X, A)),
        (ValueError, "rwkv7: a must have the shape", lambda: modules.rwkv7(X, X, X, X, GATE, X)),
        (ValueError, r"lightning_attention: slopes must have the shape \[value_heads\] with value_heads=2",
         lambda: modules.lightning_attention(X, X, X, jnp.ones(3))),
        (ValueError, "ssd: heads of x must be a multiple of groups of B, got 2 and 3",
         lambda: modules.ssd(X, GATE, A, jnp.ones((1, 4, 3, 5)), jnp.ones((1, 4, 3, 5)))),
        (ValueError, r"ssd: initial_state must have the shape \[sequences, heads, head_dim, .* sequences=2",
         lambda: modules.ssd(X, GATE, A, X, X, initial_state=jnp.ones((1, 2, 8, 8)), cum_seqlens=[0, 2, 4])),
        (TypeError, "ssd: dt_limit must be a pair of numbers", lambda: modules.ssd(X, GATE, A, X, X, dt_limit=0.1)),
        (ValueError, r"ssd: dt_limit must be \(least, greatest\)",
         lambda: modules.ssd(X, GATE, A, X, X, dt_limit=(1.0, 0.5))),
        (ValueError, r"ssd: D must have the shape \[heads, head_dim\]",
         lambda: modules.ssd(X, GATE, A, X, X, D=jnp.ones((2, 7)))),
        (TypeError, "ssd: x, B, C must have one dtype, got x.dtype=float32, B.dtype=bfloat16",
         lambda: modules.ssd(X, GATE, A, X.astype(jnp.bfloat16), X)),
        (TypeError, "rwkv6: r, k, v must have one dtype, got .*v.dtype=float16",
         lambda: modules.rwkv6(X, X, X.astype(jnp.float16), X, X[0, 0])),
        (ValueError, "retention: .*initial_state",
         lambda: modules.retention(X, X, X, initial_state=jnp.ones((3, 2, 8, 8)))),
    ],
)  # fmt: skip
def test_wrong_arguments(kind: type[Exception], said: str, call: Any):
    with pytest.raises(kind, match=said):
        call()
