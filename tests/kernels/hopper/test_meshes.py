"""Hopper kernels, interpreted, on the parts of their operands that a shard_map hands out, beside XLA."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.flash_attention.test_pallas_transforms import one_device_at_a_time
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.modules import grouped_matmul
from tilewright.ops.types import Device

__all__ = ["one_device_at_a_time"]  # a fixture


@pytest.fixture(autouse=True)
def interpreted(on_an_h100: Device) -> Iterator[None]:
    with interpret_mosaic():
        yield


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), "bfloat16")


def some_matrices(platform: str, lhs: Any, rhs: Any) -> Any:
    first = jax.lax.axis_index("x") * rhs.shape[0]
    sizes = jnp.asarray([20, 0, 40, 30])
    return (grouped_matmul(lhs, rhs, sizes, group_offset=first, platform=platform),)


def some_classes(platform: str, x: Any, weight: Any) -> Any:
    kernel, labels = LinearCrossEntropy(), jnp.asarray(np.random.default_rng(0).integers(-5, 190, 40), jnp.int32)
    options = {"axis_name": "x", "label_smoothing": 0.1, "platform": platform}
    return tuple(kernel(kernel.prepare(x, weight.T, labels, **options)))


CALLS: dict[str, tuple[Callable[..., Any], jax.Array, jax.Array, float]] = {
    "matrices": (some_matrices, normal(96, 64), normal(4, 64, 128), 5e-2),
    "classes": (some_classes, normal(40, 64), normal(384, 64) / 8, 2e-2),
}
"""A call, the rows that every device has, what is split by its first dimension, and a tolerance."""


@pytest.mark.usefixtures("one_device_at_a_time")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_each_device_has_some(name: str, check_vma: bool):
    """Results and both gradients. Nothing is exchanged: the interpreter runs one device at a time."""
    call, rows, parts, tolerance = CALLS[name]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    # The same rows for both devices, so that their gradients are apart.
    placed = (jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (jnp.concatenate([rows, rows]), parts))

    def share(platform: str, *arrays: Any) -> Any:
        out, pull_back = jax.vjp(functools.partial(call, platform), *arrays)
        return *out, *pull_back(tuple(jnp.ones_like(each) for each in out))

    def run(platform: str, *arrays: Any) -> Any:
        share_of = functools.partial(share, platform)
        split = jax.shard_map(share_of, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
        return jax.block_until_ready(jax.jit(split)(*arrays))

    arrays = tuple(placed)
    for got, want in zip(run("pallas", *arrays), run("xla", *arrays), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=tolerance)
