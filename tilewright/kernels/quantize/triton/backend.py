"""The Triton backend, on NVIDIA GPUs: codes of a tile with its scales, after a pass for maxima that no tile has."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.quantize.inputs import QuantizeInputs, QuantizeResults
from tilewright.kernels.quantize.quantized import SCALE_BLOCK, exponent, mantissa_bits, scales_shape
from tilewright.kernels.quantize.reference import quantize_reference
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

NATIVE = (8, 9)
"""The compute capability from which on there are instructions that round to float8: before it, integer arithmetic."""

MOST_COLUMNS = 16384
"""Columns of a row that is kept in registers, 32 elements to a thread; of wider rows a pass before finds the maxima."""

KEPT = 64
"""Elements of a tile that a thread may hold; more would spill."""

MOST_PROGRAMS = 1 << 31

MAXIMA = (32, 128)
"""The tile of the pass that finds maxima, with 4 warps."""

MAXIMA_PROGRAMS = 8
"""Programs of that pass for each SM, at least: with more tiles, a program goes over up to ``MAXIMA_STRIP`` of them."""

MAXIMA_STRIP = 16


@stable_id("tilewright/quantize.TritonQuantizeParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonQuantizeParams:
    """Config of the kernel.

    Attributes:
      block_rows, block_columns: the tile of a program.
      num_warps: warps of a program.
      part_rows: rows of a tile that are converted at once, where both orientations are made of it.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    part_rows: int = 32

    def __post_init__(self) -> None:
        limits = {"block_rows": 1024, "block_columns": MOST_COLUMNS, "num_warps": 32, "part_rows": 128}
        for name, maximum in limits.items():
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not 1 <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from 1 to {maximum}, got {self}")


class Tiling(NamedTuple):
    """The parts of a call that decide about tiles.

    Attributes:
      batch, rows, columns: the array as the kernels see it.
      covers: what shares a scale within a tile, as in ``kernels.quantize``.
      transposed: True for both orientations.
      given: True if that is more than a tile, so that a pass before it finds the maxima.
    """

    batch: int
    rows: int
    columns: int
    covers: str
    transposed: bool
    given: bool


def tiling(inputs: QuantizeInputs) -> Tiling:
    """Cuts a call into tiles."""
    shape = tuple(inputs.x.shape)
    covers = "tile" if inputs.is_uniform else "row" if inputs.axis == -1 else "column"
    transposed = inputs.transposed
    has_columns = covers == "column" or transposed or (covers == "tile" and inputs.scaling == "block")
    leading = shape[:-2] if has_columns else ()
    batch, columns = math.prod(leading), shape[-1]
    rows = math.prod(shape[len(leading) : -1])
    fits = covers == "row" and not transposed and power_of_two(columns) <= MOST_COLUMNS
    return Tiling(batch, rows, columns, covers, transposed, inputs.scaling != "block" and not fits)


class TritonQuantize(InferenceBackend[QuantizeInputs, QuantizeResults, TritonQuantizeParams]):
    """Serves float32, bfloat16 and float16, in both orientations at once; the same bits as XLA on a CPU."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonQuantizeParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"format", "scaling", "axis", "block", "power_of_two", "transposed"})

    def forward_reasons(self, inputs: QuantizeInputs, device: Device) -> list[str]:
        reasons = unavailable(device)
        if inputs.x.dtype.name not in ("float32", "bfloat16", "float16"):
            reasons.append(f"x must be float32, bfloat16 or float16, not {inputs.x.dtype}")
        if math.prod(inputs.x.shape) >= 1024 * MOST_PROGRAMS or max(inputs.x.shape) >= MOST_PROGRAMS:
            reasons.append(f"x has too many tiles for one grid: {inputs.x.shape}")
        return reasons

    def candidates(self, inputs: QuantizeInputs, device: Device, direction: Direction) -> Iterable[Any]:
        parts = tiling(inputs)
        if parts.covers == "row" and not parts.transposed and not parts.given:
            return _rows_candidates(inputs, parts, device)
        if parts.transposed:
            pairs = ((8, 16), (8, 32), (16, 32), (4, 16), (16, 64), (8, 64))
            return [TritonQuantizeParams(SCALE_BLOCK, SCALE_BLOCK, warps, rows) for warps, rows in pairs]
        down = SCALE_BLOCK if inputs.scaling == "block" else 64
        across = (64, 128) if parts.covers == "column" else (128, 64) if parts.given else (128,)
        found = [TritonQuantizeParams(down, width, down * width // 1024) for width in across]
        found += [TritonQuantizeParams(down, width, down * width // 512) for width in across]
        return found + ([TritonQuantizeParams(32, 128, 4)] if parts.given else [])

    def config_reasons(
        self, inputs: QuantizeInputs, device: Device, direction: Direction, params: TritonQuantizeParams
    ) -> list[str]:
        parts, reasons = tiling(inputs), []
        rows = min(params.part_rows, params.block_rows) if parts.transposed else params.block_rows
        kept = -(-rows * params.block_columns // (32 * params.num_warps))
        if kept > KEPT:
            reasons.append(f"{kept} elements of each thread do not fit into registers; at most {KEPT} do")
        if parts.transposed and params.block_rows % params.part_rows:
            reasons.append(f"a tile has whole parts, got {params}")
        if parts.given:
            return reasons
        across = SCALE_BLOCK if inputs.scaling == "block" else power_of_two(parts.columns)
        if parts.covers != "column" and params.block_columns != across:
            reasons.append(f"a tile has the {across} columns that share a scale, got {params}")
        if (parts.covers != "row" or parts.transposed) and params.block_rows != SCALE_BLOCK:
            reasons.append(f"a tile has the {SCALE_BLOCK} rows that share a scale, got {params}")
        return reasons

    def forward(self, inputs: QuantizeInputs, params: TritonQuantizeParams) -> QuantizeResults:
        if 0 in inputs.x.shape:
            return quantize_reference(inputs)
        parts, shape = tiling(inputs), tuple(inputs.x.shape)
        x = inputs.x.reshape(1, parts.batch, parts.rows, parts.columns)
        call = functools.partial(_quantized, inputs=inputs.structs, parts=parts, params=params)
        values, scales, *others = over_batch(lambda mapped, _: call(mapped[0]), [x], None)
        first = inputs.result(values.reshape(shape), scales.reshape(scales_shape(inputs.covered, shape)))
        if not inputs.transposed:
            return first
        swapped = (*shape[:-2], shape[-1], shape[-2])
        values, scales = others
        return first, inputs.result(values.reshape(swapped), scales.reshape(scales_shape(inputs.covered, swapped)))


def _rows_candidates(inputs: QuantizeInputs, parts: Tiling, device: Device) -> list[TritonQuantizeParams]:
    """Tiles of whole rows or of blocks of them: about 4096 elements, fewer where there are few rows.

    On an H100 8192 × 4096 bfloat16 took 42 µs with 64 rows of blocks and 8 warps, 35.6 with 32 and 4; rows 41 with two
    and 8 warps, 31.9 with one and 4.
    """
    block = inputs.scaling == "block"
    width = SCALE_BLOCK if block else power_of_two(parts.columns)
    rows = max(4096 // width, 1)
    tiles = -(-parts.columns // SCALE_BLOCK) if block else 1
    while rows > 1 and parts.rows * tiles < 4 * max(device.cores, 1) * rows:
        rows //= 2

    def with_rows(rows: int, each: int) -> TritonQuantizeParams:
        return TritonQuantizeParams(rows, width, min(max(rows * width // (32 * each), 1), 32))

    listed = [with_rows(rows, 32)]
    for other in (rows, rows // 2, 2 * rows, rows // 4):
        listed += [with_rows(other, each) for each in (16, 32, 64) if 1 <= other <= 128]
    return [each for each in dict.fromkeys(listed) if rows * width // (32 * each.num_warps) <= KEPT]


def _quantized(x: jax.Array, inputs: QuantizeInputs, parts: Tiling, params: TritonQuantizeParams) -> Any:
    """Codes and scales of ``[mapped, batch, rows, columns]``, and those of its transpose."""
    from tilewright.kernels.quantize.triton import kernels

    mapped, batch, rows, columns = x.shape
    of_first, of_second = _maxima(x, inputs, parts) if parts.given else (None, None)
    # Elements of the last two axes that share a scale, as the kernels store scales.
    covered = inputs.covered if inputs.scaling != "tensor" else (None, None)
    codes, native = inputs.codes, (current_device().capability or NATIVE) >= NATIVE
    # Triton takes no array of e4m3 on a GPU without instructions for it.
    as_bytes = inputs.format == "e4m3" and not native
    dtype = jnp.dtype(jnp.int8) if as_bytes else codes.dtype
    absent = jnp.zeros((0,), jnp.int32)
    shapes = [x.shape] + ([(mapped, batch, columns, rows)] if parts.transposed else [])
    unit = math.gcd(rows, 16) if parts.transposed else 1
    found = launch(
        kernels.quantize_both if parts.transposed else kernels.quantize,
        [x, *(absent if each is None else each for each in (of_first, of_second)[: len(shapes)])],
        [
            each
            for shape in shapes
            for each in (
                jax.ShapeDtypeStruct(shape, dtype),
                jax.ShapeDtypeStruct(scales_shape(covered, shape), jnp.float32),
            )
        ],
        grid=[mapped * batch * -(-rows // params.block_rows) * -(-columns // params.block_columns)],
        scalars={"row_units" if parts.transposed else "rows": rows // unit},
        constants={
            "columns": columns,
            "block_rows": params.block_rows,
            "block_columns": params.block_columns,
            "covers": parts.covers,
            "given": parts.given,
            "format": inputs.format,
            "largest": codes.largest,
            "mantissa": mantissa_bits(codes.largest),
            "exponent": exponent(codes.largest),
            "power_of_two": inputs.power_of_two,
            "native": native,
            "flushes": inputs.x.dtype != jnp.float16,  # of which all are normal numbers in float32
        }
        | ({"row_unit": unit, "part_rows": params.part_rows} if parts.transposed else {}),
        num_warps=params.num_warps,
        num_stages=1,
    )
    values = [lax.bitcast_convert_type(each, codes.dtype) if as_bytes else each for each in found[::2]]
    return [each for pair in zip(values, (_one_of(s, inputs) for s in found[1::2]), strict=True) for each in pair]


def _one_of(scales: jax.Array, inputs: QuantizeInputs) -> jax.Array:
    """Scales without the batch that a whole array was cut into: all of its parts have the same."""
    return scales[:, :1] if inputs.scaling == "tensor" else scales


def _maxima(x: jax.Array, inputs: QuantizeInputs, parts: Tiling) -> tuple[Any, Any]:
    """The greatest bits of every row, of every column or of all, for both orientations: ``[mapped · batch, ...]``."""
    from tilewright.kernels.quantize.triton import kernels

    mapped, batch, rows, columns = x.shape
    by_row = parts.covers == "row"
    by_column = parts.covers == "column" or (parts.transposed and by_row)
    block_rows, block_columns = MAXIMA
    down, across = -(-rows // block_rows), -(-columns // block_columns)
    programs = max(MAXIMA_PROGRAMS * current_device().cores, 1)
    strip = min(max(mapped * batch * down * across // programs, 1), MAXIMA_STRIP)
    strips = -(-down // strip)
    shapes = (
        (mapped * batch, across, rows) if by_row else (1,),
        (mapped * batch, strips, columns) if by_column else (1,) if by_row else (mapped * batch, strips, across),
    )
    of_rows, of_columns = launch(
        kernels.maxima,
        [x],
        [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        grid=[mapped * batch * strips * across],
        scalars={"rows": rows},
        constants={
            "columns": columns,
            "block_rows": block_rows,
            "block_columns": block_columns,
            "strip": strip,
            "by_row": by_row,
            "by_column": by_column,
            "format": inputs.format,
        },
    )
    if not by_row and not by_column:
        whole = jnp.max(of_columns.reshape(mapped, -1), 1)
        return jnp.repeat(whole, batch), None
    of_row = jnp.max(of_rows, 1) if by_row else None
    of_column = jnp.max(of_columns, 1) if by_column else None
    return (of_row, of_column) if by_row else (of_column, None)
