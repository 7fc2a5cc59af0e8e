"""Attention over a cache in Triton: a program has a query tile, the heads of one key head, and a split of the keys.

K and V are loaded through pointers, page by page, into an online softmax; the splits of one row are combined by a
second kernel (Flash-Decoding, Dao et al., 2023). `attend` is the whole of the first one; Triton inlines its helpers.

==========  ==========================================================  ====================================
symbol      meaning                                                     shape
==========  ==========================================================  ====================================
``q``       queries: row = token of the tile, then head of the group    [block_m, block_d]
``k``       keys of a step, transposed                                  [block_d, block_n]
``values``  V of a step; of a latent its first elements, so Kᵀ          [block_n, block_v]
S           ``scores`` = QK, then ``logits`` in base 2, masked by −∞    [block_m, block_n] float32
P           ``p`` = exp2(logits − m)                                    [block_m, block_n] float32
m           ``row_max``, running maximum of the logits                  [block_m] float32
l           ``row_sum``, running sum of P                               [block_m] float32
alpha       exp2(m before the step − m): rescales l and O               [block_m] float32
O           ``acc``, PV summed over the steps                           [block_m, block_v] float32
==========  ==========================================================  ====================================

One program of T steps of ``block_n`` keys, as Triton pipelines the loop with ``stages``::

    loads (cp.async)  Q  K0 V0  K1 V1     K2 V2     ...
    MMA                         QK0  PV0  QK1  PV1  ...  QK(T-1)  PV(T-1)
    ALU                            P0        P1     ...         P(T-1)     O / l, lse -> stores

Scales of a quantised cache multiply logits and P, which are float32. With ``half``, elements of one byte are multiplied
in float16 whatever the dtype of a 16-bit query: first and second neighbours along d in an MMA each (see `elements`), so
that ``q``, ``k``, ``values`` and ``acc`` are two arrays of half the columns; one is named ``_second``.
"""

import triton
import triton.language as tl

from tilewright.kernels.paged_attention.triton.elements import (
    MEANINGS,  # noqa: F401 - the interpreter looks for it in the module of a kernel
    converted,
    latents_of_rows,
    neighbours,
)
from tilewright.kernels.paged_attention.triton.positions import (
    head_scales,
    kv_range,
    page_numbers,
    page_rows,
    query_tile,
    row_slopes,
    token_scales,
    tree_words,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

MAX_LOG2_P = tl.constexpr(15.0)
"""P in float16 is at most 2 to this power, not 1: it has few exponents below 1. An MMA accumulates in float32."""


@triton.jit
def _load_rows(query, row, valid, first, size, block: tl.constexpr, step: tl.constexpr, row_stride: tl.constexpr):
    """Every ``step``-th element of rows from element ``first`` on, zeros after ``size`` elements: [rows, block / step].

    Args:
      row, valid: [rows], the indices of the rows in ``query``, and which of them exist.
    """
    d = tl.arange(0, block // step) * step
    return tl.load(
        query + row[:, None] * row_stride + first + d[None, :], mask=valid[:, None] & (d < size)[None, :], other=0.0
    )


@triton.jit
def _load_queries(
    query, row, valid,
    head_dim: tl.constexpr, tile_dim: tl.constexpr, block_d: tl.constexpr, block_r: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Q: ``(q, q_second, q_rest, q_rest_second, unit)``; those that a kernel does not use are aliases of ``q``.

    ``unit`` [block_m] is what rows were divided by.
    """
    pairs: tl.constexpr = 2 if half else 1
    # With ``half`` even columns here and odd ones in ``q_second``, as `neighbours` splits the keys.
    q = _load_rows(query, row, valid, 0, tile_dim, block_d, pairs, head_dim)
    q_second, q_rest, q_rest_second, unit = q, q, q, 1.0
    if half:
        q_second = _load_rows(query + 1, row, valid, 0, tile_dim, block_d, pairs, head_dim)
    # A head_dim that is not a power of two: the rest is a second, narrower MMA instead of padding the first to twice
    # its size.
    if block_r > 0:
        q_rest = _load_rows(query, row, valid, tile_dim, head_dim - tile_dim, block_r, pairs, head_dim)
        if half:
            q_rest_second = _load_rows(query + 1, row, valid, tile_dim, head_dim - tile_dim, block_r, pairs, head_dim)
    if half and query.dtype.element_ty != tl.float16:
        # Float16 has few exponents: a row that is converted to it is divided by a power of two of its magnitude.
        size = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_second.to(tl.float32)), 1))
        if block_r > 0:
            size = tl.maximum(size, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
            size = tl.maximum(size, tl.max(tl.abs(q_rest_second.to(tl.float32)), 1))
        # At least 2⁻¹⁰⁰, whose inverse is finite: rows may be zeros.
        unit = tl.exp2(tl.floor(tl.log2(tl.maximum(size, 2.0**-100))))
        inverse = (1.0 / unit)[:, None]
        q = (q.to(tl.float32) * inverse).to(tl.float16)
        q_second = (q_second.to(tl.float32) * inverse).to(tl.float16)
        if block_r > 0:
            q_rest = (q_rest.to(tl.float32) * inverse).to(tl.float16)
            q_rest_second = (q_rest_second.to(tl.float32) * inverse).to(tl.float16)
    return q, q_second, q_rest, q_rest_second, unit


@triton.jit
def _scores(
    q, q_second, q_rest, q_rest_second, key, token_row, kv_head, valid,
    stored: tl.constexpr, dtype: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, tile_dim: tl.constexpr,
    block_d: tl.constexpr, block_r: tl.constexpr, exact: tl.constexpr, half: tl.constexpr, row_bytes: tl.constexpr,
):  # fmt: skip
    """``(scores, k, k_second)``: S of a step, and the keys, which are the values of a latent.

    Args:
      token_row: [block_n], page · page_size + row of the tokens of the step.
      stored, dtype: of the cache and of the query.
    """
    pairs: tl.constexpr = 2 if half else 1
    zero: tl.constexpr = 0 if half else 0.0
    stride: tl.constexpr = head_dim // pairs
    offset = token_row * (kv_heads * stride) + kv_head * stride
    if row_bytes:
        k, k_rest = latents_of_rows(key, token_row, valid, dtype)
    else:
        d = tl.arange(0, block_d // pairs)
        k = tl.load(
            key + offset[None, :] + d[:, None], mask=valid[None, :] & (d < tile_dim // pairs)[:, None], other=zero
        )
    k_second = k
    if half:
        k, k_second = neighbours(k, stored)
        scores = tl.dot(q_second, k_second, tl.dot(q, k))
    else:
        k = converted(k, dtype)
        scores = tl.dot(q, k, input_precision="ieee" if exact else "tf32")
    if block_r > 0:
        if not row_bytes:
            r = tl.arange(0, block_r // pairs)
            valid_r = r < (head_dim - tile_dim) // pairs
            k_rest = tl.load(
                key + (offset + tile_dim // pairs)[None, :] + r[:, None],
                mask=valid[None, :] & valid_r[:, None],
                other=zero,
            )
        if half:
            rest_first, rest_second = neighbours(k_rest, stored)
            scores = tl.dot(q_rest_second, rest_second, tl.dot(q_rest, rest_first, scores))
        else:
            k_rest = converted(k_rest, dtype)
            scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee" if exact else "tf32")
    return scores, k, k_second


@triton.jit
def _masked_logits(
    scores, valid, position, position_m, slope,
    softmax_scale: tl.constexpr, soft_cap: tl.constexpr, left: tl.constexpr, right: tl.constexpr,
    has_slopes: tl.constexpr, has_soft_cap: tl.constexpr, has_left: tl.constexpr, has_right: tl.constexpr,
):  # fmt: skip
    """Logits in base 2, with ALiBi and soft cap, −∞ where a key is masked.

    Args:
      position, valid: [block_n], of the keys.
      position_m, slope: [block_m], of the rows.
    """
    visible = valid[None, :]
    distance = position[None, :] - position_m[:, None]
    if has_slopes or has_soft_cap:
        logits = scores * softmax_scale
        if has_slopes:
            logits = logits + slope[:, None] * distance.to(tl.float32)
        if has_soft_cap:
            # tanh by exp2 of what is not positive, which cannot overflow.
            size = tl.abs(logits)
            small = tl.exp2(size * (-2.0 * LOG2E / soft_cap))
            size = soft_cap * (1.0 - small) / (1.0 + small)
            logits = tl.where(logits < 0, -size, size)
        logits = logits * LOG2E
    else:
        # Nothing comes between the scale and base 2: one factor.
        logits = scores * (softmax_scale * LOG2E)
    if has_left:
        visible = visible & (distance >= -left)
    if has_right:
        visible = visible & (distance <= right)
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def _masked_by_tree(logits, words_m, valid_m, first, n, block_n: tl.constexpr, mask_words: tl.constexpr):
    """Logits, −∞ where a row has no bit for a new token.

    Args:
      words_m, valid_m: [block_m], pointers to the words of those rows that are valid, of `tree_words`.
      first: index of the first key among the new tokens, negative before them.
      n: [block_n], indices of the keys from ``first`` on.
    """
    if mask_words > 0:  # noqa: SIM102 - decided when the kernel is compiled
        # Steps before the new tokens, nearly all of them, cost nothing. And from inside of a branch the loop does not
        # bring the words to shared memory ahead of time, as it does K and V.
        if first + block_n > 0:
            # Words of each row, shifted so that key n has bit n % 32 of the word of its 32 keys: a load for each
            # element would be as large as the logits, in another layout.
            shift = (first & 31).to(tl.uint64)
            word = tl.where(valid_m, first >> 5, mask_words)
            low = tl.load(words_m + word, mask=(word >= 0) & (word < mask_words), other=0).to(tl.uint64)
            bits = tl.zeros_like(logits).to(tl.uint32)
            for i in tl.static_range((block_n + 31) // 32):
                word += 1
                high = tl.load(words_m + word, mask=(word >= 0) & (word < mask_words), other=0).to(tl.uint64)
                shifted = ((low | (high << 32)) >> shift).to(tl.uint32)
                bits = tl.where((n >> 5 == i)[None, :], shifted[:, None], bits)
                low = high
            visible = ((bits >> (n & 31)[None, :].to(tl.uint32)) & 1) == 1
            logits = tl.where(visible | (first + n < 0)[None, :], logits, float("-inf"))
    return logits


@triton.jit
def _online_softmax(logits, row_max, row_sum, half: tl.constexpr):
    """``(p, alpha, row_max, row_sum)`` after a step; P is at most 1, or 2 to the `MAX_LOG2_P` where ``half``."""
    new_max = tl.maximum(row_max, tl.max(logits, 1) - (MAX_LOG2_P if half else 0.0))
    # A row that is fully masked so far has m = −∞, and is shifted by 0: −∞ − −∞ is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(logits - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    # l is of P as it is here, before scales of V multiply it: it normalises the softmax, not the values.
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def _scale_in_units(v_scale, value_unit):
    """``(v_scale, change, value_unit)``: scales of V in units of the largest scale so far.

    So that P times a scale fits float16, O is in these units too; ``change`` is what it has to be multiplied by.
    """
    unit = tl.maximum(value_unit, tl.max(tl.abs(v_scale), 0))
    # 0 as long as all scales are 0: nothing is in O then.
    per_unit = 1.0 / tl.where(unit == 0.0, 1.0, unit)
    return v_scale * per_unit, value_unit * per_unit, unit


@triton.jit
def _load_values(
    value, token_row, kv_head, valid,
    kv_heads: tl.constexpr, value_dim: tl.constexpr, block_v: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """V of a step as it is stored, [block_n, block_v], or pairs of half as many columns.

    Args:
      token_row: [block_n], page · page_size + row of the tokens of the step.
    """
    pairs: tl.constexpr = 2 if half else 1
    zero: tl.constexpr = 0 if half else 0.0
    stride: tl.constexpr = value_dim // pairs
    offset = token_row * (kv_heads * stride) + kv_head * stride
    v = tl.arange(0, block_v // pairs)
    # Zeros where a token is masked: its P is 0, but memory that was never written may hold NaN, and 0 · NaN is NaN.
    return tl.load(value + offset[:, None] + v[None, :], mask=valid[:, None] & (v < stride)[None, :], other=zero)


@triton.jit
def _accumulate(
    acc, acc_second, p, alpha, values, k, k_second,
    stored: tl.constexpr, dtype: tl.constexpr, latent: tl.constexpr, exact: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """``(acc, acc_second)``: O · alpha + PV.

    Args:
      values: as they are stored; of a latent not used, whose V is the transposed ``k``.
    """
    if half:
        p = p.to(tl.float16)
        if latent:
            values, values_second = tl.trans(k), tl.trans(k_second)
        else:
            values, values_second = neighbours(values, stored)
        acc = tl.dot(p, values, acc * alpha[:, None])
        acc_second = tl.dot(p, values_second, acc_second * alpha[:, None])
    else:
        if latent:
            values = tl.trans(k)
        else:
            values = converted(values, dtype)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee" if exact else "tf32")
    return acc, acc_second


@triton.jit
def _whole_rows(acc, acc_second, block_m: tl.constexpr, block_v: tl.constexpr, half: tl.constexpr):
    """O with the columns of both parts in turn, [block_m, block_v], where there are two."""
    if half:
        acc = tl.reshape(tl.join(acc, acc_second), [block_m, block_v])
    return acc


@triton.jit
def _add_sinks(sinks, head, valid, row_max, row_sum, acc, num_sinks: tl.constexpr, block_sinks: tl.constexpr):
    """``(row_max, row_sum, acc)`` with the sinks of each row's head: keys without values."""
    s = tl.arange(0, block_sinks)
    sink = tl.load(
        sinks + head[:, None] * num_sinks + s[None, :],
        mask=valid[:, None] & (s < num_sinks)[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    # Once for a row: with several splits `combine` adds the sinks instead.
    sink = sink * LOG2E
    new_max = tl.maximum(row_max, tl.max(sink, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(tl.exp2(sink - shift[:, None]), 1)
    return new_max, row_sum, acc * alpha[:, None]


@triton.jit
def _store(out, lse, row, split, v, valid, row_max, row_sum, acc, value_dim: tl.constexpr, splits: tl.constexpr):
    """Stores O / l and lse, in base 2 if they are of one of several splits. Fully masked rows have 0 and −∞.

    Args:
      row, v: rows, [block_m], and columns, [block_v], of ``out``.
    """
    # Fully masked rows have l = 0: they are divided by 1.
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if splits == 1:
        row_lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
    else:
        # Base 2, as `combine` goes on with exp2.
        row_lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        row = row * splits + split
    tl.store(
        out + row[:, None] * value_dim + v[None, :],
        result.to(out.dtype.element_ty),
        mask=valid[:, None] & (v < value_dim)[None, :],
    )
    tl.store(lse + row, row_lse, mask=valid)


@triton.jit
def attend(
    query, key, value, table, lengths, starts, tiles, key_scale, value_scale, slopes, sinks, tree_mask,
    boundaries, num_pages, num_tiles, out, lse,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    page_size: tl.constexpr, columns: tl.constexpr, capacity: tl.constexpr, q_length: tl.constexpr,
    tiles_per_sequence: tl.constexpr, paged: tl.constexpr, packed: tl.constexpr, latent: tl.constexpr,
    has_starts: tl.constexpr, has_key_scale: tl.constexpr, has_value_scale: tl.constexpr,
    key_scale_page: tl.constexpr, key_scale_row: tl.constexpr, key_scale_head: tl.constexpr,
    value_scale_page: tl.constexpr, value_scale_row: tl.constexpr, value_scale_head: tl.constexpr,
    has_slopes: tl.constexpr, num_sinks: tl.constexpr, block_sinks: tl.constexpr,
    softmax_scale: tl.constexpr, soft_cap: tl.constexpr, has_soft_cap: tl.constexpr,
    left: tl.constexpr, has_left: tl.constexpr, right: tl.constexpr, has_right: tl.constexpr,
    splits: tl.constexpr, block_q: tl.constexpr, block_g: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr, block_r: tl.constexpr, block_v: tl.constexpr, tile_dim: tl.constexpr,
    exact: tl.constexpr, stages: tl.constexpr, half: tl.constexpr, row_bytes: tl.constexpr, mask_words: tl.constexpr,
):  # fmt: skip
    """Attends with the heads of one key head of one query tile to one of ``splits`` parts of its keys.

    Args:
      query: [tokens, heads, head_dim].
      key, value: [num_pages, page_size, kv_heads, ...] where ``paged``, else [sequences, capacity, kv_heads, ...].
      table: [sequences, columns] page numbers; entries that are not pages are masked.
      lengths, starts: [sequences], the keys of a sequence are [start, length).
      tiles: see `query_tile`.
      key_scale, value_scale: with strides for page, row and head, 0 where they are broadcast.
      slopes: [heads] of ALiBi.
      sinks: [heads, num_sinks].
      tree_mask, boundaries: see `tree_words`.
      out, lse: [tokens, heads, value_dim] and [tokens, heads]; with several splits [tokens, heads, splits, ...] of
        partial results, whose lse is in base 2.
      latent: V is the first ``value_dim`` elements of K, which has no array of its own.
      block_q, block_g: tokens, and heads of the group, of the ``block_m`` rows of a tile.
      block_d, block_r: elements of K in the first MMA (``tile_dim`` of them are real), and in a second; 0 for none.
      exact, half: float32 is multiplied without tensor cores; elements of one byte are, in float16 as pairs.
      row_bytes: K is uint8, the rows of `latent_rows.py`.
    """
    groups: tl.constexpr = heads // kv_heads
    group_blocks: tl.constexpr = (groups + block_g - 1) // block_g
    # Heads first: those of one token lie side by side in memory, and are read at about the same time.
    program = tl.program_id(0)
    kv_head = program % (kv_heads * group_blocks) // group_blocks
    group_block = program % group_blocks
    tile = program // (kv_heads * group_blocks) % num_tiles
    split = program // (kv_heads * group_blocks) // num_tiles
    sequence, token, rows, first, length = query_tile(
        tiles, lengths, tile, num_tiles, packed, q_length, tiles_per_sequence, block_q
    )
    if rows <= 0:
        return
    low, start, end = kv_range(
        starts, sequence, first, rows, length, split,
        capacity, left, right, has_starts, has_left, has_right, splits, block_n,
    )  # fmt: skip

    m = tl.arange(0, block_m)
    row, group = m // block_g, group_block * block_g + m % block_g
    valid_m = (row < rows) & (group < groups)
    head = kv_head * groups + group
    out_row = (token + row).to(tl.int64) * heads + head
    pairs: tl.constexpr = 2 if half else 1
    stored: tl.constexpr = key.dtype.element_ty
    dtype: tl.constexpr = query.dtype.element_ty
    if half:
        key = key.to(tl.pointer_type(tl.int16), bitcast=True)
        value = value.to(tl.pointer_type(tl.int16), bitcast=True)
    q, q_second, q_rest, q_rest_second, unit_m = _load_queries(
        query, out_row, valid_m, head_dim, tile_dim, block_d, block_r, half
    )
    slope = row_slopes(slopes, head, valid_m, has_slopes)
    position_m = first + row
    words_m, first_new = tree_words(tree_mask, boundaries, sequence, token, row, first, mask_words)

    # A scale that all tokens of a head share needs no vector of them; that of values waits until the end.
    one_key_scale: tl.constexpr = key_scale_page == 0 and key_scale_row == 0
    one_value_scale: tl.constexpr = one_key_scale if latent else value_scale_page == 0 and value_scale_row == 0
    values_have_scale: tl.constexpr = has_key_scale if latent else has_value_scale
    scaled_values: tl.constexpr = values_have_scale and not one_value_scale
    head_key_scale, head_value_scale = head_scales(
        key_scale, value_scale, kv_head, key_scale_head, value_scale_head,
        has_key_scale and one_key_scale, values_have_scale and one_value_scale, latent,
    )  # fmt: skip

    row_max = tl.full([block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v // pairs], tl.float32)
    acc_second = tl.zeros([block_m, block_v // pairs], tl.float32)
    value_unit = 0.0
    n = tl.arange(0, block_n)
    # Where a block has several pages, their numbers are loaded one block ahead: the loads of K and V need not wait.
    many_pages: tl.constexpr = paged and page_size % block_n > 0
    pages: tl.constexpr = block_n // page_size if block_n % page_size == 0 else 0
    table_row = table + sequence.to(tl.int64) * columns
    if many_pages:
        next_page = page_numbers(table_row, start, end, page_size, block_n, pages)

    for at in tl.range(start, end, block_n, num_stages=stages):
        position = at + n
        valid = (position >= low) & (position < end)
        if many_pages:
            page = next_page
            next_page = page_numbers(table_row, at + block_n, end, page_size, block_n, pages)
        elif paged:
            page = tl.load(table_row + at // page_size)
        else:
            page = sequence
        page, page_row, valid = page_rows(
            page, position, valid, at, n, low, end, num_pages, page_size, block_n, paged, many_pages, pages
        )
        token_row = (page * page_size + page_row).to(tl.int64)
        # Loaded before the MMAs are waited for: unlike K and V they are not brought to shared memory ahead of time.
        k_scale, v_scale = token_scales(
            key_scale, value_scale, page, page_row, kv_head, valid,
            key_scale_page, key_scale_row, key_scale_head, value_scale_page, value_scale_row, value_scale_head,
            has_key_scale and not one_key_scale, scaled_values, latent,
        )  # fmt: skip
        scores, k, k_second = _scores(
            q, q_second, q_rest, q_rest_second, key, token_row, kv_head, valid,
            stored, dtype, kv_heads, head_dim, tile_dim, block_d, block_r, exact, half, row_bytes,
        )  # fmt: skip
        if half and dtype != tl.float16:
            scores = scores * unit_m[:, None]
        if has_key_scale:
            scores = scores * (head_key_scale if one_key_scale else k_scale[None, :])
        logits = _masked_logits(
            scores, valid, position, position_m, slope,
            softmax_scale, soft_cap, left, right, has_slopes, has_soft_cap, has_left, has_right,
        )  # fmt: skip
        logits = _masked_by_tree(logits, words_m, valid_m, at - first_new, n, block_n, mask_words)
        p, alpha, row_max, row_sum = _online_softmax(logits, row_max, row_sum, half)
        if scaled_values:
            if half:
                v_scale, change, value_unit = _scale_in_units(v_scale, value_unit)
                alpha = alpha * change
            p = p * v_scale[None, :]
        values = k
        if not latent:
            values = _load_values(value, token_row, kv_head, valid, kv_heads, value_dim, block_v, half)
        acc, acc_second = _accumulate(
            acc, acc_second, p, alpha, values, k, k_second, stored, dtype, latent, exact, half
        )

    acc = _whole_rows(acc, acc_second, block_m, block_v, half)
    v = tl.arange(0, block_v)
    if scaled_values and half:
        acc = acc * value_unit
    if values_have_scale and one_value_scale:
        acc = acc * head_value_scale
    if splits == 1 and num_sinks > 0:
        row_max, row_sum, acc = _add_sinks(sinks, head, valid_m, row_max, row_sum, acc, num_sinks, block_sinks)
    _store(out, lse, out_row, split, v, valid_m, row_max, row_sum, acc, value_dim, splits)


@triton.jit
def combine(
    parts, part_lse, sinks, out, lse,
    heads: tl.constexpr, value_dim: tl.constexpr, num_sinks: tl.constexpr, block_sinks: tl.constexpr,
    splits: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one row and head, and adds its sinks. A fully masked split has the lse −∞.

    Args:
      parts, part_lse: [tokens, heads, splits, value_dim] and [tokens, heads, splits], of `attend`.
      sinks: [heads, num_sinks].
      out, lse: [tokens, heads, value_dim] and [tokens, heads].
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * heads + head
    s, v = tl.arange(0, block_s), tl.arange(0, block_v)
    split_lse = tl.load(part_lse + row * splits + s, mask=s < splits, other=float("-inf"))
    max_lse = tl.max(split_lse, 0)
    if num_sinks > 0:
        i = tl.arange(0, block_sinks)
        sink = tl.load(sinks + head * num_sinks + i, mask=i < num_sinks, other=float("-inf")).to(tl.float32) * LOG2E
        max_lse = tl.maximum(max_lse, tl.max(sink, 0))
    shift = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    # exp2(lse) is a split's l relative to a common maximum, by which its normalised O is weighted.
    scale = tl.exp2(split_lse - shift)
    row_sum = tl.sum(scale, 0)
    if num_sinks > 0:
        row_sum = row_sum + tl.sum(tl.exp2(sink - shift), 0)
    # Splits whose scale is 0 are not loaded.
    values = tl.load(
        parts + (row * splits + s)[:, None] * value_dim + v[None, :],
        mask=(scale > 0.0)[:, None] & (v < value_dim)[None, :],
        other=0.0,
    )
    result = tl.sum(values * scale[:, None], 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + row * value_dim + v, result.to(out.dtype.element_ty), mask=v < value_dim)
    tl.store(lse + row, tl.where(row_sum == 0.0, float("-inf"), (shift + tl.log2(row_sum)) * LN2))
