"""Explicit axes on several GPUs: every device runs the kernel that one GPU would, and the results are those of one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.modules import decode_attention, flash_attention, page_attention, update_pages
from tilewright.ops.lowering.labels import find_labels_in_lowered, is_call_label, parse_label

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs of one host"
)

SPLITS = {
    "batch": (P("x"), P("x"), 4),
    "heads": (P(None, None, "x"), P(None, None, "x"), 4),
    "length beside whole keys": (P(None, "x"), P(), 4),
    "heads beside one head of keys": (P(None, None, "x"), P(), 1),
    "batch beside whole keys": (P("x"), P(), 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"sliding_window": (300, 100)},
    "none": {},
}


def two() -> Any:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_attention(split: str, option: str):
    query_spec, key_spec, kv_heads = SPLITS[split]
    arrays = draw(2, 1024, 8, 64), draw(2, 1024, kv_heads, 64, seed=1), draw(2, 1024, kv_heads, 64, seed=2)

    def step(*qkv: Any) -> Any:
        out, pull = jax.vjp(lambda *x: flash_attention(*x, **OPTIONS[option]), *qkv)
        return out, *pull(out)

    wanted = jax.jit(step)(*arrays)
    mesh = two()
    with jax.set_mesh(mesh):
        specs = (query_spec, key_spec, key_spec)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        lowered = jax.jit(step).lower(*placed)
        got = lowered.compile()(*placed)
    labels = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
    assert {label.config.backend for label in labels} <= {"hopper", "cuda"}
    for mine, other in zip(got, wanted, strict=True):
        other = np.asarray(other, np.float32)
        np.testing.assert_allclose(np.asarray(mine, np.float32), other, atol=2.0**-6 * np.abs(other).max())


def test_serving_by_sequences():
    table = jnp.asarray(np.random.default_rng(3).permutation(64).reshape(8, 8), jnp.int32)
    lengths = jnp.array([1, 500, 64, 0, 333, 128, 512, 77])
    pages = draw(64, 64, 2, 128, seed=1), draw(64, 64, 2, 128, seed=2)
    contiguous = draw(8, 512, 2, 128, seed=4), draw(8, 512, 2, 128, seed=5)
    new = draw(8, 2, 128, seed=6), draw(8, 2, 128, seed=7)
    by = P("x")
    calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
        (page_attention, (draw(8, 8, 128), *pages, table, lengths), (by, P(), P(), by, by)),
        (decode_attention, (draw(8, 8, 128), *contiguous, lengths), (by,) * 4),
        (update_pages, (*pages, *new, table, lengths), (P(), P(), by, by, by, by)),
    ]
    mesh = two()
    for function, arrays, specs in calls:
        wanted = jax.tree.leaves(function(*arrays))
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
            got = jax.tree.leaves(jax.jit(function)(*placed))
        for mine, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(other, np.float32), atol=1e-2)
