"""How often `explain` says that a program runs a call."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tilewright.modules import flash_attention, rms_norm

X, WEIGHT = jnp.ones((1, 16, 2, 8)), jnp.ones(8)


def test_calls_in_loops_and_several_places_count_each_time() -> None:
    def model(x: Any, weight: Any, steps: Any) -> Any:
        for _ in range(3):
            x = rms_norm(flash_attention(x, x, x), weight)
        x, _ = jax.lax.scan(lambda c, _: (flash_attention(c, c, c), None), x, length=5)
        x = jax.lax.fori_loop(0, 7, lambda _, c: rms_norm(c, weight), x)
        return jax.lax.fori_loop(0, steps, lambda _, c: rms_norm(c, weight), x)  # unknown: counts as one

    calls = {call.op: call for call in tilewright.explain(jax.jit(model), X, WEIGHT, 9)}
    assert {op: call.times for op, call in calls.items()} == {"flash_attention": 8, "rms_norm": 11}
    assert str(calls["flash_attention"]).startswith("flash_attention × 8 of f32[1,16,2,8]×3")


def test_calls_in_loops_count_each_time_on_a_device_that_is_not_here() -> None:
    def model(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (flash_attention(c, c, c), None), x, length=5)[0]

    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        assert [call.times for call in tilewright.explain(model, jax.ShapeDtypeStruct(X.shape, X.dtype))] == [5]


def test_split_calls_count_by_their_place() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((jax.device_count(), 16, 2, 8)), NamedSharding(mesh, P("x")))

    def model(x: Any) -> Any:
        x, _ = jax.lax.scan(lambda c, _: (flash_attention(c, c, c), None), x, length=4)
        return flash_attention(x, x, x)

    (call,) = tilewright.explain(model, x)
    assert call.times == 5
    assert call.arguments.startswith("f32[1,16,2,8]")


def test_a_summary_names_backends_and_what_to_install() -> None:
    def model(x: Any, weight: Any) -> Any:
        return rms_norm(flash_attention(x, x, x), weight)

    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        struct = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
        explained = tilewright.explain(model, struct, jax.ShapeDtypeStruct((128,), jnp.bfloat16))
    backends = [str(call.config).partition("(")[0] for call in explained]
    first, *rest = explained.summary
    assert first.startswith("2 calls: ")
    assert all(f"1 on {name}" in first or f"2 on {name}" in first for name in backends)
    reasons = {name: why for call in explained for name, why in call.choice.rejected.items()}
    for extra, name in (("fa4", "fa4"), ("cuda13", "cudnn")):
        said = f"pip install 'tilewright[{extra}]' would let 1 of them run on {name}"
        assert (said in rest) == all(extra in reason for reason in reasons.get(name, [""]))
    assert str(explained).endswith("\n".join(explained.summary))
    assert all("calls" not in line for line in tilewright.explain(lambda x: flash_attention(x, x, x), X).summary)
