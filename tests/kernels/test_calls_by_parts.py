"""The executor's explanation, choice and compilation of calls that other calls on the devices' parts compute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.kernel.samples import watching
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.distributed import PlanParams
from tilewright.modules import FlashAttention, LinearCrossEntropy, linear_cross_entropy
from tilewright.ops import ConfigCache, default_executor, overlay_cache, policy_override
from tilewright.ops.executor import Explanation

RING = Choice("ring", PlanParams())
SEGMENTS = np.arange(32, dtype=np.int32)[None] // 12


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("s",), axis_types=(kind,), devices=jax.devices()[:4])


def placed(x: Any, *axes: str | None) -> jax.Array:
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh_of(AxisType.Explicit), P(*axes)))


def rows() -> jax.Array:
    return placed(np.ones((1, 32, 4, 16), np.float32), None, "s")


def split_calls() -> dict[str, tuple[Any, tuple[jax.Array, ...], dict[str, Any]]]:
    x, segments = rows(), placed(SEGMENTS, None, "s")
    head = placed(np.ones((6, 16), np.float32)), placed(np.ones((16, 64), np.float32), None, "s"), placed(np.arange(6))
    return {
        "strategy by the model": (FlashAttention(), (x, x, x), {"causal": True}),
        "ring": (FlashAttention(), (x, x, x), {"causal": True, "cfg": RING}),
        "segments": (FlashAttention(), (x, x, x), {"q_segment_ids": segments, "kv_segment_ids": segments}),
        "vocabulary": (LinearCrossEntropy(), head, {"label_smoothing": 0.1}),
    }


def described(calls: Any) -> set[tuple[str, str, str]]:
    """The choices of explained calls: direction, key, and config."""
    return {(each.direction, getattr(each, "choice", each).key, str(each.config)) for each in calls}


@pytest.mark.parametrize("name", ["strategy by the model", "ring", "segments", "vocabulary"])
def test_the_calls_on_the_parts_are_explained(name: str) -> None:
    kernel, operands, options = split_calls()[name]

    def loss(*operands: jax.Array) -> jax.Array:
        return kernel(*operands, **options).sum()

    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
    explained = default_executor().explain(kernel, *operands, quiet=True, **options)
    assert described(explained.choices) == described(tilewright.explain(jax.value_and_grad(loss, floats), *operands))
    assert explained.by_parts == (name != "vocabulary")  # a vocabulary is split by the loss itself
    assert {each.direction for each in explained.choices} == {"forward", "backward"}


def test_each_call_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = default_executor().explain(FlashAttention(), *(rows(),) * 3, causal=True)
    assert [each.op for each in said.choices] == ["context_parallel_attention", "flash_attention", "flash_attention"]
    printed = capsys.readouterr().out
    assert printed.startswith("flash_attention, by calls on the devices' parts of its arrays\ncontext_parallel_")
    assert "flash_attention of f32[1,32,1,16]×3" in printed


def test_a_whole_call_is_explained_as_before() -> None:
    x = jnp.ones((1, 32, 4, 16))
    said = default_executor().explain(FlashAttention(), x, x, x, quiet=True)
    assert not said.by_parts
    assert [each.direction for each in said.choices] == ["forward", "backward"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    found: list[Explanation] = []

    def on_device(*operands: jax.Array) -> jax.Array:
        found.append(default_executor().explain(LinearCrossEntropy(), *operands, axis_name="s", quiet=True))
        return linear_cross_entropy(*operands, axis_name="s")

    mapped = jax.shard_map(
        on_device, mesh=mesh_of(AxisType.Auto), in_specs=(P(), P(None, "s"), P()), out_specs=P(), check_vma=check_vma
    )
    operands = [
        jax.ShapeDtypeStruct(*each) for each in (((6, 16), jnp.float32), ((16, 64), jnp.float32), ((6,), jnp.int32))
    ]
    wanted = tilewright.explain(jax.value_and_grad(mapped, (0, 1)), *operands)
    assert described(found[0].choices) == described(wanted)


def test_outside_shard_map_an_axis_is_the_error_of_the_call() -> None:
    operands = jnp.ones((6, 16)), jnp.ones((16, 64)), jnp.arange(6)
    with pytest.raises(ValueError, match="is no axis of a surrounding"):
        default_executor().explain(LinearCrossEntropy(), *operands, axis_name="s", quiet=True)


def test_the_chosen_config_is_that_of_the_plan() -> None:
    executor, operands = default_executor(), (rows(),) * 3
    first = executor.explain(FlashAttention(), *operands, quiet=True)
    assert executor.choose_config(FlashAttention(), *operands) == first.config == Choice("ulysses", PlanParams())
    assert executor.choose_config(FlashAttention(), *operands, cfg=RING) == RING
    cache = ConfigCache()
    cache.put(first.forward.key, RING)
    with overlay_cache(cache):
        assert executor.choose_config(FlashAttention(), *operands) == RING


def test_explaining_tunes_nothing() -> None:
    with policy_override(autotune=True):
        said = default_executor().explain(FlashAttention(), *(rows(),) * 3, quiet=True)
    assert said.step.startswith("heuristic")
    assert all(each.time_ms is None for each in said.choices)


def test_compiles_what_runs() -> None:
    x = rows()
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    compiled = default_executor().compile(FlashAttention(), struct, struct, struct, causal=True)
    with watching() as seen:
        np.testing.assert_allclose(compiled(x, x, x), x, rtol=1e-6)
    assert seen == []
