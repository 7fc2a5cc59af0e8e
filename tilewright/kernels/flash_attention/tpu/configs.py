"""Configs of the kernels for TPUs that are worth measuring, best guess first.

The order is that of libtpu's simulator at 4096 queries and keys (``tests/aot_tpu/test_flash_attention.py``); nothing
was measured on a TPU.
"""

import numpy as np

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.tpu.params import TpuTiles
from tilewright.kernels.tpu.device import LANES
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.known_devices import chip_of

# (block_q, block_k, unit_q, unit_k). Units of 1024 keys have the fewest corrections of O; narrow ones of the backward
# pass spill less, of which a unit holds three arrays. Float32 products take three times the registers and six times the
# code.
_FORWARD = ((1024, 1024, 256, 1024), (1024, 1024, 512, 1024), (512, 1024, 256, 1024), (512, 512, 256, 512))
_NARROW_FORWARD = ((1024, 1024, 128, 1024), *_FORWARD)
_BACKWARD = ((1024, 1024, 256, 512), (1024, 1024, 256, 1024), (512, 1024, 256, 512), (512, 512, 256, 512))
_FLOAT32 = ((256, 512, 128, 512), (512, 512, 128, 512), (256, 256, 128, 256))


def listed_tiles(inputs: AttentionInputs, device: Device, direction: Direction) -> list[TpuTiles]:
    """All configs for a call, best guess first."""
    chip = chip_of(device)
    wide = chip is None or chip.name not in ("v5e", "v5p")
    if inputs.dtype == np.float32:
        sizes: tuple[tuple[int, int, int, int], ...] = _FLOAT32
    elif direction == "forward":
        sizes = _FORWARD if wide else _NARROW_FORWARD
    else:
        sizes = _BACKWARD
    # The systolic array is 256 wide, on v5e and v5p 128: columns of ones are free where the values leave some unused.
    used = -(-inputs.value_dim // LANES)
    sums = inputs.value_dim % LANES != 0 or (wide and used % 2 == 1)
    return [TpuTiles(*size, sums_by_matmul=sums) for size in sizes]
