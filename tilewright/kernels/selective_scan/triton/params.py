"""Configs of the Triton kernels of the selective scan."""

import dataclasses
import itertools
from collections.abc import Iterator

from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device
from tilewright.ops.utils.stable_ids import stable_id

MAX_STATE = 128
"""The largest state: a thread would have more of it than registers."""

STATES = 16
"""Elements of the state that a thread has."""

MAX_ELEMENTS = (1 << 31) - 1
"""Elements of a piece in an array, at most: places in it are in 32 bits."""

SUBPARTITIONS = 4
"""Parts of an SM, each with a unit of its own for exponentials."""

MIN_PIECE = 256
"""Tokens of a piece of a sequence, at least: every piece is computed twice."""


@stable_id("tilewright/selective_scan.ScanParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ScanParams:
    """Config of the kernels of one direction.

    Attributes:
      block_d: channels of a program.
      block_t: tokens that are loaded at once.
      num_warps: warps of a program.
      piece: tokens of a piece of a sequence; 0 for whole sequences.
    """

    block_d: int = 32
    block_t: int = 8
    num_warps: int = 1
    piece: int = 0

    def __post_init__(self) -> None:
        for name, maximum in (("block_d", 512), ("block_t", 8), ("num_warps", 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= maximum or value & (value - 1):
                raise ValueError(f"ScanParams needs a power of two from 1 to {maximum}, got {name}={value!r}")
        if type(self.piece) is not int or self.piece < 0 or self.piece % 8:
            raise ValueError(f"ScanParams needs a multiple of 8 or 0, got piece={self.piece!r}")


def piece_size(inputs: SelectiveScanInputs, params: ScanParams) -> int:
    """Tokens of a piece: whole chunks."""
    most = MAX_ELEMENTS // max(inputs.channels, inputs.groups * inputs.state) // inputs.chunk * inputs.chunk
    whole = -(-min(params.piece or inputs.length, inputs.length) // inputs.chunk) * inputs.chunk
    return max(min(whole, most), inputs.chunk)


def heuristic(inputs: SelectiveScanInputs, device: Device, block_t: int) -> ScanParams:
    """One warp with the states of its channels in registers; pieces where there are few channels."""
    block_d = _channels_of_a_warp(inputs)
    warps = inputs.sequences * inputs.groups * -(-(inputs.channels // inputs.groups) // block_d)
    units = SUBPARTITIONS * max(device.cores, 1)
    piece = 0
    if warps < 2 * units:
        # Twice the work for 4 warps each, which hide each other's loads.
        pieces = -(-4 * units // max(warps, 1))
        size = max(-(-inputs.length // (pieces * inputs.chunk)) * inputs.chunk, MIN_PIECE)
        piece = size if 2 * size < inputs.length else 0
    return ScanParams(block_d, block_t, 1, piece)


def candidates(inputs: SelectiveScanInputs, device: Device, block_t: int) -> Iterator[ScanParams]:
    """Params with more or fewer channels and tokens of a program, and other pieces; the heuristic's first."""
    best = heuristic(inputs, device, block_t)
    pieces = dict.fromkeys((best.piece, 0, *(size for size in (512, 1024, 2048) if 2 * size < inputs.length)))
    shapes = [(best.block_d, 1), (2 * best.block_d, 2), (4 * best.block_d, 4), (max(best.block_d // 2, 1), 1)]
    times = dict.fromkeys((best.block_t, 4, 2))
    for piece, (block_d, warps), size in itertools.product(pieces, shapes, times):
        yield ScanParams(block_d, size, warps, piece)


def _channels_of_a_warp(inputs: SelectiveScanInputs) -> int:
    per_group = inputs.channels // inputs.groups
    return min(max(32 * STATES // power_of_two(inputs.state), 1), 32, power_of_two(per_group))
