"""A kernel that does not say how it is split, in a program whose arrays XLA splits over devices."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.ops import Kernel
from tilewright.ops.lowering import call


class Doubled(Kernel[int, Any]):
    """Twice an array, by a Pallas kernel."""

    def run(self, x: Any, *, cfg: int) -> Any:
        def double(source: Any, target: Any) -> None:
            target[...] = 2 * source[...]

        return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def heuristic_cfg(self, inv: Any) -> int:
        return 1


class Plain(Doubled):
    """The same in operations that XLA splits."""

    def run(self, x: Any, *, cfg: int) -> Any:
        return 2 * x


def said(kernel: Any, axis: AxisType, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    call._warn_of_whole.cache_clear()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,), devices=jax.devices()[:2])
    rows = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    with caplog.at_level(logging.WARNING, "tilewright"):
        for added in (0, 1):  # another program with the same call
            found = jax.jit(lambda x: kernel(x + added))(rows)  # noqa: B023
            np.testing.assert_array_equal(found, 2 * (np.arange(8.0) + added))
    return [record.getMessage() for record in caplog.records]


def test_a_warning_says_once_that_every_device_computes_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = said(Doubled("tests.doubled_whole"), AxisType.Auto, caplog)
    assert message.startswith("tests.doubled_whole forward: every device gathers its operands and computes the whole")
    assert "jax.shard_map" in message


def test_it_says_nothing_where_xla_can_split_the_operations(caplog: pytest.LogCaptureFixture) -> None:
    assert said(Plain("tests.doubled_plain"), AxisType.Auto, caplog) == []


def test_nor_inside_shard_map(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Doubled("tests.doubled_part")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    part = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert said(part, AxisType.Auto, caplog) == []
