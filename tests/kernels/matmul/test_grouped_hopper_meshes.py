"""The Hopper kernels of the grouped matmul, interpreted, on parts of the matrices in a shard_map, beside XLA."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.flash_attention.test_pallas_transforms import one_device_at_a_time
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.modules import grouped_matmul
from tilewright.ops.types import Device

__all__ = ["one_device_at_a_time"]  # a fixture


@pytest.fixture(autouse=True)
def interpreted(on_an_h100: Device) -> Iterator[None]:
    with interpret_mosaic():
        yield


@pytest.mark.usefixtures("one_device_at_a_time")
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_has_some_matrices(check_vma: bool):
    """Forward and both gradients. Nothing is exchanged: the interpreter runs one device at a time."""
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.standard_normal(shape), "bfloat16") for shape in ((96, 64), (4, 64, 128)))
    sizes = jnp.asarray([20, 0, 40, 30])
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    # The same rows for both devices, so that their gradients are apart.
    both, rhs = (jax.device_put(x, NamedSharding(mesh, P("experts"))) for x in (jnp.concatenate([lhs, lhs]), rhs))

    def share(platform: str, lhs: Any, rhs: Any) -> Any:
        first = jax.lax.axis_index("experts") * rhs.shape[0]
        product = functools.partial(grouped_matmul, group_sizes=sizes, group_offset=first, platform=platform)
        out, pull_back = jax.vjp(product, lhs, rhs)
        return out, *pull_back(jnp.ones_like(out))

    def run(platform: str) -> Any:
        split = jax.shard_map(
            functools.partial(share, platform),
            mesh=mesh,
            in_specs=(P("experts"), P("experts")),
            out_specs=P("experts"),
            check_vma=check_vma,
        )
        return jax.block_until_ready(jax.jit(split)(both, rhs))

    for got, want in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=5e-2)
