# mypy: disable-error-code="assignment"
"""Quantising in Triton: maxima of magnitudes, and tiles of codes in one orientation or both.

  tile     elements of ``[batch, rows, columns]`` in float32
  bits     magnitudes as integers, which are in the order of the numbers with NaN last; 0 where they do not count
  amax     the greatest of the bits that share a scale, from the tile, or given for every row, every column or all

Codes are stored as bytes. A tile is transposed as it was loaded, before it is rounded: ``tl.trans`` of float8 is wrong
on Hopper in several versions of Triton.
Grids: a program for each tile, those of a batch element's row of tiles beside each other.
"""

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
"""The bits of infinity: those of NaN are greater."""

NORMAL = tl.constexpr(0x00800000)
"""The bits of the least normal number."""

TINY = tl.constexpr(2.0**-126)
"""The least normal number."""

INTEGERS = tl.constexpr(12582912.0)
"""1.5 · 2²³: added to a number below 2²² it leaves the nearest integer in the lowest bits, ties to even."""


@triton.jit
def _magnitudes(x, format: tl.constexpr):
    """The bits of magnitudes that a scale is made of: not of infinities, nor of NaN where it has a code."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    dropped = bits == INFINITE if format == "int8" else bits >= INFINITE
    return tl.where(dropped, 0, bits)


@triton.jit
def _scale(bits, largest: tl.constexpr, mantissa: tl.constexpr, exponent: tl.constexpr, power_of_two: tl.constexpr):
    """A scale and its reciprocal, as ``reference.scales_of`` has them."""
    amax = bits.to(tl.float32, bitcast=True)
    if power_of_two:
        biased = tl.maximum(((bits + (0x7FFFFF - mantissa)) >> 23) - exponent, 1)
        scale = tl.where(bits > INFINITE, amax, (biased << 23).to(tl.float32, bitcast=True))
        inverse = tl.where(bits > INFINITE, amax, ((254 - biased) << 23).to(tl.float32, bitcast=True))
    else:
        reciprocal: tl.constexpr = 1.0 / largest
        scale = amax * reciprocal
        scale = tl.where(scale < TINY, TINY, scale)  # keeps a NaN
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(bits == 0, 1.0, scale), tl.where(bits == 0, 1.0, inverse)


@triton.jit
def _rounded_bits(y, format: tl.constexpr):
    """Codes of float8 by integer arithmetic, for GPUs without an instruction for it."""
    shift: tl.constexpr = 20 if format == "e4m3" else 21
    least: tl.constexpr = 2.0**-6 if format == "e4m3" else 2.0**-14
    # A float32 that has as many bits behind the point as the smallest codes: adding it rounds, ties to even.
    unit: tl.constexpr = 2.0**14 if format == "e4m3" else 2.0**7
    rebias: tl.constexpr = 120 << 3 if format == "e4m3" else 112 << 2
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    normal = ((magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift) - rebias
    small = (size + unit).to(tl.int32, bitcast=True) - ((141 if format == "e4m3" else 134) << 23)
    code = tl.where(size < least, small, normal)
    code = tl.where(magnitude > INFINITE, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _codes(x, inverse, format: tl.constexpr, largest: tl.constexpr, native: tl.constexpr):
    """The bytes of the codes of a tile."""
    tiny = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < NORMAL
    y = tl.where(tiny, x * 0.0, x) * inverse
    y = tl.clamp(y, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    if format == "int8":
        found = ((y + INTEGERS).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
        return tl.where(y != y, 0, found).to(tl.int8)
    if native:
        kind: tl.constexpr = tl.float8e4nv if format == "e4m3" else tl.float8e5
        return y.to(kind).to(tl.int8, bitcast=True)
    return _rounded_bits(y, format)


@triton.jit
def _place(rows, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, strip: tl.constexpr):
    """The batch element, the first row and the tile of columns of a program."""
    across: tl.constexpr = (columns + block_columns - 1) // block_columns
    down = tl.cdiv(rows, block_rows * strip)
    tile = tl.program_id(0)
    return tile // across // down, tile // across % down, tile % across


@triton.jit
def quantize(
    x,
    amax,
    amax_transposed,
    rows,
    values,
    scales,
    values_transposed,
    scales_transposed,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    covers: tl.constexpr,
    covers_transposed: tl.constexpr,
    given: tl.constexpr,
    format: tl.constexpr,
    largest: tl.constexpr,
    mantissa: tl.constexpr,
    exponent: tl.constexpr,
    power_of_two: tl.constexpr,
    native: tl.constexpr,
):
    """Writes the codes and scales of a tile.

    ``covers`` says what shares a scale: "row" the tile's elements of a row, "column", "tile", or "all" elements of the
    batch element; ``covers_transposed`` is "" for one orientation, or in the tile's terms what the other one's share.
    With ``given`` the maxima are of whole rows, columns or arrays, and are operands.
    """
    batch, row_tile, column_tile = _place(rows, columns, block_rows, block_columns, 1)
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (columns + block_columns - 1) // block_columns
    row = row_tile * block_rows + tl.arange(0, block_rows)[:, None]
    column = column_tile * block_columns + tl.arange(0, block_columns)[None, :]
    inside = (row < rows) & (column < columns)
    at = (batch.to(tl.int64) * rows + row) * columns + column
    loaded = tl.load(x + at, mask=inside, other=0.0)
    tile = loaded.to(tl.float32)

    if covers == "row":
        index = batch.to(tl.int64) * rows + row
        if given:
            bits = tl.load(amax + index, mask=row < rows, other=0)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            tl.store(scales + index, scale, mask=(row < rows) & (column_tile == 0))
        else:
            bits = tl.max(_magnitudes(tile, format), 1, keep_dims=True)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            tl.store(scales + index * column_tiles + column_tile, scale, mask=row < rows)
    elif covers == "column":
        if given:
            index = batch.to(tl.int64) * columns + column
            bits = tl.load(amax + index, mask=column < columns, other=0)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            tl.store(scales + index, scale, mask=(column < columns) & (row_tile == 0))
        else:
            bits = tl.max(_magnitudes(tile, format), 0, keep_dims=True)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            index = (batch.to(tl.int64) * row_tiles + row_tile) * columns + column
            tl.store(scales + index, scale, mask=column < columns)
    else:
        first = tl.zeros((1, 1), tl.int32)
        if given:
            bits = tl.load(amax + batch + first)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            tl.store(scales + batch + first, scale, mask=(first + row_tile + column_tile) == 0)
        else:
            bits = tl.max(tl.max(_magnitudes(tile, format), 1, keep_dims=True), 0, keep_dims=True)
            scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
            index = (batch.to(tl.int64) * row_tiles + row_tile) * column_tiles + column_tile
            tl.store(scales + index + first, scale)
            if covers_transposed != "":
                index = (batch.to(tl.int64) * column_tiles + column_tile) * row_tiles + row_tile
                tl.store(scales_transposed + index + first, scale)
    _store(values, at, _codes(tile, inverse, format, largest, native), inside)

    if covers_transposed != "":
        down = row_tile * block_rows + tl.arange(0, block_rows)[None, :]
        across = column_tile * block_columns + tl.arange(0, block_columns)[:, None]
        turned = tl.trans(loaded).to(tl.float32)
        if covers_transposed == "column":
            index = batch.to(tl.int64) * columns + across
            if given:
                bits = tl.load(amax_transposed + index, mask=across < columns, other=0)
                scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
                tl.store(scales_transposed + index, scale, mask=(across < columns) & (row_tile == 0))
            else:
                bits = tl.max(_magnitudes(turned, format), 1, keep_dims=True)
                scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
                tl.store(scales_transposed + index * row_tiles + row_tile, scale, mask=across < columns)
        at = (batch.to(tl.int64) * columns + across) * rows + down
        codes = _codes(turned, inverse, format, largest, native)
        _store(values_transposed, at, codes, (down < rows) & (across < columns))


@triton.jit
def _store(pointer, at, codes, inside):
    tl.store((pointer + at).to(tl.pointer_type(tl.int8), bitcast=True), codes, mask=inside)


@triton.jit
def maxima(
    x,
    rows,
    of_rows,
    of_columns,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    strip: tl.constexpr,
    by_row: tl.constexpr,
    by_column: tl.constexpr,
    format: tl.constexpr,
):
    """Writes the greatest bits of ``strip`` tiles of rows: of each row and of each column, or of all in one number.

    ``of_rows`` is [batch, column tiles, rows]; ``of_columns`` is [batch, strips, columns], or where neither rows nor
    columns are asked for [batch, strips, column tiles].
    """
    batch, part, column_tile = _place(rows, columns, block_rows, block_columns, strip)
    column_tiles: tl.constexpr = (columns + block_columns - 1) // block_columns
    column = column_tile * block_columns + tl.arange(0, block_columns)[None, :]
    strips = tl.cdiv(rows, block_rows * strip)
    greatest = tl.zeros((block_rows, block_columns), tl.int32)
    for i in range(strip):
        row = (part * strip + i) * block_rows + tl.arange(0, block_rows)[:, None]
        inside = (row < rows) & (column < columns)
        at = (batch.to(tl.int64) * rows + row) * columns + column
        bits = _magnitudes(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), format)
        if by_row:
            index = (batch.to(tl.int64) * column_tiles + column_tile) * rows + row
            tl.store(of_rows + index, tl.max(bits, 1, keep_dims=True), mask=row < rows)
        greatest = tl.maximum(greatest, bits)
    of_column = tl.max(greatest, 0, keep_dims=True)
    if by_column:
        index = (batch.to(tl.int64) * strips + part) * columns + column
        tl.store(of_columns + index, of_column, mask=column < columns)
    elif not by_row:
        index = (batch.to(tl.int64) * strips + part) * column_tiles + column_tile
        first = tl.zeros((1, 1), tl.int32)
        tl.store(of_columns + index + first, tl.max(of_column, 1, keep_dims=True))
