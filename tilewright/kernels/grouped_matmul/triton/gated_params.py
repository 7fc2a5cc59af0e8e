"""Configs of the Triton kernels of the gated grouped matmul: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs
from tilewright.kernels.grouped_matmul.triton import params as grouped
from tilewright.kernels.grouped_matmul.triton.params import SMALL_GROUP, TritonGroupedBackwardParams
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.TritonGatedForwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonGatedForwardParams:
    """Config of the forward kernel, whose programs have two sums of the tile's size."""

    tile: TritonTile


@stable_id("tilewright/grouped_matmul.TritonGatedBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonGatedBackwardParams:
    """Config of the backward pass.

    Attributes:
      lhs, rhs: of the kernels of the gradients of lhs, and of gate and up.
      recompute: the forward tile by which the pre-activations are computed again; None to use those that were kept,
        which under ``jax.jit`` are otherwise not.
    """

    lhs: TritonTile
    rhs: TritonTile
    recompute: TritonTile | None = None


type GatedParams = TritonGatedForwardParams | TritonGatedBackwardParams

_SMALL_GROUPS = ((16, 64, 128, 4, 3), (16, 128, 64, 4, 3), (16, 64, 64, 4, 4))
_LARGE_GROUPS = ((128, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 3))
_ODD = ((64, 64, 32, 8, 3), (32, 64, 32, 4, 2))
_ODD_SMALL_GROUPS = ((16, 64, 32, 4, 3), (16, 32, 32, 4, 3))
_FLOAT32 = ((64, 64, 32, 8, 2), (32, 64, 32, 4, 2))
_FLOAT32_SMALL_GROUPS = ((16, 64, 32, 4, 3), (16, 32, 64, 4, 3))

# Registers of a thread that sums may take on cards without wgmma: operands of its matmuls are in registers, too. More
# spilled in every kernel of rows that was compiled for an A100.
MAX_SUMS = 64


def listed_params(inputs: GatedInputs, device: Device, direction: Direction) -> list[GatedParams]:
    """Params worth measuring, best guess first."""
    listed = _listed(inputs, direction)
    has_wgmma = device.capability is not None and device.capability[0] == 9
    # The error function takes some dozens of registers beside both sums.
    if has_wgmma and (direction == "backward" or inputs.activation != "gelu"):
        return listed
    return [each for each in listed if _sums(each) <= MAX_SUMS] or listed[-1:]


def _sums(params: GatedParams) -> int:
    """Registers of a thread of the kernels of rows that sums take."""
    tile, count = (params.tile, 2) if isinstance(params, TritonGatedForwardParams) else (params.lhs, 1)
    return count * tile.rows * tile.columns // (32 * tile.num_warps)


def _listed(inputs: GatedInputs, direction: Direction) -> list[GatedParams]:
    if direction == "backward":
        return [
            TritonGatedBackwardParams(each.lhs, each.rhs)
            for each in grouped.listed_params(inputs.product(inputs.gate), direction)
            if isinstance(each, TritonGroupedBackwardParams)
        ]
    tiles: tuple[tuple[int, ...], ...]
    is_small = inputs.rows <= SMALL_GROUP * max(inputs.groups, 1)
    if inputs.lhs.dtype.itemsize == 4:
        tiles = _FLOAT32_SMALL_GROUPS if is_small else _FLOAT32
    elif inputs.k % 32 or inputs.n % 32:
        tiles = _ODD_SMALL_GROUPS if is_small else _ODD
    else:
        tiles = _SMALL_GROUPS if is_small else _LARGE_GROUPS
    return [TritonGatedForwardParams(TritonTile(*tile)) for tile in tiles]


def footprints(inputs: GatedInputs, params: GatedParams) -> list[Footprint]:
    """Threads, shared memory and the greatest number of blocks of each kernel."""
    found = []
    forward = params.tile if isinstance(params, TritonGatedForwardParams) else params.recompute
    if forward is not None:
        both = forward.num_stages * (forward.rows + 2 * forward.columns) * forward.depth * inputs.lhs.dtype.itemsize
        blocks = (inputs.rows // forward.rows + inputs.matrices + 2) * -(-inputs.n // forward.columns)
        found.append(Footprint(blocks=blocks, threads=32 * forward.num_warps, shared_bytes=both))
    if isinstance(params, TritonGatedBackwardParams):
        backward = TritonGroupedBackwardParams(params.lhs, params.rhs)
        found += grouped.footprints(inputs.product(inputs.gate), backward)
    return found
