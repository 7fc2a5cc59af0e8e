"""The norms in Triton: one pass over memory forward, one backward, for rows that fit into registers.

A tile is ``block_rows`` rows; where ``block_columns`` covers them, they are read once and stay in registers. The
backward programs are few and stay: each takes tile after tile and sums its share of the gradients of weight and bias
in float32, element by element, in the order of its tiles; ``sum_partials`` adds up the shares of the programs. Every
sum so has one order, and results are the same bit for bit.

Symbols: x the normed row, x̂ = (x − mean) · rstd, w = weight + offset, g = d_out, c1 = mean(g·w·x̂), c2 = mean(g·w),
dx = rstd · (g·w − c1·x̂ − c2), where an RMS norm has neither mean nor c2.

Arrays are [groups, rows, columns]; groups are what vmap made, each with a weight and a bias of its own, or with one
for all (``weight_stride`` 0).
"""

import triton
import triton.language as tl


@triton.jit
def _load(pointer, inside, masked: tl.constexpr, eviction: tl.constexpr):
    if masked:
        return tl.load(pointer, mask=inside, other=0.0, eviction_policy=eviction)
    return tl.load(pointer, eviction_policy=eviction)


@triton.jit
def _store(pointer, value, inside, masked: tl.constexpr):
    if masked:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty))


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
    layer: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
):
    """Rows that fit into registers: ``out`` and ``total`` of ``block_rows`` of them."""
    padded: tl.constexpr = block_columns > columns
    masked: tl.constexpr = padded or block_rows > 1
    group, tile = tl.program_id(0) * 0, tl.program_id(0)
    if weight_stride > 0:
        group, tile = tile // tiles, tile % tiles
    first = tile * block_rows
    row = first + tl.arange(0, block_rows)[:, None]
    column = tl.arange(0, block_columns)[None, :]
    inside = (row < rows) & (column < columns)
    start = (group.to(tl.int64) * rows + first) * columns
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    stored = _load(x + start + offset, inside, masked, "evict_first")
    if has_residual:
        added = _load(residual + start + offset, inside, masked, "evict_first")
    # Before the sums, so that waiting for them is not added to waiting for the rows.
    shared = group * weight_stride
    if has_weight:
        scale = _load(weight + shared + column, column < columns, padded, "evict_last")
    if has_bias:
        shift = _load(bias + shared + column, column < columns, padded, "evict_last")
    value = stored.to(tl.float32)
    if has_residual:
        rounded = (value + added.to(tl.float32)).to(stored.dtype)
        _store(total + start + offset, rounded, inside, masked)
        value = rounded.to(tl.float32)
    if layer:
        value = value - tl.sum(value, 1, keep_dims=True) * (1.0 / columns)
        if padded:
            value = tl.where(column < columns, value, 0.0)
    if layer and stored.dtype == tl.float32:  # see backward
        rest, variance = tl.reduce((value, value * value), 1, _add_pairs, keep_dims=True)
        rest = rest * (1.0 / columns)
        value = value - rest
        variance = variance * (1.0 / columns) - rest * rest
    else:
        variance = tl.sum(value * value, 1, keep_dims=True) * (1.0 / columns)
    factor = tl.rsqrt(variance + eps)
    value = value * factor
    if has_weight:
        value = value * (scale.to(tl.float32) + weight_offset)
    if has_bias:
        value = value + shift.to(tl.float32)
    _store(out + start + offset, value, inside, masked)


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
            value = value * (scale.to(tl.float32) + weight_offset)
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
            gradient = gradient * (scale.to(tl.float32) + weight_offset)
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
    layer: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    has_d_total: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
    stages: tl.constexpr,
):
    """``d_x`` of every ``programs``-th tile of a group, and the tiles' share of ``d_weight`` and ``d_bias``.

    Where ``block_columns`` covers the columns, the sums of rows are formed here, else they come in ``sums``.
    """
    padded: tl.constexpr = columns % block_columns != 0
    masked: tl.constexpr = padded or block_rows > 1
    group, program, all_rows = tl.program_id(0) * 0, tl.program_id(0), rows
    if grouped:
        group, program = program // programs, program % programs
        all_rows = (tl.num_programs(0) // programs).to(tl.int64) * rows
    group_rows = group.to(tl.int64) * rows
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    if has_weight:
        scale = _load(weight + group * weight_stride + column, column < columns, padded, "evict_last")
        scale = scale.to(tl.float32) + weight_offset
        weight_sum = tl.zeros([block_rows, block_columns], tl.float32)
    if has_bias:
        bias_sum = tl.zeros([block_rows, block_columns], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, block_rows), programs, num_stages=stages):
        first = tile * block_rows
        row = first + tl.arange(0, block_rows)[:, None]
        start = (group_rows + first) * columns
        inside = (row < rows) & (column < columns)
        value = _load(x + start + offset, inside, masked, "evict_first").to(tl.float32)
        gradient = _load(d_out + start + offset, inside, masked, "evict_first").to(tl.float32)
        if has_d_total:
            also = _load(d_total + start + offset, inside, masked, "evict_first")
        # Beyond the last column the gradient is 0, and so is all that it is multiplied with.
        weighted = gradient
        if has_weight:
            weighted = gradient * scale
        if block_columns >= columns:
            if layer:
                value = value - tl.sum(value, 1, keep_dims=True) * (1.0 / columns)
                if padded:
                    value = tl.where(column < columns, value, 0.0)
                squares, products = value * value, weighted * value
                if x.dtype.element_ty == tl.float32:
                    # A mean is rounded like the largest of its terms; beside one of 1000 the rest is up to 1e-4.
                    terms = (squares, products, weighted, value)
                    variance, c1, c2, rest = tl.reduce(terms, 1, _add_quadruples, keep_dims=True)
                    rest = rest * (1.0 / columns)
                    variance, c1, value = variance - columns * rest * rest, c1 - rest * c2, value - rest
                else:
                    variance, c1, c2 = tl.reduce((squares, products, weighted), 1, _add_triples, keep_dims=True)
                c2 = c2 * (1.0 / columns)
            else:
                variance, c1 = tl.reduce((value * value, weighted * value), 1, _add_pairs, keep_dims=True)
            factor = tl.rsqrt(variance * (1.0 / columns) + eps)
            c1 = c1 * (1.0 / columns) * factor
        else:
            here = sums + group_rows + row
            factor = _load(here, row < rows, block_rows > 1, "")
            c1 = _load(here + all_rows, row < rows, block_rows > 1, "")
            if layer:
                c2 = _load(here + 2 * all_rows, row < rows, block_rows > 1, "")
                value = value - _load(here + 3 * all_rows, row < rows, block_rows > 1, "")
                value = value - _load(here + 4 * all_rows, row < rows, block_rows > 1, "")
        value = value * factor
        if has_bias:
            bias_sum += gradient
        if has_weight:
            weight_sum += gradient * value
        change = weighted - value * c1
        if layer:
            change -= c2
        change = change * factor
        if has_d_total:
            change += also.to(tl.float32)
        _store(d_x + start + offset, change, inside, masked)
    share = tl.program_id(0).to(tl.int64) * columns
    if has_weight:
        _store(d_weight + share + column, tl.sum(weight_sum, 0)[None, :], column < columns, padded)
    if has_bias:
        _store(d_bias + share + column, tl.sum(bias_sum, 0)[None, :], column < columns, padded)


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
