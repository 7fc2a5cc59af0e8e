"""The layer of experts over several devices against one: inside ``shard_map``, by types, and by XLA's own split."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.experts.test_op import CASE, FLOATS, MATRICES, arrays_of, both_ways, close, layer, wanted
from tests.support.draws import draw
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.modules import moe_mlp

TOKENS, EXPERTS, CAPACITY = 16, 8, 5
ARRAYS = arrays_of(ExpertsCase("", tokens=TOKENS, d=CASE.d, n=12, num_experts=EXPERTS, k=3, biases=True, zipf=0.7))
IDS = ARRAYS["experts"].at[3, 1].set(-1).at[9, 0].set(EXPERTS)
GIVEN = {name: ARRAYS[name] for name in FLOATS}
COTANGENT = draw(TOKENS, CASE.d, seed=9)


def mesh_of(kind: AxisType, **sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


@functools.cache
def on_one_device(capacity: int | None = None, activation: str = "silu") -> dict[str, Any]:
    """By the loop over choices in float64."""
    return wanted(GIVEN, IDS, COTANGENT, capacity=capacity, activation=activation)


def mapped(devices: int, **options: Any) -> Any:
    """The layer inside ``shard_map``, of arrays by name and of ids."""

    def on_device(floats: Any, ids: Any) -> Any:
        return layer(floats, ids, axis_name="e", **options)

    mesh = mesh_of(AxisType.Auto, e=devices)
    return jax.shard_map(on_device, mesh=mesh, in_specs=P("e"), out_specs=P("e"))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    "options", [{}, {"capacity": CAPACITY}, {"activation": "swiglu_oai", "strategy": "all_gather"}], ids=str
)
def test_values_and_gradients_in_shard_map(devices: int, options: dict[str, Any]) -> None:
    run = mapped(devices, **options)
    got = jax.jit(lambda floats: both_ways(lambda floats: run(floats, IDS), floats, COTANGENT))(GIVEN)
    close(got, on_one_device(options.get("capacity"), options.get("activation", "silu")))


@pytest.mark.parametrize("ids", [np.full((TOKENS, 3), 7), np.tile([0, 4, 0], (TOKENS, 1))], ids=["one", "of_two"])
def test_all_tokens_may_go_to_one_device(ids: np.ndarray) -> None:
    """None is dropped, also where one expert has all of them."""
    ids = jnp.asarray(ids, jnp.int32)
    run = mapped(4)
    got = jax.jit(lambda floats: both_ways(lambda floats: run(floats, ids), floats, COTANGENT))(GIVEN)
    close(got, wanted(GIVEN, ids, COTANGENT))


def test_experts_may_stand_on_any_device() -> None:
    """Only roundings depend on it."""
    order = np.array([6, 1, 3, 0, 7, 4, 2, 5])
    moved = GIVEN | {name: GIVEN[name][order] for name in MATRICES}
    ids = jnp.asarray(np.append(np.argsort(order), [EXPERTS]), jnp.int32)[jnp.where(IDS < 0, EXPERTS, IDS)]
    run = mapped(4, capacity=CAPACITY)
    got = jax.jit(lambda floats: both_ways(lambda floats: run(floats, ids), floats, COTANGENT))(moved)
    want = on_one_device(CAPACITY)
    close(got, want | {f"d_{name}": want[f"d_{name}"][order] for name in MATRICES})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["kept", "checkpointed"])
def test_a_scan_of_layers_with_matrices_of_their_own(wrap: Any) -> None:
    layers = {name: jnp.stack([GIVEN[name], jnp.roll(GIVEN[name], 3, axis=1)]) for name in MATRICES}

    def net(run: Any, x: Any, weights: Any, layers: Any) -> Any:
        step = lambda x, each: (x + run({**each, "x": x, "weights": weights}, IDS), None)
        return jax.lax.scan(wrap(step), x, layers)[0]

    def both(run: Any) -> Any:
        out, pull = jax.vjp(functools.partial(net, run), GIVEN["x"], GIVEN["weights"], layers)
        return dict(enumerate((out, *pull(COTANGENT))))

    close(jax.jit(lambda: both(mapped(4)))(), jax.jit(lambda: both(layer))(), rtol=1e-3, atol=1e-4)


def test_shares_of_bfloat16_are_summed_in_float32() -> None:
    """Each share is rounded once, and the sum once more: not after each of eight terms."""
    narrow = {name: x if name == "weights" else x.astype(jnp.bfloat16) for name, x in GIVEN.items()}
    # The shares of a token's experts are ±256 and 1: in bfloat16 256 + 1 is 256.
    tokens, experts = 8, np.tile(np.arange(3, dtype=np.int32) * 2, (8, 1))
    parts = {"x": jnp.ones((tokens, 1)), "weights": jnp.array([[256.0, 1.0, -256.0]] * tokens)}
    parts |= {name: jnp.ones((EXPERTS, 1, 1)) for name in MATRICES[:3]}
    parts = {name: x if name == "weights" else x.astype(jnp.bfloat16) for name, x in parts.items()}
    out = jax.jit(lambda parts: mapped(4, activation="identity")(parts, experts))(parts)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones((tokens, 1)))
    program = jax.jit(lambda floats: both_ways(lambda floats: mapped(4)(floats, IDS), floats, COTANGENT))
    first, again = program(narrow), program(narrow)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    gradient = jax.jit(jax.grad(lambda x: mapped(4, activation="identity")(parts | {"x": x}, experts).sum()))
    np.testing.assert_array_equal(gradient(parts["x"]).astype(jnp.float32), 2 * np.ones((tokens, 1)))


def place(arrays: dict[str, Any], mesh: Any, specs: dict[str, P]) -> dict[str, Any]:
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}


def by_tokens(tokens: P, experts: P) -> dict[str, P]:
    return dict.fromkeys(("x", "weights", "experts"), tokens) | dict.fromkeys(MATRICES, experts)


N_SPLIT = {
    "gate": P(None, None, "m"), "up": P(None, None, "m"), "down": P(None, "m"),
    "gate_bias": P(None, "m"), "up_bias": P(None, "m"),
}  # fmt: skip
TYPED: dict[str, tuple[dict[str, int], dict[str, P]]] = {
    "experts": ({"e": 4}, by_tokens(P(), P("e"))),
    "experts and tokens": ({"e": 4}, by_tokens(P("e"), P("e"))),
    "data and experts": ({"d": 2, "e": 4}, by_tokens(P("d"), P("e"))),
    "data and experts, tokens over both": ({"d": 2, "e": 2}, by_tokens(P(("d", "e")), P("e"))),
    "experts over two axes": ({"d": 2, "e": 2}, by_tokens(P("d"), P(("d", "e")))),
    "an axis that splits nothing": ({"d": 2, "e": 2, "m": 2}, by_tokens(P("d"), P("e"))),
    "tokens": ({"d": 4}, by_tokens(P("d"), P())),
    "n": ({"m": 4}, N_SPLIT),
    "tokens and n": ({"d": 2, "m": 4}, by_tokens(P("d"), P()) | N_SPLIT),
    "experts and n": (
        {"e": 2, "m": 2},
        by_tokens(P("e"), P("e"))
        | {
            "gate": P("e", None, "m"),
            "up": P("e", None, "m"),
            "down": P("e", "m"),
            "gate_bias": P("e", "m"),
        },
    ),
    "tokens, and n over both": (
        {"d": 2, "m": 2},
        by_tokens(P("d"), P()) | {"gate": P(None, None, ("d", "m")), "up": P(None, None, "m"), "down": P(None, "m")},
    ),
}


def run_typed(name: str, capacity: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of a row of ``TYPED``, and its arguments."""
    sizes, specs = TYPED[name]
    mesh = mesh_of(AxisType.Explicit, **sizes)
    with jax.set_mesh(mesh):
        arrays = place(
            GIVEN | {"experts": IDS, "cotangent": COTANGENT}, mesh, specs | {"cotangent": specs.get("x", P())}
        )

        def both(arrays: Any) -> Any:
            floats = {name: arrays[name] for name in FLOATS}
            run = functools.partial(layer, ids=arrays["experts"], capacity=capacity)
            return both_ways(run, floats, arrays["cotangent"])

        return jax.jit(both)(arrays), arrays


@pytest.mark.parametrize("name", TYPED)
def test_values_and_gradients_by_types(name: str) -> None:
    """Results and gradients are split as the arrays are."""
    got, arrays = run_typed(name)
    close(got, on_one_device())
    for each in FLOATS:
        assert jax.typeof(got[f"d_{each}"]).sharding.spec == jax.typeof(arrays[each]).sharding.spec, each
    assert jax.typeof(got["out"]).sharding.spec == jax.typeof(arrays["x"]).sharding.spec


def test_parts_of_n_are_summed_in_float32() -> None:
    """The first device's share is 256 + 0.5 of two choices, which is 256 in bfloat16, and the second one's −256."""
    up = jnp.array([[[256.0, -256.0, 0.0, 0.0]], [[0.5, 0.0, 0.0, 0.0]]])
    arrays = {"x": jnp.ones((4, 1)), "gate": jnp.ones((2, 1, 4)), "up": up, "down": jnp.ones((2, 4, 1))}
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    routing = {"weights": jnp.ones((4, 2)), "experts": jnp.tile(jnp.arange(2), (4, 1))}
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit, m=4)):
        typed = place(arrays | routing, mesh, N_SPLIT)
        out = jax.jit(lambda typed: moe_mlp(**typed, activation="identity"))(typed)
    np.testing.assert_array_equal(out.astype(jnp.float32), np.full((4, 1), 0.5))


@pytest.mark.parametrize("name", ["experts", "experts and tokens", "n"])
def test_capacity_by_types(name: str) -> None:
    close(run_typed(name, CAPACITY)[0], on_one_device(CAPACITY))


@pytest.mark.parametrize("name", ["data and experts", "tokens"])
def test_capacity_of_tokens_that_other_axes_split(name: str) -> None:
    with pytest.raises(ValueError, match=r"with capacity tokens must be whole.* split over .*d"):
        run_typed(name, CAPACITY)


@pytest.mark.parametrize("name", TYPED)
def test_shardings_of_automatic_axes(name: str) -> None:
    """The same arrays in a program whose types say nothing."""
    sizes, specs = TYPED[name]
    arrays = place(GIVEN | {"experts": IDS}, mesh_of(AxisType.Auto, **sizes), specs)

    def both(arrays: Any) -> Any:
        run = functools.partial(layer, ids=arrays["experts"])
        return both_ways(run, {name: arrays[name] for name in FLOATS}, COTANGENT)

    close(jax.jit(both)(arrays), on_one_device())


def test_wrong_types() -> None:
    mesh = mesh_of(AxisType.Explicit, a=2, b=2)

    def refused(message: str, **specs: P) -> None:
        with jax.set_mesh(mesh):
            arrays = place(GIVEN | {"experts": IDS}, mesh, specs)
            with pytest.raises(ValueError, match=message):
                jax.jit(lambda arrays: layer(arrays, arrays["experts"]))(arrays)

    refused("tokens must be split alike", x=P("a"), weights=P("b"))
    refused("experts and d must be whole .* or give axis_name", gate=P(None, "a"))
    refused("experts and d must be whole .* or give axis_name", down=P("a"))
    refused("n must be split alike in all matrices", gate=P(None, None, "a"), up=P(None, None, "b"))


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match=r"axis_name='e' is no axis of a surrounding jax\.shard_map"):
        layer(GIVEN, IDS, axis_name="e")
    with pytest.raises(ValueError, match="strategy='ring' must be one of 'auto', 'all_gather'"):
        jax.eval_shape(mapped(4, strategy="ring"), GIVEN, IDS)
    with pytest.raises(ValueError, match="not evenly divisible"):
        jax.eval_shape(mapped(4), {name: x[:6] if name in MATRICES else x for name, x in GIVEN.items()}, IDS)
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit, e=4)):
        arrays = place(GIVEN, mesh, by_tokens(P(), P("e")))
        with pytest.raises(ValueError, match="strategy='ring' must be one of 'auto', 'all_gather'"):
            jax.eval_shape(lambda arrays: layer(arrays, jax.device_put(IDS, P()), strategy="ring"), arrays)


def test_the_plan_is_explained() -> None:
    """With the call that each device makes of it, of the tokens of all and of its experts."""
    found = {call.op: call for call in tilewright.explain(mapped(4), GIVEN, IDS)}
    plan, part = found["expert_parallel_mlp"], found["moe_mlp"]
    assert str(plan.config).startswith("all_gather")
    assert f"f32[{TOKENS},{CASE.d}]" in part.arguments
    assert re.search(rf"f32\[2,{CASE.d},12\]", part.arguments)
