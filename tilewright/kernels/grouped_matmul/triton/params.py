"""Configs of the Triton kernels of the grouped matmul: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.TritonGroupedForwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonGroupedForwardParams:
    """Config of the forward kernel."""

    tile: TritonTile


@stable_id("tilewright/grouped_matmul.TritonGroupedBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonGroupedBackwardParams:
    """Config of the backward kernels: those of the gradients of lhs and of rhs."""

    lhs: TritonTile
    rhs: TritonTile


type Params = TritonGroupedForwardParams | TritonGroupedBackwardParams

# Measured on an H100 in bfloat16 with 8 to 256 groups (benchmarks/results/nvidia-h100-80gb-hbm3); a card whose shared
# memory does not hold the first takes the next.
_SMALL_GROUPS = ((16, 128, 128, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 4, 3), (16, 256, 64, 4, 4))
_LARGE_GROUPS = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4))
# The gradient of lhs reads the matrices along their rows, which a fourth stage hides better.
_OF_LHS = ((128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4))
_OUTER = ((128, 128, 32, 4, 4), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4))
_ODD = ((64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 128, 32, 8, 3))
_ODD_SMALL_GROUPS = ((16, 64, 64, 4, 3), (16, 64, 32, 4, 3))
"""For sizes that no step of the sum divides: the masks of both operands take registers."""
_FLOAT32_SMALL_GROUPS = ((16, 64, 64, 4, 3), (16, 128, 32, 4, 3))
_FLOAT32 = ((64, 64, 32, 4, 3), (64, 128, 32, 8, 2), (32, 64, 32, 4, 3))

SMALL_GROUP = 24
"""Rows of a mean group up to which its tiles have the fewest rows that tensor cores take."""


def listed_params(inputs: GroupedInputs, direction: Direction) -> list[Params]:
    """Params worth measuring, best guess first."""
    by_rows: tuple[tuple[int, ...], ...]
    outer: tuple[tuple[int, ...], ...]
    is_small = inputs.rows <= SMALL_GROUP * max(inputs.groups, 1)
    if inputs.lhs.dtype.itemsize == 4:
        by_rows, outer = _FLOAT32_SMALL_GROUPS if is_small else _FLOAT32, _FLOAT32
    elif inputs.k % 32 or inputs.n % 32:
        by_rows, outer = _ODD_SMALL_GROUPS if is_small else _ODD, _OUTER
    elif is_small:
        by_rows, outer = _SMALL_GROUPS, _OUTER
    else:
        by_rows, outer = _LARGE_GROUPS if direction == "forward" else _OF_LHS, _OUTER
    tiles = [TritonTile(*each) for each in by_rows]
    if direction == "forward":
        return [TritonGroupedForwardParams(tile) for tile in tiles]
    # Few rows of a group are one short step of the sum.
    depth = 16 if is_small else 32
    of_rhs = [TritonTile(rows, columns, depth, *rest) for rows, columns, _, *rest in outer]
    count = max(len(tiles), len(of_rhs))
    return [TritonGroupedBackwardParams(tiles[i % len(tiles)], of_rhs[i % len(of_rhs)]) for i in range(count)]


def footprints(inputs: GroupedInputs, params: Params) -> list[Footprint]:
    """Threads, shared memory and the greatest number of blocks of each kernel."""
    tiles = {"forward": params.tile} if isinstance(params, TritonGroupedForwardParams) else {
        "lhs": params.lhs, "rhs": params.rhs
    }  # fmt: skip
    found = []
    for name, tile in tiles.items():
        if name == "rhs":
            blocks = inputs.matrices * -(-inputs.k // tile.rows) * -(-inputs.n // tile.columns)
        else:
            columns = inputs.n if name == "forward" else inputs.k
            blocks = (inputs.rows // tile.rows + inputs.matrices + 2) * -(-columns // tile.columns)
        shared = tile.shared_bytes(inputs.lhs.dtype.itemsize)
        found.append(Footprint(blocks=blocks, threads=32 * tile.num_warps, shared_bytes=shared))
    return found
