"""Configs of the Triton kernel: params, those worth measuring, and what they take."""

import dataclasses

from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.triton.limits import power_of_two
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.kernels.weight_only.packing import UNIT_BYTES
from tilewright.ops.types import Device
from tilewright.ops.utils.stable_ids import stable_id

MIN_ROWS = 8
"""Rows of the smallest tile: columns of an MMA's result."""

MAX_SPLITS = 16
"""Parts of k at most: their sums are written and read again."""

SPAN = 128
"""Rows of the weight whose sum is scaled at once, where groups allow it."""

FEW_ROWS = 64
"""Rows up to which a call reads the weight once and scales sums."""


@stable_id("tilewright/weight_only.TritonWeightOnlyParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonWeightOnlyParams:
    """Config of the kernel.

    Attributes:
      rows, columns: of a program's part of the result.
      span: rows of the weight whose sum is scaled at once; fewer where a group has fewer.
      spans: of one step of the loop.
      splits: parts of k, whose sums are added up in their order by a second kernel.
      operand_scales: scale elements of the weight, rounded to x's dtype, and not the sums of groups.
      num_warps: warps of a program; with fewer than four, MMAs are of warps and not of warpgroups.
      num_stages: stages of the pipelined loop.
    """

    rows: int
    columns: int
    span: int = 128
    spans: int = 2
    splits: int = 1
    operand_scales: bool = False
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("rows", MIN_ROWS, 256), ("columns", 16, 256), ("span", 32, 512), ("spans", 1, 8), ("num_warps", 1, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not minimum <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from {minimum} to {maximum}, got {self}")
        for name, maximum in (("splits", MAX_SPLITS), ("num_stages", 8)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= maximum:
                raise ValueError(f"{name} must be from 1 to {maximum}, got {self}")
        if type(self.operand_scales) is not bool:
            raise TypeError(f"operand_scales must be a bool, got {self}")


def fitted_span(inputs: WeightOnlyInputs, span: int) -> int:
    """The greatest span up to one that is whole units and divides a group, or is one unit of two groups."""
    unit = inputs.packing.unit
    span = max(min(span, power_of_two(inputs.k)), unit)
    while inputs.group is not None and span > unit and inputs.group % span:
        span //= 2
    return span


def fits_groups(inputs: WeightOnlyInputs) -> bool:
    """True if groups are whole units, or two groups are one."""
    return inputs.group is None or inputs.group % inputs.packing.unit == 0 or inputs.group == inputs.packing.unit // 2


# Tiles of few rows: columns, spans of a step, warps, stages, and programs of a multiprocessor that k is split for (0 to
# leave it whole, which saves the second kernel). Two warps multiply by MMAs of warps, for which x needs no fence; four
# by wgmma on Hopper. Not measured.
_FEW = (
    (64, 2, 2, 4, 2), (32, 2, 2, 6, 0), (64, 2, 2, 6, 2), (64, 2, 2, 6, 1), (32, 2, 2, 8, 0), (64, 2, 4, 6, 0),
    (64, 2, 2, 4, 4), (128, 2, 4, 4, 1), (32, 4, 2, 4, 0), (64, 4, 4, 4, 0),
)  # fmt: skip
_SOME = (
    (256, 1, 8, 4, 1),
    (128, 1, 8, 4, 2),
    (256, 1, 8, 3, 2),
    (256, 1, 16, 4, 1),
    (128, 1, 8, 4, 1),
    (64, 1, 4, 4, 4),
)
# Tiles of many rows: rows, columns, span, warps, stages. Elements of the weight are scaled, for sums are more of them.
_MANY: tuple[tuple[int, ...], ...] = (
    (128, 256, 128, 16, 4), (256, 128, 64, 8, 4), (256, 128, 128, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)  # fmt: skip
_MANY_ON_AMPERE: tuple[tuple[int, ...], ...] = ((128, 64, 64, 4, 3), (64, 64, 64, 4, 3), (64, 32, 64, 2, 3))

CORES = 132
"""Multiprocessors of a device that does not tell."""


def candidates(inputs: WeightOnlyInputs, device: Device) -> list[TritonWeightOnlyParams]:
    """Params worth measuring, best guess first."""
    if inputs.rows > FEW_ROWS:
        return _of_many_rows(inputs, device)
    rows = power_of_two(inputs.rows, MIN_ROWS)
    found = []
    for columns, spans, warps, stages, programs in _FEW if rows <= 16 else _SOME:
        tiles = -(-inputs.n // columns)
        steps = -(-inputs.k // (fitted_span(inputs, SPAN) * spans))
        splits = _splits(programs * (device.cores or CORES) // tiles, steps)
        params = TritonWeightOnlyParams(rows, columns, SPAN, spans, splits, False, warps, stages)
        if params not in found:
            found.append(params)
    return found


def _splits(wanted: int, steps: int) -> int:
    """Parts of k, of two steps at least and if possible of equal sizes: then no step needs a mask."""
    most = max(1, min(wanted, steps // 2, MAX_SPLITS))
    return next((parts for parts in range(most, most // 2, -1) if steps % parts == 0), most)


def _of_many_rows(inputs: WeightOnlyInputs, device: Device) -> list[TritonWeightOnlyParams]:
    shapes = _MANY if device.capability is not None and device.capability[0] == 9 else _MANY_ON_AMPERE
    if inputs.rows <= 128:
        shapes = tuple(each for each in shapes if each[0] <= 128)
    return [
        TritonWeightOnlyParams(rows, columns, span, 1, 1, True, warps, stages)
        for rows, columns, span, warps, stages in shapes
    ]


def footprint(inputs: WeightOnlyInputs, params: TritonWeightOnlyParams) -> Footprint:
    """Threads, shared memory and blocks of the kernel."""
    span = fitted_span(inputs, params.span)
    words = params.columns * span // inputs.packing.unit * UNIT_BYTES
    rows = params.rows * span * inputs.x.dtype.itemsize
    blocks = -(-inputs.n // params.columns) * -(-inputs.rows // params.rows) * params.splits
    return Footprint(
        blocks=blocks,
        threads=32 * params.num_warps,
        shared_bytes=params.num_stages * params.spans * (words + rows),
    )
