"""The Hopper kernels of the cross-entropy, interpreted, on parts of a vocabulary in a shard_map, beside XLA."""

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
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.ops.types import Device

__all__ = ["one_device_at_a_time"]  # a fixture


@pytest.fixture(autouse=True)
def interpreted(on_an_h100: Device) -> Iterator[None]:
    with interpret_mosaic():
        yield


@pytest.mark.usefixtures("one_device_at_a_time")
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_has_some_classes(check_vma: bool):
    """Statistics and both gradients. Nothing is exchanged: the interpreter runs one device at a time."""
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.standard_normal(shape), "bfloat16") for shape in ((40, 64), (64, 384)))
    labels = jnp.asarray(random.integers(-5, 190, 40), jnp.int32)
    mesh = jax.make_mesh((2,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    # The same tokens for both devices, so that their gradients are apart.
    both = jax.device_put(jnp.concatenate([x, x]), NamedSharding(mesh, P("vocab")))
    weight = jax.device_put(weight / 8, NamedSharding(mesh, P(None, "vocab")))

    def share(platform: str, x: Any, weight: Any) -> Any:
        kernel = LinearCrossEntropy()

        def statistics(x: Any, weight: Any) -> Any:
            options = {"axis_name": "vocab", "label_smoothing": 0.1, "platform": platform}
            return kernel(kernel.prepare(x, weight, labels, **options))

        out, pull_back = jax.vjp(statistics, x, weight)
        d_x, d_weight = pull_back(tuple(jnp.ones_like(each) for each in out))
        return *out, d_x, d_weight.T

    def run(platform: str) -> Any:
        split = jax.shard_map(
            functools.partial(share, platform),
            mesh=mesh,
            in_specs=(P("vocab"), P(None, "vocab")),
            out_specs=P("vocab"),
            check_vma=check_vma,
        )
        return jax.block_until_ready(jax.jit(split)(both, weight))

    for got, want in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=2e-2)
