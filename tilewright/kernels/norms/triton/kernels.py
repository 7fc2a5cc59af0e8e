# mypy: disable-error-code="assignment"
"""The norms in Triton: one pass over memory forward, one backward, for rows that fit into registers.

A tile is ``block_rows`` rows. Rows that fit are read once and stay in registers, as ``blocks`` blocks of
``block_columns``. The backward programs are few and persistent: each takes tile after tile and sums its share of the
gradients of weight and bias in float32, element by element, in the order of its tiles; ``sum_partials`` adds up the
shares of the programs. Every sum so has one order, and results are the same bit for bit.

Symbols: x the normed row, x̂ = (x − mean) · rstd, w = weight + offset, g = d_out, c1 = mean(g·w·x̂), c2 = mean(g·w),
dx = rstd · (g·w − c1·x̂ − c2), where an RMS norm has neither mean nor c2.

Arrays are [groups, rows, columns]; groups are what vmap made, each with a weight and a bias of its own, or with one
for all (``weight_stride`` 0). ``even`` says that tiles end with the rows. ``eviction`` is the hint of loads of rows.
"""

import triton
import triton.language as tl

OPAQUE = tl.constexpr("{ .reg .b32 zero; mov.u32 zero, %ctaid.z; xor.b32 $0, $1, zero; }")
"""Grids have two axes, so this changes nothing, but no compiler knows that."""

MEANINGS = {OPAQUE.value: lambda x: x}
"""For the interpreter."""


@triton.jit
def _load(
    pointer,
    inside,
    column,
    blocks: tl.constexpr,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
    even: tl.constexpr,
    eviction: tl.constexpr,
):
    """Blocks of columns from the one that ``pointer`` is at; 0 beyond the columns and where not ``inside``."""
    found = ()
    for block in tl.static_range(blocks):
        here = pointer + block * block_columns
        if even and (columns % block_columns == 0 or block < blocks - 1):
            found += (tl.load(here, eviction_policy=eviction),)
        else:
            mask = inside & (block * block_columns + column < columns)
            found += (tl.load(here, mask=mask, other=0.0, eviction_policy=eviction),)
    return found


@triton.jit
def _store(
    pointer,
    value,
    inside,
    column,
    block: tl.constexpr,
    blocks: tl.constexpr,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
    even: tl.constexpr,
):
    """One of the blocks that ``_load`` loads."""
    here, rounded = pointer + block * block_columns, value.to(pointer.dtype.element_ty)
    if even and (columns % block_columns == 0 or block < blocks - 1):
        tl.store(here, rounded)
    else:
        tl.store(here, rounded, mask=inside & (block * block_columns + column < columns))


@triton.jit
def _float(x, packed: tl.constexpr):
    """x in float32; of ``packed`` 16-bit x, converted here and now.

    Else the compiler converts once and keeps twice the registers until the last use, which spills in wide rows.
    """
    if packed:
        x = tl.inline_asm_elementwise(OPAQUE, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(tl.float32)


@triton.jit
def _scale(weight, weight_offset: tl.constexpr, packed: tl.constexpr):
    """The weight in float32, with what is added to it."""
    scale = _float(weight, packed and weight.dtype != tl.float32)
    if weight_offset != 0:
        scale += weight_offset
    return scale


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_quadruples(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _mean(stored, blocks: tl.constexpr, columns: tl.constexpr):
    """The means of rows; beyond the columns ``stored`` is 0."""
    plain = stored[0].to(tl.float32)
    for block in tl.static_range(1, blocks):
        plain += stored[block].to(tl.float32)
    return tl.sum(plain, 1, keep_dims=True) * (1.0 / columns)


@triton.jit
def _pivot(x, inside, columns: tl.constexpr, block_columns: tl.constexpr):
    """The mean of a row's first block: near that of the row, so that little is lost where sums cancel."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(value, 0) / min(columns, block_columns)


@triton.jit
def forward(
    x,
    residual,
    weight,
    bias,
    rows,
    tiles,
    out,
    total,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    even: tl.constexpr,
    packed: tl.constexpr,
    layer: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
    eviction: tl.constexpr,
):
    """Rows that fit into registers: ``out`` and ``total`` of ``block_rows`` of them."""
    blocks: tl.constexpr = (columns + block_columns - 1) // block_columns
    padded: tl.constexpr = columns % block_columns != 0
    group, tile = tl.program_id(0) * 0, tl.program_id(0)
    if weight_stride > 0:
        group, tile = tile // tiles, tile % tiles
    first = tile * block_rows
    inside = first + tl.arange(0, block_rows)[:, None] < rows
    column = tl.arange(0, block_columns)[None, :]
    start = (group.to(tl.int64) * rows + first) * columns
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    shared = group * weight_stride
    stored = _load(x + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
    if has_residual:
        added = _load(residual + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
    # Before the sums, so that waiting for them is not added to waiting for the rows.
    if has_weight:
        scales = _load(weight + shared + column, column >= 0, column, blocks, columns, block_columns, True, "")
    if has_bias:
        shifts = _load(bias + shared + column, column >= 0, column, blocks, columns, block_columns, True, "")
    if has_residual:
        rounded = ()
        for block in tl.static_range(blocks):
            value = stored[block].to(tl.float32) + added[block].to(tl.float32)
            rounded += (value.to(x.dtype.element_ty),)
            _store(total + start + offset, rounded[block], inside, column, block, blocks, columns, block_columns, even)
        stored = rounded
    mean = 0.0
    if layer:
        mean = _mean(stored, blocks, columns)
    rest = 0.0
    squares = tl.zeros([block_rows, block_columns], tl.float32)
    rests = tl.zeros([block_rows, block_columns], tl.float32)
    for block in tl.static_range(blocks):
        value = _float(stored[block], packed)
        if layer:
            value = value - mean
            if padded and block == blocks - 1:
                value = tl.where(block * block_columns + column < columns, value, 0.0)
            rests += value
        squares += value * value
    if layer and x.dtype.element_ty == tl.float32:  # see backward
        rest, variance = tl.reduce((rests, squares), 1, _add_pairs, keep_dims=True)
        rest = rest * (1.0 / columns)
        variance = variance * (1.0 / columns) - rest * rest
    else:
        variance = tl.sum(squares, 1, keep_dims=True) * (1.0 / columns)
    factor = tl.rsqrt(variance + eps)
    for block in tl.static_range(blocks):
        value = _float(stored[block], packed)
        if layer:
            value = value - mean - rest
        value = value * factor
        if has_weight:
            value = value * _scale(scales[block], weight_offset, packed)
        if has_bias:
            value = value + shifts[block].to(tl.float32)
        _store(out + start + offset, value, inside, column, block, blocks, columns, block_columns, even)


@triton.jit
def forward_wide(
    x,
    residual,
    weight,
    bias,
    rows,
    tiles,
    out,
    total,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    layer: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
):
    """The same of one row that does not fit: it is read twice, the second time from the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    start, shared = row * columns, row // rows * weight_stride
    pivot, center = 0.0, 0.0
    if layer:
        column = tl.arange(0, block_columns)
        pivot = _pivot(x + start + column, column < columns, columns, block_columns)
    plain = tl.zeros([block_columns], tl.float32)
    squares = tl.zeros([block_columns], tl.float32)
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        value = tl.load(x + start + column, mask=inside, other=0.0, eviction_policy="evict_last")
        if has_residual:
            added = tl.load(residual + start + column, mask=inside, other=0.0, eviction_policy="evict_first")
            value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
            tl.store(total + start + column, value, mask=inside)
        value = tl.where(inside, value.to(tl.float32) - pivot, 0.0)
        plain += value
        squares += value * value
    variance = tl.sum(squares, 0) * (1.0 / columns)
    if layer:
        center = tl.sum(plain, 0) * (1.0 / columns)
        variance = tl.maximum(variance - center * center, 0.0)
    factor = tl.rsqrt(variance + eps)
    if has_residual:
        tl.debug_barrier()  # what is read now may be what another thread has written
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        if has_residual:
            value = tl.load(total + start + column, mask=inside, other=0.0).to(tl.float32)
        else:
            value = tl.load(x + start + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        value = (value - pivot - center) * factor
        if has_weight:
            scale = tl.load(weight + shared + column, mask=inside, other=0.0, eviction_policy="evict_last")
            value = value * _scale(scale, weight_offset, False)
        if has_bias:
            shift = tl.load(bias + shared + column, mask=inside, other=0.0, eviction_policy="evict_last")
            value = value + shift.to(tl.float32)
        tl.store(out + start + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_sums(
    x,
    weight,
    d_out,
    rows,
    sums,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
    layer: tl.constexpr,
    has_weight: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
):
    """rstd, c1, c2, and the mean as a sum of two, of one row that does not fit into registers, [5, groups · rows]."""
    row = tl.program_id(0).to(tl.int64)
    all_rows = tl.num_programs(0)
    start, shared = row * columns, row // rows * weight_stride
    pivot = 0.0
    if layer:
        column = tl.arange(0, block_columns)
        pivot = _pivot(x + start + column, column < columns, columns, block_columns)
    plain = tl.zeros([block_columns], tl.float32)
    squares = tl.zeros([block_columns], tl.float32)
    gradients = tl.zeros([block_columns], tl.float32)
    products = tl.zeros([block_columns], tl.float32)
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot, 0.0)
        gradient = tl.load(d_out + start + column, mask=inside, other=0.0).to(tl.float32)
        if has_weight:
            scale = tl.load(weight + shared + column, mask=inside, other=0.0, eviction_policy="evict_last")
            gradient = gradient * _scale(scale, weight_offset, False)
        plain += value
        squares += value * value
        gradients += gradient
        products += gradient * value
    variance = tl.sum(squares, 0) * (1.0 / columns)
    c1 = tl.sum(products, 0) * (1.0 / columns)
    if layer:
        center, c2 = tl.sum(plain, 0) * (1.0 / columns), tl.sum(gradients, 0) * (1.0 / columns)
        variance -= center * center
        c1 -= center * c2
        tl.store(sums + 2 * all_rows + row, c2)
        tl.store(sums + 3 * all_rows + row, pivot)
        tl.store(sums + 4 * all_rows + row, center)
    factor = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    tl.store(sums + row, factor)
    tl.store(sums + all_rows + row, c1 * factor)


@triton.jit
def backward(
    x,
    weight,
    d_out,
    d_total,
    sums,
    rows,
    programs,
    d_x,
    d_weight,
    d_bias,
    columns: tl.constexpr,
    grouped: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    whole: tl.constexpr,
    even: tl.constexpr,
    packed: tl.constexpr,
    layer: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    has_d_total: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
    eviction: tl.constexpr,
    stages: tl.constexpr,
):
    """``d_x`` of every ``programs``-th tile of a group, and the tiles' share of ``d_weight`` and ``d_bias``.

    Of ``whole`` rows the sums are formed here; else they come in ``sums``, and a program has one block of columns.
    """
    blocks: tl.constexpr = (columns + block_columns - 1) // block_columns if whole else 1
    padded: tl.constexpr = columns % block_columns != 0
    group, program, all_rows = tl.program_id(0) * 0, tl.program_id(0), rows
    if grouped:
        group, program = program // programs, program % programs
        all_rows = (tl.num_programs(0) // programs).to(tl.int64) * rows
    group_rows = group.to(tl.int64) * rows
    column = tl.arange(0, block_columns)[None, :]
    if not whole:
        column += tl.program_id(1) * block_columns
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    weight_sums, bias_sums = (), ()
    if has_weight:
        shared = group * weight_stride
        scales = _load(weight + shared + column, column >= 0, column, blocks, columns, block_columns, True, "")
    for _ in tl.static_range(blocks):
        if has_weight:
            weight_sums += (tl.zeros([block_rows, block_columns], tl.float32),)
        if has_bias:
            bias_sums += (tl.zeros([block_rows, block_columns], tl.float32),)
    tiles = tl.cdiv(rows, block_rows)
    for turn in tl.range(program, tiles, programs, num_stages=stages):
        tile = turn
        if not whole:  # what was read last for the sums is still in the L2 cache
            tile = tiles - 1 - turn
        row = tile * block_rows + tl.arange(0, block_rows)[:, None]
        inside = row < rows
        start = (group_rows + tile * block_rows) * columns
        values = _load(x + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        gradients = _load(d_out + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        if has_d_total:
            others = _load(d_total + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        mean, rest, c2 = 0.0, 0.0, 0.0
        if whole:
            if layer:
                mean = _mean(values, blocks, columns)
            squares = tl.zeros([block_rows, block_columns], tl.float32)
            products = tl.zeros([block_rows, block_columns], tl.float32)
            weighteds = tl.zeros([block_rows, block_columns], tl.float32)
            rests = tl.zeros([block_rows, block_columns], tl.float32)
            for block in tl.static_range(blocks):
                value, weighted = values[block].to(tl.float32), gradients[block].to(tl.float32)
                if has_weight:
                    weighted = weighted * _scale(scales[block], weight_offset, packed)
                if layer:
                    value = value - mean
                    if padded and block == blocks - 1:
                        value = tl.where(block * block_columns + column < columns, value, 0.0)
                    weighteds += weighted
                    rests += value
                squares += value * value
                # Beyond the last column the gradient is 0, and so is all that it is multiplied with.
                products += weighted * value
            if layer:
                if x.dtype.element_ty == tl.float32:
                    # A mean is rounded like the largest of its terms; beside one of 1000 the rest is up to 1e-4.
                    terms = (squares, products, weighteds, rests)
                    variance, c1, c2, rest = tl.reduce(terms, 1, _add_quadruples, keep_dims=True)
                    rest = rest * (1.0 / columns)
                    variance, c1 = variance - columns * rest * rest, c1 - rest * c2
                else:
                    variance, c1, c2 = tl.reduce((squares, products, weighteds), 1, _add_triples, keep_dims=True)
                c2 = c2 * (1.0 / columns)
            else:
                variance, c1 = tl.reduce((squares, products), 1, _add_pairs, keep_dims=True)
            factor = tl.rsqrt(variance * (1.0 / columns) + eps)
            c1 = c1 * (1.0 / columns) * factor
        else:
            here = sums + group_rows + row
            factor = tl.load(here, mask=inside, other=0.0)
            c1 = tl.load(here + all_rows, mask=inside, other=0.0)
            if layer:
                c2 = tl.load(here + 2 * all_rows, mask=inside, other=0.0)
                mean = tl.load(here + 3 * all_rows, mask=inside, other=0.0)
                rest = tl.load(here + 4 * all_rows, mask=inside, other=0.0)
        new_weight_sums, new_bias_sums = (), ()
        for block in tl.static_range(blocks):
            value, gradient = _float(values[block], packed), _float(gradients[block], packed)
            if layer:
                value = value - mean - rest
            value = value * factor
            change = gradient
            if has_weight:
                change = gradient * _scale(scales[block], weight_offset, packed)
                new_weight_sums += (weight_sums[block] + gradient * value,)
            if has_bias:
                new_bias_sums += (bias_sums[block] + gradient,)
            change -= value * c1
            if layer:
                change -= c2
            change = change * factor
            if has_d_total:
                change += others[block].to(tl.float32)
            _store(d_x + start + offset, change, inside, column, block, blocks, columns, block_columns, even)
        weight_sums, bias_sums = new_weight_sums, new_bias_sums
    share = tl.program_id(0).to(tl.int64) * columns
    for block in tl.static_range(blocks):
        if has_weight:
            found = tl.sum(weight_sums[block], 0)[None, :]
            _store(d_weight + share + column, found, column >= 0, column, block, blocks, columns, block_columns, True)
        if has_bias:
            found = tl.sum(bias_sums[block], 0)[None, :]
            _store(d_bias + share + column, found, column >= 0, column, block, blocks, columns, block_columns, True)


@triton.jit
def _sum_of(parts, result, column, columns, programs: tl.constexpr, block_programs: tl.constexpr):
    group = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, block_programs)[:, None]
    inside = column < columns
    sums = tl.zeros([block_programs, column.shape[1]], tl.float32)
    for first in tl.static_range(0, programs, block_programs):
        here = (group * programs + first + part) * columns + column
        sums += tl.load(parts + here, mask=inside & (first + part < programs), other=0.0)
    sum_of_all = tl.sum(sums, 0)[None, :]
    tl.store(result + group * columns + column, sum_of_all.to(result.dtype.element_ty), mask=inside)


@triton.jit
def sum_partials(
    weight_parts,
    bias_parts,
    d_weight,
    d_bias,
    columns: tl.constexpr,
    programs: tl.constexpr,
    block_programs: tl.constexpr,
    block_columns: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
):
    """``d_weight`` and ``d_bias``, [groups, columns], of the programs' shares, [groups, programs, columns]."""
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)[None, :]
    if has_weight:
        _sum_of(weight_parts, d_weight, column, columns, programs, block_programs)
    if has_bias:
        _sum_of(bias_parts, d_bias, column, columns, programs, block_programs)
