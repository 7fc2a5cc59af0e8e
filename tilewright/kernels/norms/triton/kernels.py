# mypy: disable-error-code="assignment"
"""Layer norm and RMS norm in Triton: one pass over memory forward, one backward, for rows that fit into registers.

  x          the normed row: the input, plus the residual where there is one (their sum is the output ``total``)
  mean, rstd mean(x) and 1 / sqrt(var(x) + eps); an RMS norm has mean 0 and mean(x²) instead of the variance
  x̂          ``x_hat`` = (x - mean) · rstd
  w, b       weight + weight_offset, and bias; out = x̂ · w + b
  g          ``d_out``, the cotangent of out
  t          ``d_total``, the cotangent of total
  c1, c2     mean(g · w · x̂) and mean(g · w); an RMS norm has no c2
  dx         rstd · (g · w - c1 · x̂ - c2) + t
  dw, db     sums of g · x̂ and of g over all rows
  pivot      a value near the mean that is subtracted before x is summed and squared, lest the sums cancel
  mean_rest  mean(x - mean), the rounding error of a float32 mean, subtracted as well; with a pivot, mean - pivot

Arithmetic is float32; arrays are loaded and stored in their own dtypes. Every sum has one order, so that results are
the same bit for bit.

Arrays are [groups, rows, columns]. Groups come from vmap, each with a weight and a bias of its own, or with one for all
(``weight_stride`` 0). A tile is ``block_rows`` rows, held in ``blocks`` blocks of ``block_columns`` columns. ``even``:
the rows are a multiple of the tile, so their mask is skipped. ``eviction``: the cache hint for loads of rows.
``packed``: 16-bit rows stay 16-bit in registers, and are promoted to float32 at each use.

Grids:
  forward         a program for each tile of each group
  forward_wide    a program for each row that does not fit into registers: two passes, the second from the L2 cache
  backward        few, persistent programs for each group: every program takes each ``programs``-th tile, and sums its
                  partial dw and db in float32. Rows that do not fit (not ``whole``) are cut into blocks of columns, the
                  second axis of the grid, and their statistics come from row_statistics.
  row_statistics  a program for each row
  sum_partials    a program for each block of columns of each group: adds up the programs' partial dw and db
"""

import triton
import triton.language as tl

OPAQUE = tl.constexpr("{ .reg .b32 zero; mov.u32 zero, %ctaid.z; xor.b32 $0, $1, zero; }")
"""Identity that the compiler cannot see through: grids have two axes, so %ctaid.z is 0."""

MEANINGS = {OPAQUE.value: lambda x: x}
"""Python equivalents of the inline assembly, for the interpreter."""


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
    """Loads ``blocks`` blocks of columns from ``pointer`` on; 0 beyond the columns and in rows not ``inside``."""
    # A tuple of blocks: a Triton tensor is a power of two wide, so one for all columns would be up to half empty.
    loaded = ()
    for block in tl.static_range(blocks):
        pointers = pointer + block * block_columns
        # Only the last block can reach beyond the columns.
        if even and (columns % block_columns == 0 or block < blocks - 1):
            loaded += (tl.load(pointers, eviction_policy=eviction),)
        else:
            mask = inside & (block * block_columns + column < columns)
            loaded += (tl.load(pointers, mask=mask, other=0.0, eviction_policy=eviction),)
    return loaded


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
    """Stores one of the blocks that ``_load`` loads, in the dtype of the array."""
    pointers, rounded = pointer + block * block_columns, value.to(pointer.dtype.element_ty)
    if even and (columns % block_columns == 0 or block < blocks - 1):
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=inside & (block * block_columns + column < columns))


@triton.jit
def _to_float32(x, packed: tl.constexpr):
    """Promotes x to float32, and does so anew at each use if ``packed``.

    Otherwise the compiler promotes once and keeps twice the registers until the last use, which spills in wide rows.
    """
    if packed:
        x = tl.inline_asm_elementwise(OPAQUE, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(tl.float32)


@triton.jit
def _offset_weight(weight, weight_offset: tl.constexpr, packed: tl.constexpr):
    """w in float32: the weight plus its offset."""
    w = _to_float32(weight, packed and weight.dtype != tl.float32)
    if weight_offset != 0:
        w += weight_offset
    return w


@triton.jit
def _add_pairs(a, b, c, d):
    """Adds two sums at once, for ``tl.reduce``: one round of shuffles and barriers instead of two."""
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    """Adds three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def _add_quadruples(a, b, c, d, e, f, g, h):
    """Adds four sums at once."""
    return a + e, b + f, c + g, d + h


@triton.jit
def _mean(x_blocks, blocks: tl.constexpr, columns: tl.constexpr):
    """Means of the rows of a tile, [block_rows, 1]; ``x_blocks`` are 0 beyond the columns."""
    x_sum = x_blocks[0].to(tl.float32)
    for block in tl.static_range(1, blocks):
        x_sum += x_blocks[block].to(tl.float32)
    return tl.sum(x_sum, 1, keep_dims=True) * (1.0 / columns)


@triton.jit
def _total(x, addend):
    """The sum of x and the residual as it is stored, rounded to its dtype: backward reads no other."""
    return (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)


@triton.jit
def _pivot(x, residual, inside, columns: tl.constexpr, block_columns: tl.constexpr, has_residual: tl.constexpr):
    """Mean of a normed row's first block: near that of the row, so that little is lost where sums cancel.

    It is of the total, as the mean of x says nothing about that of x + residual.
    """
    value = tl.load(x, mask=inside, other=0.0)
    if has_residual:
        value = _total(value, tl.load(residual, mask=inside, other=0.0))
    return tl.sum(value.to(tl.float32), 0) / min(columns, block_columns)


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
    """Computes ``out`` and ``total`` of a tile of rows that fit into registers."""
    blocks: tl.constexpr = (columns + block_columns - 1) // block_columns
    padded: tl.constexpr = columns % block_columns != 0
    # A tensor 0, not a constant: `start` needs its .to().
    group, tile = tl.program_id(0) * 0, tl.program_id(0)
    if weight_stride > 0:
        group, tile = tile // tiles, tile % tiles
    first = tile * block_rows
    inside = first + tl.arange(0, block_rows)[:, None] < rows
    column = tl.arange(0, block_columns)[None, :]
    start = (group.to(tl.int64) * rows + first) * columns
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    weight_start = group * weight_stride
    x_blocks = _load(x + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
    if has_residual:
        addend_blocks = _load(residual + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
    # Weight and bias are loaded before the sums, so that their latency overlaps that of the rows.
    if has_weight:
        w_blocks = _load(weight + weight_start + column, column >= 0, column, blocks, columns, block_columns, True, "")
    if has_bias:
        b_blocks = _load(bias + weight_start + column, column >= 0, column, blocks, columns, block_columns, True, "")
    if has_residual:
        total_blocks = ()
        for block in tl.static_range(blocks):
            rounded = _total(x_blocks[block], addend_blocks[block])
            total_blocks += (rounded,)
            _store(total + start + offset, rounded, inside, column, block, blocks, columns, block_columns, even)
        x_blocks = total_blocks
    mean = 0.0
    if layer:
        mean = _mean(x_blocks, blocks, columns)
    mean_rest = 0.0
    square_terms = tl.zeros([block_rows, block_columns], tl.float32)
    rest_terms = tl.zeros([block_rows, block_columns], tl.float32)
    for block in tl.static_range(blocks):
        value = _to_float32(x_blocks[block], packed)
        if layer:
            value = value - mean
            if padded and block == blocks - 1:
                # Zeros beyond the columns have become -mean.
                value = tl.where(block * block_columns + column < columns, value, 0.0)
            rest_terms += value
        square_terms += value * value
    # The rounding of a float32 mean matters to float32 rows only: see _tile_statistics.
    if layer and x.dtype.element_ty == tl.float32:
        mean_rest, variance = tl.reduce((rest_terms, square_terms), 1, _add_pairs, keep_dims=True)
        mean_rest = mean_rest * (1.0 / columns)
        # Rounding can make it negative in constant rows.
        variance = tl.maximum(variance * (1.0 / columns) - mean_rest * mean_rest, 0.0)
    else:
        variance = tl.sum(square_terms, 1, keep_dims=True) * (1.0 / columns)
    rstd = tl.rsqrt(variance + eps)
    for block in tl.static_range(blocks):
        normed = _to_float32(x_blocks[block], packed)
        if layer:
            normed = normed - mean - mean_rest
        normed = normed * rstd
        if has_weight:
            normed = normed * _offset_weight(w_blocks[block], weight_offset, packed)
        if has_bias:
            normed = normed + b_blocks[block].to(tl.float32)
        _store(out + start + offset, normed, inside, column, block, blocks, columns, block_columns, even)


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
    """Computes ``out`` and ``total`` of a row that does not fit, and is read twice, the second time from L2."""
    row = tl.program_id(0).to(tl.int64)
    start, weight_start = row * columns, row // rows * weight_stride
    pivot, mean_rest = 0.0, 0.0
    if layer:
        column = tl.arange(0, block_columns)
        first_block, first_addend = x + start + column, residual + start + column
        pivot = _pivot(first_block, first_addend, column < columns, columns, block_columns, has_residual)
    shifted_terms = tl.zeros([block_columns], tl.float32)
    square_terms = tl.zeros([block_columns], tl.float32)
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        # Without a residual x is read again below; the residual itself never is.
        value = tl.load(x + start + column, mask=inside, other=0.0, eviction_policy="evict_last")
        if has_residual:
            added = tl.load(residual + start + column, mask=inside, other=0.0, eviction_policy="evict_first")
            value = _total(value, added)
            tl.store(total + start + column, value, mask=inside)
        value = tl.where(inside, value.to(tl.float32) - pivot, 0.0)
        shifted_terms += value
        square_terms += value * value
    variance = tl.sum(square_terms, 0) * (1.0 / columns)
    if layer:
        mean_rest = tl.sum(shifted_terms, 0) * (1.0 / columns)
        # var(x) = mean((x - pivot)²) - (mean - pivot)²; rounding can make it negative.
        variance = tl.maximum(variance - mean_rest * mean_rest, 0.0)
    rstd = tl.rsqrt(variance + eps)
    if has_residual:
        # A barrier of the block: the second pass may read elements of total that other threads have written.
        tl.debug_barrier()
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        if has_residual:
            value = tl.load(total + start + column, mask=inside, other=0.0).to(tl.float32)
        else:
            value = tl.load(x + start + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        value = (value - pivot - mean_rest) * rstd
        if has_weight:
            w_block = tl.load(weight + weight_start + column, mask=inside, other=0.0, eviction_policy="evict_last")
            value = value * _offset_weight(w_block, weight_offset, False)
        if has_bias:
            b_block = tl.load(bias + weight_start + column, mask=inside, other=0.0, eviction_policy="evict_last")
            value = value + b_block.to(tl.float32)
        tl.store(out + start + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_statistics(
    x,
    weight,
    d_out,
    rows,
    statistics,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
    layer: tl.constexpr,
    has_weight: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
    weight_stride: tl.constexpr,
):
    """Computes rstd, c1, c2, pivot and mean - pivot of a row that does not fit into registers.

    ``statistics`` is float32 [5, groups · rows], in this order; an RMS norm writes the first two only.
    """
    row = tl.program_id(0).to(tl.int64)
    all_rows = tl.num_programs(0)
    start, weight_start = row * columns, row // rows * weight_stride
    pivot = 0.0
    if layer:
        column = tl.arange(0, block_columns)
        pivot = _pivot(x + start + column, x, column < columns, columns, block_columns, False)
    shifted_terms = tl.zeros([block_columns], tl.float32)
    square_terms = tl.zeros([block_columns], tl.float32)
    c2_terms = tl.zeros([block_columns], tl.float32)
    c1_terms = tl.zeros([block_columns], tl.float32)
    for first in tl.range(0, columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < columns
        value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot, 0.0)
        gw = tl.load(d_out + start + column, mask=inside, other=0.0).to(tl.float32)
        if has_weight:
            weight_block = tl.load(weight + weight_start + column, mask=inside, other=0.0, eviction_policy="evict_last")
            gw = gw * _offset_weight(weight_block, weight_offset, False)
        shifted_terms += value
        square_terms += value * value
        c2_terms += gw
        c1_terms += gw * value
    variance = tl.sum(square_terms, 0) * (1.0 / columns)
    c1 = tl.sum(c1_terms, 0) * (1.0 / columns)
    if layer:
        mean_rest, c2 = tl.sum(shifted_terms, 0) * (1.0 / columns), tl.sum(c2_terms, 0) * (1.0 / columns)
        variance -= mean_rest * mean_rest
        # c1 was summed with x - pivot; x - mean is less by mean_rest.
        c1 -= mean_rest * c2
        tl.store(statistics + 2 * all_rows + row, c2)
        tl.store(statistics + 3 * all_rows + row, pivot)
        tl.store(statistics + 4 * all_rows + row, mean_rest)
    rstd = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    tl.store(statistics + row, rstd)
    tl.store(statistics + all_rows + row, c1 * rstd)


@triton.jit
def _tile_statistics(
    x_blocks,
    g_blocks,
    w_blocks,
    column,
    block_rows: tl.constexpr,
    blocks: tl.constexpr,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
    packed: tl.constexpr,
    layer: tl.constexpr,
    has_weight: tl.constexpr,
    eps: tl.constexpr,
    weight_offset: tl.constexpr,
):
    """Mean, mean_rest, rstd, c1 and c2 of the rows of a tile that is in registers, each [block_rows, 1].

    All sums are of one reduction, as each reduction costs a round of shuffles and barriers.
    """
    padded: tl.constexpr = columns % block_columns != 0
    mean, mean_rest, c2 = 0.0, 0.0, 0.0
    if layer:
        mean = _mean(x_blocks, blocks, columns)
    square_terms = tl.zeros([block_rows, block_columns], tl.float32)
    c1_terms = tl.zeros([block_rows, block_columns], tl.float32)
    c2_terms = tl.zeros([block_rows, block_columns], tl.float32)
    rest_terms = tl.zeros([block_rows, block_columns], tl.float32)
    for block in tl.static_range(blocks):
        value, gw = x_blocks[block].to(tl.float32), g_blocks[block].to(tl.float32)
        if has_weight:
            gw = gw * _offset_weight(w_blocks[block], weight_offset, packed)
        if layer:
            value = value - mean
            if padded and block == blocks - 1:
                # Zeros beyond the columns have become -mean.
                value = tl.where(block * block_columns + column < columns, value, 0.0)
            c2_terms += gw
            rest_terms += value
        square_terms += value * value
        # No mask for c1 and c2: beyond the columns g is 0.
        c1_terms += gw * value
    if layer:
        if x_blocks[0].dtype == tl.float32:
            # The mean is rounded like its largest term: in rows around 1000 mean_rest is up to 1e-4.
            terms = (square_terms, c1_terms, c2_terms, rest_terms)
            variance, c1, c2, mean_rest = tl.reduce(terms, 1, _add_quadruples, keep_dims=True)
            mean_rest = mean_rest * (1.0 / columns)
            variance = tl.maximum(variance - columns * mean_rest * mean_rest, 0.0)
            c1 -= mean_rest * c2
        else:
            variance, c1, c2 = tl.reduce((square_terms, c1_terms, c2_terms), 1, _add_triples, keep_dims=True)
        c2 = c2 * (1.0 / columns)
    else:
        variance, c1 = tl.reduce((square_terms, c1_terms), 1, _add_pairs, keep_dims=True)
    rstd = tl.rsqrt(variance * (1.0 / columns) + eps)
    c1 = c1 * (1.0 / columns) * rstd
    return mean, mean_rest, rstd, c1, c2


@triton.jit
def _load_statistics(statistics, inside, all_rows, layer: tl.constexpr):
    """Mean, mean_rest, rstd, c1 and c2 of the rows at ``statistics``, which row_statistics has written.

    The mean is the pivot, and mean_rest what is missing from it.
    """
    mean, mean_rest, c2 = 0.0, 0.0, 0.0
    rstd = tl.load(statistics, mask=inside, other=0.0)
    c1 = tl.load(statistics + all_rows, mask=inside, other=0.0)
    if layer:
        c2 = tl.load(statistics + 2 * all_rows, mask=inside, other=0.0)
        mean = tl.load(statistics + 3 * all_rows, mask=inside, other=0.0)
        mean_rest = tl.load(statistics + 4 * all_rows, mask=inside, other=0.0)
    return mean, mean_rest, rstd, c1, c2


@triton.jit
def _store_column_sums(
    pointer,
    offset,
    terms,
    column,
    block: tl.constexpr,
    blocks: tl.constexpr,
    columns: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Stores a block of a program's partial dw or db: the sums of ``terms`` over the rows of a tile."""
    column_sums = tl.sum(terms, 0)[None, :]
    _store(pointer + offset + column, column_sums, column >= 0, column, block, blocks, columns, block_columns, True)


@triton.jit
def backward(
    x,
    weight,
    d_out,
    d_total,
    statistics,
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
    """Computes dx of every ``programs``-th tile of a group, and the partial dw and db of these tiles.

    ``whole`` rows are in registers, and their statistics are computed here; otherwise they are loaded from
    ``statistics``, and a program has one block of columns.
    """
    blocks: tl.constexpr = (columns + block_columns - 1) // block_columns if whole else 1
    group, program, all_rows = tl.program_id(0) * 0, tl.program_id(0), rows
    if grouped:
        group, program = program // programs, program % programs
        all_rows = (tl.num_programs(0) // programs).to(tl.int64) * rows
    group_rows = group.to(tl.int64) * rows
    column = tl.arange(0, block_columns)[None, :]
    if not whole:
        column += tl.program_id(1) * block_columns
    offset = tl.arange(0, block_rows)[:, None] * columns + column
    w_blocks, dw_blocks, db_blocks = (), (), ()
    if has_weight:
        weight_start = group * weight_stride
        w_blocks = _load(weight + weight_start + column, column >= 0, column, blocks, columns, block_columns, True, "")
    for _ in tl.static_range(blocks):
        if has_weight:
            # One sum for each row of a tile: rows are added up once, at the end, not in every iteration.
            dw_blocks += (tl.zeros([block_rows, block_columns], tl.float32),)
        if has_bias:
            db_blocks += (tl.zeros([block_rows, block_columns], tl.float32),)
    tiles = tl.cdiv(rows, block_rows)
    for item in tl.range(program, tiles, programs, num_stages=stages):
        tile = item
        # Backwards, as the rows that row_statistics has read last are still in the L2 cache.
        if not whole:
            tile = tiles - 1 - item
        row = tile * block_rows + tl.arange(0, block_rows)[:, None]
        inside = row < rows
        start = (group_rows + tile * block_rows) * columns
        x_blocks = _load(x + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        g_blocks = _load(d_out + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        if has_d_total:
            t_blocks = _load(d_total + start + offset, inside, column, blocks, columns, block_columns, even, eviction)
        if whole:
            mean, mean_rest, rstd, c1, c2 = _tile_statistics(
                x_blocks, g_blocks, w_blocks, column, block_rows, blocks, columns, block_columns, packed, layer,
                has_weight, eps, weight_offset,
            )  # fmt: skip
        else:
            mean, mean_rest, rstd, c1, c2 = _load_statistics(statistics + group_rows + row, inside, all_rows, layer)
        new_dw_blocks, new_db_blocks = (), ()
        for block in tl.static_range(blocks):
            x_hat, g = _to_float32(x_blocks[block], packed), _to_float32(g_blocks[block], packed)
            if layer:
                x_hat = x_hat - mean - mean_rest
            x_hat = x_hat * rstd
            d_x_block = g
            if has_weight:
                d_x_block = g * _offset_weight(w_blocks[block], weight_offset, packed)
                new_dw_blocks += (dw_blocks[block] + g * x_hat,)
            if has_bias:
                new_db_blocks += (db_blocks[block] + g,)
            d_x_block -= x_hat * c1
            if layer:
                d_x_block -= c2
            d_x_block = d_x_block * rstd
            if has_d_total:
                d_x_block += t_blocks[block].to(tl.float32)
            _store(d_x + start + offset, d_x_block, inside, column, block, blocks, columns, block_columns, even)
        dw_blocks, db_blocks = new_dw_blocks, new_db_blocks
    # Partial sums are [groups, programs, columns]: programs of one group are neighbours.
    partial = tl.program_id(0).to(tl.int64) * columns
    for block in tl.static_range(blocks):
        if has_weight:
            _store_column_sums(d_weight, partial, dw_blocks[block], column, block, blocks, columns, block_columns)
        if has_bias:
            _store_column_sums(d_bias, partial, db_blocks[block], column, block, blocks, columns, block_columns)


@triton.jit
def _sum_over_programs(parts, result, column, columns, programs: tl.constexpr, block_programs: tl.constexpr):
    """Sums [groups, programs, columns] over the programs, for a block of columns of one group."""
    group = tl.program_id(1).to(tl.int64)
    program = tl.arange(0, block_programs)[:, None]
    inside = column < columns
    sums = tl.zeros([block_programs, column.shape[1]], tl.float32)
    for first in tl.static_range(0, programs, block_programs):
        # The order of these additions depends on shapes only, so that dw and db repeat bit for bit.
        offsets = (group * programs + first + program) * columns + column
        sums += tl.load(parts + offsets, mask=inside & (first + program < programs), other=0.0)
    column_sums = tl.sum(sums, 0)[None, :]
    tl.store(result + group * columns + column, column_sums.to(result.dtype.element_ty), mask=inside)


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
    """Computes dw and db, [groups, columns], from the programs' partial sums, [groups, programs, columns]."""
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)[None, :]
    if has_weight:
        _sum_over_programs(weight_parts, d_weight, column, columns, programs, block_programs)
    if has_bias:
        _sum_over_programs(bias_parts, d_bias, column, columns, programs, block_programs)
