"""Configs of the Triton kernels: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device, Direction
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


type ForwardParams = TritonGroupedForwardParams | TritonGatedForwardParams
type BackwardParams = TritonGroupedBackwardParams | TritonGatedBackwardParams
type Params = ForwardParams | BackwardParams

# Tiles of rows by the kind of a call. Measured on an H100 in bfloat16 with 8 to 256 groups
# (benchmarks/results/nvidia-h100-80gb-hbm3); a card whose shared memory does not hold the first takes the next. Where
# no step of the sum divides the sizes ("odd"), the masks of both operands take registers.
_TILES: dict[str, tuple[tuple[int, ...], ...]] = {
    "small groups": ((16, 128, 128, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 4, 3), (16, 256, 64, 4, 4)),
    "large groups": ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4)),
    "odd, small groups": ((16, 64, 64, 4, 3), (16, 64, 32, 4, 3)),
    "odd, large groups": ((64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 128, 32, 8, 3)),
    "float32, small groups": ((16, 64, 64, 4, 3), (16, 128, 32, 4, 3)),
    "float32, large groups": ((64, 64, 32, 4, 3), (64, 128, 32, 8, 2), (32, 64, 32, 4, 3)),
}
# On compute capability 12.x the operands of MMAs are in registers, too, beside 128 sums of a thread of four warps: in
# steps of 64 elements of transposed matrices it spilled 96 bytes.
_TRANSPOSED_ON_12 = ((128, 128, 64, 8, 3), *_TILES["large groups"][2:])
# The programs of a gated forward kernel have two sums of the tile's size.
_GATED_TILES: dict[str, tuple[tuple[int, ...], ...]] = {
    "small groups": ((16, 64, 128, 4, 3), (16, 128, 64, 4, 3), (16, 64, 64, 4, 4)),
    "large groups": ((128, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 3)),
    "odd, small groups": ((16, 64, 32, 4, 3), (16, 32, 32, 4, 3)),
    "odd, large groups": ((64, 64, 32, 8, 3), (32, 64, 32, 4, 2)),
    "float32, small groups": ((16, 64, 32, 4, 3), (16, 32, 64, 4, 3)),
    "float32, large groups": ((64, 64, 32, 8, 2), (32, 64, 32, 4, 2)),
}
# The gradient of lhs reads the matrices along their rows, which a fourth stage hides better.
_OF_LHS = ((128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4))
_OUTER = ((128, 128, 32, 4, 4), (128, 128, 32, 4, 3), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4))

SMALL_GROUP = 24
"""Rows of a mean group up to which its tiles have the fewest rows that tensor cores take."""

# Registers of a thread that the sums of a gated op may take on cards without wgmma: operands of its matmuls are in
# registers, too. More spilled in every kernel of rows that was compiled for an A100.
MAX_SUMS = 64


def listed_params(inputs: MatmulInputs, device: Device, direction: Direction) -> list[Params]:
    """Params worth measuring, best guess first."""
    is_gated, is_small = inputs.up is not None, inputs.rows <= SMALL_GROUP * max(inputs.groups, 1)
    is_float32 = inputs.lhs.dtype.itemsize == 4
    kind = "float32, " if is_float32 else "odd, " if inputs.k % 32 or inputs.n % 32 else ""
    kind += "small groups" if is_small else "large groups"
    listed: list[Params]
    if direction == "forward":
        numbers = (_GATED_TILES if is_gated else _TILES)[kind]
        on_12 = device.capability is not None and device.capability[0] == 12
        if on_12 and not is_gated and inputs.transpose_rhs and kind == "large groups":
            numbers = _TRANSPOSED_ON_12
        tiles = [TritonTile(*each) for each in numbers]
        listed = [TritonGatedForwardParams(tile) if is_gated else TritonGroupedForwardParams(tile) for tile in tiles]
    else:
        of_lhs = [TritonTile(*each) for each in (_OF_LHS if kind == "large groups" else _TILES[kind])]
        # Few rows of a group are one short step of the sum.
        depth, outer = 16 if is_small else 32, _TILES["float32, large groups"] if is_float32 else _OUTER
        of_rhs = [TritonTile(rows, columns, depth, *rest) for rows, columns, _, *rest in outer]
        make = TritonGatedBackwardParams if is_gated else TritonGroupedBackwardParams
        count = max(len(of_lhs), len(of_rhs))
        listed = [make(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in range(count)]
    has_wgmma = device.capability is not None and device.capability[0] == 9
    # The error function, and tanh, take some dozens of registers beside both sums.
    if not is_gated or (has_wgmma and (direction == "backward" or inputs.activation not in ("gelu", "tanh"))):
        return listed
    return [each for each in listed if _sums(each) <= MAX_SUMS] or listed[-1:]


def _sums(params: Params) -> int:
    """Registers of a thread of a gated op's kernels of rows that sums take."""
    tile, count = (
        (params.tile, 2)
        if isinstance(params, TritonGroupedForwardParams | TritonGatedForwardParams)
        else (params.lhs, 1)
    )
    return count * tile.rows * tile.columns // (32 * tile.num_warps)


def footprints(inputs: MatmulInputs, params: Params) -> list[Footprint]:
    """Threads, shared memory and the greatest number of blocks of each kernel."""
    tiles: dict[str, TritonTile | None]
    if isinstance(params, TritonGroupedForwardParams | TritonGatedForwardParams):
        tiles = {"forward": params.tile}
    else:
        recompute = params.recompute if isinstance(params, TritonGatedBackwardParams) else None
        tiles = {"forward": recompute, "lhs": params.lhs, "rhs": params.rhs}
    found = []
    for name, tile in tiles.items():
        if tile is None:
            continue
        if name == "rhs":
            blocks = inputs.matrices * -(-inputs.k // tile.rows) * -(-inputs.n // tile.columns)
        else:
            columns = inputs.n if name == "forward" else inputs.k
            blocks = (inputs.rows // tile.rows + inputs.matrices + 2) * -(-columns // tile.columns)
        # The forward kernel has a tile of each matrix.
        matrices = len(inputs.weights) if name == "forward" else 1
        elements = tile.num_stages * (tile.rows + matrices * tile.columns) * tile.depth
        shared = elements * inputs.lhs.dtype.itemsize
        found.append(Footprint(blocks=blocks, threads=32 * tile.num_warps, shared_bytes=shared))
    return found
