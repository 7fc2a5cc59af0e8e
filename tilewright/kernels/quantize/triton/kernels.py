# mypy: disable-error-code="assignment"
"""Quantising in Triton: maxima of magnitudes, and tiles of codes in one orientation or both.

  tile     elements of ``[batch, rows, columns]`` in float32
  keys     integers in the order of magnitudes, below that of 0 where an element does not count
  bits     the greatest magnitude of those that share a scale, as the bits of a float32
  amax     the same, given for every row, every column or all

Codes are stored as bytes. A tile is transposed as it was loaded, before it is rounded: ``tl.trans`` of float8 is wrong
on Hopper in several versions of Triton.
Grids: a program for each tile, those of a batch element's row of tiles beside each other.
"""

import numpy as np
import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
"""The bits of infinity: those of NaN are greater."""

NORMAL = tl.constexpr(0x00800000)
"""The bits of the least normal number."""

INFINITY_SHIFTED = tl.constexpr(0xFF000000)
"""The bits of infinity without the sign, one place up."""

ZERO = tl.constexpr(0x01000000)
"""The key of zero."""

HIGHEST = tl.constexpr(0xFFFFFFFF)
"""The key of NaN in int8; no finite number has it."""

TINY = tl.constexpr(2.0**-126)
"""The least normal number."""

INTEGERS = tl.constexpr(12582912.0)
"""1.5 · 2²³: added to a number below 2²² it leaves the nearest integer in the lowest bits, ties to even."""


FLUSH = tl.constexpr("mul.ftz.f32 $0, $1, 0f3F800000;")
"""Times one, with zero of the same sign in place of a subnormal number."""

MEANINGS = {FLUSH.value: lambda x: np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)}
"""The same in NumPy, for Triton's interpreter."""


@triton.jit
def _keys(x, format: tl.constexpr):
    """Unsigned integers in the order of the magnitudes that a scale is made of, of two instructions in float8.

    Bits without the sign are shifted up by what makes infinity wrap to 0, and NaN to a number below the key of 0. int8
    has no code for NaN: there its key is the greatest, and infinity's is that of 0.
    """
    bits = x.to(tl.uint32, bitcast=True) << 1
    if format == "int8":
        return tl.where(bits == INFINITY_SHIFTED, ZERO, tl.where(bits > INFINITY_SHIFTED, HIGHEST, bits + ZERO))
    return bits + ZERO


@triton.jit
def _bits(key):
    """The bits of the magnitude of a greatest key: 0 where no element counted, and NaN for the greatest of all."""
    bits = ((tl.maximum(key, ZERO) - ZERO) >> 1).to(tl.int32)
    # A subnormal number is a zero.
    return tl.where(key == HIGHEST, 0x7FFFFFFF, tl.where(bits < NORMAL, 0, bits))


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
def _codes(x, inverse, format: tl.constexpr, largest: tl.constexpr, native: tl.constexpr, flushes: tl.constexpr):
    """The bytes of the codes of a tile."""
    if flushes:
        x = tl.inline_asm_elementwise(FLUSH, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    y = x * inverse
    if format != "int8" and native:
        kind: tl.constexpr = tl.float8e4nv if format == "e4m3" else tl.float8e5
        return y.to(kind).to(tl.int8, bitcast=True)  # the instruction saturates
    y = tl.clamp(y, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    if format == "int8":
        found = ((y + INTEGERS).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
        return tl.where(y != y, 0, found).to(tl.int8)
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
    rows,
    values,
    scales,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    covers: tl.constexpr,
    given: tl.constexpr,
    format: tl.constexpr,
    largest: tl.constexpr,
    mantissa: tl.constexpr,
    exponent: tl.constexpr,
    power_of_two: tl.constexpr,
    native: tl.constexpr,
    flushes: tl.constexpr,
):
    """Writes the codes and scales of a tile.

    ``covers`` says what shares a scale: the "row" or the "column" of the tile, or all of the "tile". With ``given`` it
    is all of the row, the column or the batch element, whose maximum is an operand.
    """
    batch, row_tile, column_tile = _place(rows, columns, block_rows, block_columns, 1)
    row = row_tile * block_rows + tl.arange(0, block_rows)[:, None]
    column = column_tile * block_columns + tl.arange(0, block_columns)[None, :]
    inside = (row < rows) & (column < columns)
    at = (batch.to(tl.int64) * rows + row) * columns + column
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # The scale's place among [batch, lines, tiles along a line], and whether this tile is the one that writes it.
    line = tl.zeros((1, 1), tl.int32)
    row_tiles, column_tiles = tl.cdiv(rows, block_rows), (columns + block_columns - 1) // block_columns
    if covers == "row":
        lines, line, tiles, tile_index = rows, row, column_tiles, column_tile
    elif covers == "column":
        lines, line, tiles, tile_index = columns, column, row_tiles, row_tile
    else:
        lines, line, tiles, tile_index = 1, line, row_tiles * column_tiles, row_tile * column_tiles + column_tile
    index = batch.to(tl.int64) * lines + line
    if given:
        bits = tl.load(amax + index, mask=line < lines, other=0)
    else:
        keys = _keys(tile, format)
        if covers != "column":
            keys = tl.max(keys, 1, keep_dims=True)
        if covers != "row":
            keys = tl.max(keys, 0, keep_dims=True)
        bits = _bits(keys)
    scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
    if given:
        tl.store(scales + index, scale, mask=(line < lines) & (tile_index == 0))
    elif covers == "column":
        tl.store(scales + (batch.to(tl.int64) * tiles + tile_index) * lines + line, scale, mask=line < lines)
    else:
        tl.store(scales + index * tiles + tile_index, scale, mask=line < lines)
    _store(values, at, _codes(tile, inverse, format, largest, native, flushes), inside)


@triton.jit
def quantize_both(
    x,
    amax,
    amax_transposed,
    row_units,
    values,
    scales,
    values_transposed,
    scales_transposed,
    row_unit: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    part_rows: tl.constexpr,
    covers: tl.constexpr,
    given: tl.constexpr,
    format: tl.constexpr,
    largest: tl.constexpr,
    mantissa: tl.constexpr,
    exponent: tl.constexpr,
    power_of_two: tl.constexpr,
    native: tl.constexpr,
    flushes: tl.constexpr,
):
    """Writes the codes and scales of a tile and of its transpose, in parts of ``part_rows`` rows.

    ``covers`` is "row", and then the other orientation's scales are of columns, or "tile", where both have the same
    codes. A part is loaded again when the maxima of columns are known, from the L1 cache: kept until then, parts took
    168 to 251 registers. Rows are a multiple of ``row_unit``, which tells the compiler how many bytes of a column are
    stored at once.
    """
    rows = row_units * row_unit
    batch, row_tile, column_tile = _place(rows, columns, block_rows, block_columns, 1)
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (columns + block_columns - 1) // block_columns
    parts: tl.constexpr = block_rows // part_rows
    column = column_tile * block_columns + tl.arange(0, block_columns)[None, :]
    across = column_tile * block_columns + tl.arange(0, block_columns)[:, None]
    wide = batch.to(tl.int64)
    first = tl.zeros((1, 1), tl.int32)
    greatest = tl.zeros((1, block_columns), tl.uint32)
    for part in tl.static_range(parts):
        row = row_tile * block_rows + part * part_rows + tl.arange(0, part_rows)[:, None]
        inside = (row < rows) & (column < columns)
        at = (wide * rows + row) * columns + column
        this = tl.load(x + at, mask=inside, other=0.0)
        if covers == "row":
            tile = this.to(tl.float32)
            if given:
                of_row = tl.load(amax + wide * rows + row, mask=row < rows, other=0)
            else:
                keys = _keys(tile, format)
                greatest = tl.maximum(greatest, tl.max(keys, 0, keep_dims=True))
                of_row = _bits(tl.max(keys, 1, keep_dims=True))
            scale, inverse = _scale(of_row, largest, mantissa, exponent, power_of_two)
            if given:
                tl.store(scales + wide * rows + row, scale, mask=(row < rows) & (column_tile == 0))
            else:
                tl.store(scales + (wide * rows + row) * column_tiles + column_tile, scale, mask=row < rows)
            _store(values, at, _codes(tile, inverse, format, largest, native, flushes), inside)
        elif not given:
            greatest = tl.maximum(greatest, tl.max(_keys(this.to(tl.float32), format), 0, keep_dims=True))

    if covers == "row":
        line = wide * columns + across
        if given:
            of_column = tl.load(amax_transposed + line, mask=across < columns, other=0)
        else:
            of_column = _bits(tl.trans(greatest))
        scale, inverse = _scale(of_column, largest, mantissa, exponent, power_of_two)
        if given:
            tl.store(scales_transposed + line, scale, mask=(across < columns) & (row_tile == 0))
        else:
            tl.store(scales_transposed + line * row_tiles + row_tile, scale, mask=across < columns)
    else:
        if given:
            bits = tl.load(amax + batch + first)
        else:
            bits = _bits(tl.max(greatest, 1, keep_dims=True))
        scale, inverse = _scale(bits, largest, mantissa, exponent, power_of_two)
        if given:
            is_first = (first + row_tile + column_tile) == 0
            tl.store(scales + batch + first, scale, mask=is_first)
            tl.store(scales_transposed + batch + first, scale, mask=is_first)
        else:
            tl.store(scales + (wide * row_tiles + row_tile) * column_tiles + column_tile + first, scale)
            tl.store(scales_transposed + (wide * column_tiles + column_tile) * row_tiles + row_tile + first, scale)

    for part in tl.static_range(parts):
        start = row_tile * block_rows + part * part_rows
        row = start + tl.arange(0, part_rows)[:, None]
        inside = (row < rows) & (column < columns)
        at = (wide * rows + row) * columns + column
        this = tl.load(x + at, mask=inside, other=0.0)
        if covers == "tile":
            _store(values, at, _codes(this.to(tl.float32), inverse, format, largest, native, flushes), inside)
        down = start + tl.arange(0, part_rows)[None, :]
        turned = tl.trans(this).to(tl.float32)
        at = (wide * columns + across) * rows + down
        codes = _codes(turned, inverse, format, largest, native, flushes)
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
    greatest = tl.zeros((block_rows, block_columns), tl.uint32)
    for i in range(strip):
        row = (part * strip + i) * block_rows + tl.arange(0, block_rows)[:, None]
        inside = (row < rows) & (column < columns)
        at = (batch.to(tl.int64) * rows + row) * columns + column
        keys = _keys(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), format)
        if by_row:
            index = (batch.to(tl.int64) * column_tiles + column_tile) * rows + row
            tl.store(of_rows + index, _bits(tl.max(keys, 1, keep_dims=True)), mask=row < rows)
        greatest = tl.maximum(greatest, keys)
    of_column = tl.max(greatest, 0, keep_dims=True)
    if by_column:
        index = (batch.to(tl.int64) * strips + part) * columns + column
        tl.store(of_columns + index, _bits(of_column), mask=column < columns)
    elif not by_row:
        index = (batch.to(tl.int64) * strips + part) * column_tiles + column_tile
        first = tl.zeros((1, 1), tl.int32)
        tl.store(of_columns + index + first, _bits(tl.max(of_column, 1, keep_dims=True)))
