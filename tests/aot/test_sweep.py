"""A handful of the random calls of ``tests/every_op/sweep.py``, compiled: they fit a block and pass the compilers."""

import jax
import pytest

import tilewright
from tests.every_op.matrix import every_op
from tests.every_op.sweep import DEVICES, Call, draw, lower
from tilewright.kernels.op.footprint import block_limits
from tilewright.kernels.triton import recorded_launches
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.topology import missing_compiler

pytest.importorskip("triton")

from tilewright.kernels.triton.compiler import report

SEEDS = range(2)


def compiled(call: Call) -> None:
    """Compiles what a call is lowered to, as far as there is a compiler; refused calls have nothing to compile."""
    device = find_device(DEVICES[call.device])
    assert device.device.capability is not None
    limits = block_limits(device.device.capability)
    assert limits is not None

    def compile_all(lowered: jax.stages.Lowered) -> None:
        # Triton's kernels without the plugin, too; what Mosaic GPU's take beyond a block is an error of its own.
        sizes = {each.name: report(each, device.device.capability).shared_bytes for each in launches}
        assert max(sizes.values(), default=0) <= limits.shared_bytes, sizes
        if not missing_compiler(device):
            lowered.compile(device_assignment=target.devices)

    with recorded_launches() as launches, tilewright.target_device(DEVICES[call.device]) as target:
        lower(call, compile_all)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", every_op())
def test_a_handful_compiles(op: str, seed: int, device: str) -> None:
    compiled(draw(op, device, seed))
