"""The backward pass of attention in Triton: dK and dV by keys, and dQ by queries or, if ``FUSED``, with dK and dV.

Dao, "FlashAttention-2" (2023).

  Q, K, V, dO  query, key, value and the cotangent of out; tiles ``q``, ``k``, ``v``, ``d_o``
  S            ``scores`` = Q Kᵀ; logits = soft_cap(SCALE · S + bias)
  lse_log2     lse · log2(e) of each row, +inf for fully masked rows, whose P then is 0
  P            ``p`` = exp2(logits · log2(e) - lse_log2), normalised; dropped_p is P after the dropout
  delta        rowsum(dO ∘ O) - dlse, a number for each row
  dP           ``d_p`` = dO Vᵀ, times the dropout's factor
  dS           ``d_s`` = P ∘ (dP - delta), times the slope of the soft cap: the gradient of SCALE · S, and of the bias
  dV, dK       Σ dropped_pᵀ dO and SCALE · Σ dSᵀ Q, over queries and over the heads that share a head of keys
  dQ           SCALE · Σ dS K, over keys

Operands of every MMA have the input's dtype (P and dS are rounded to it; float32 goes as TF32, or as three of them for
PRECISION "tf32x3"); scores, P, dP, dS, statistics and accumulators are float32.

Grids have one axis, in the order of ``scores.decode_program_id``:
  attention_row_terms            a program for each BLOCK queries of each head: delta and lse_log2
  attention_key_value_gradients  a program for each BLOCK_K keys of each head of keys, which goes through the queries of
                                 all heads that share it
  attention_query_gradients      a program for each BLOCK_Q queries of each head; not launched if ``FUSED``

By keys, scores are transposed, [keys, queries]: keys are the rows of the accumulators of dK and dV, so Pᵀ and dSᵀ go
from registers into the MMAs. With ``FUSED`` there are five matmuls instead of seven, but programs add to dQ atomically,
in the order in which they come; dQ by queries repeats bit for bit.
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton.scores import (
    LOG2E,
    LOWEST_LSE,
    accumulator_target,
    add_to_accumulator,
    capped_logits,
    decode_program_id,
    dropout_keep_mask,
    inside_of_batch,
    load_resident_tile,
    load_row,
    load_tile,
    padded_length,
    ranges_of_head,
    row_source,
    rows_of_batch,
    score_pointers,
    score_terms_of_head,
    scores_of_head,
    store_tile,
    tile_source,
    visibility_mask,
    visible_span,
)


@triton.jit
def attention_row_terms(
    out, d_out, lse, d_lse, inside,
    q_length,
    delta, lse_log2,
    HEADS: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_D_LSE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Computes delta and lse_log2 of a tile of rows: float32 ``[batch, heads, padded_length(q_length)]``.

    Fully masked rows, and those below ``LOWEST_LSE``, get delta = 0 and lse_log2 = +inf, so that P, dS and every
    gradient of theirs are 0.
    """
    tile, head_index = decode_program_id((q_length + BLOCK - 1) // BLOCK, 1, False)
    batch, head = head_index // HEADS, head_index % HEADS
    start = tile * BLOCK
    offset = batch.to(tl.int64) * q_length * (HEADS * HEAD_VALUE_DIM)
    o = load_tile(out + offset, head, start, q_length, HEADS, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, True, False)
    q_first, q_end, _, _ = inside_of_batch(inside, batch, q_length, q_length, INSIDE)
    d_o = load_tile(
        d_out + offset, head, start, q_end, HEADS, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, True, False, q_first, INSIDE
    )  # fmt: skip
    rows = start + tl.arange(0, BLOCK)
    inside = rows < q_length
    row = head_index.to(tl.int64) * q_length + rows
    row_delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    # d lse / d logits is P: the cotangent of lse joins delta with the opposite sign.
    if HAS_D_LSE:
        row_delta -= tl.load(d_lse + row, mask=inside, other=0.0)
    row_lse = tl.load(lse + row, mask=inside, other=0.0)
    no_gradient = row_lse < LOWEST_LSE
    # Results have padded rows, which TMA can load; out and lse have not.
    padded_row = head_index.to(tl.int64) * padded_length(q_length) + rows
    tl.store(delta + padded_row, tl.where(no_gradient, 0.0, row_delta), mask=inside)
    tl.store(lse_log2 + padded_row, tl.where(no_gradient, float("inf"), row_lse * LOG2E), mask=inside)


@triton.jit
def probabilities(
    scores, first_row, rows, first_column, columns, lse_log2, bias, q_rows, kv_rows, mask, q_length, kv_length,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr,
    HAS_ROWS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P of one tile of scores, transposed or not, and the derivative of the soft cap (of use with ``SOFT_CAP`` only).

    Without ``MASKED`` every score of the tile is visible.
    """
    slope = scores
    if SOFT_CAP > 0.0 or BIAS >= 0:
        logits, slope = capped_logits(
            scores, first_row, rows, first_column, columns, q_length, kv_length, bias, SCALE, SOFT_CAP, BIAS
        )
        p = tl.exp2(logits * LOG2E - lse_log2)
    else:
        # Normalised at once, as lse holds l: no maximum and no division. One FMA.
        p = tl.exp2(scores * (SCALE * LOG2E) - lse_log2)
    if MASKED:
        visible = visibility_mask(
            first_row, rows, first_column, columns, q_length, kv_length, q_rows, kv_rows, mask, LOWEST, HIGHEST,
            BANDED, HAS_ROWS, MASK,
        )  # fmt: skip
        p = tl.where(visible, p, 0.0)
    return p, slope


@triton.jit
def key_value_steps(
    d_k, d_v, k, v, query_source, d_out_source, lse_log2_source, delta_source, bias, q_rows, kv_rows, mask,
    dropout_keys, d_query, d_bias, batch, first_head, first_column, start, end, q_length, kv_length,
    q_first, q_end,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, HAS_ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the queries from ``start`` to ``end`` of every head to dK and dV of a tile of keys.

    Heads and queries are one loop: a loop around it would take registers, and fill the pipeline anew for each head.
    """
    columns = first_column + tl.arange(0, BLOCK_K)[:, None]
    # All heads go through the same queries: bounds are those of the union of their ranges.
    steps = (end - start + BLOCK_Q - 1) // BLOCK_Q
    for step in tl.range(0, GROUPS * steps):
        row, head = start + step * BLOCK_Q, first_head
        if GROUPS > 1:
            member = step // steps
            row, head = start + (step - member * steps) * BLOCK_Q, first_head + member
        rows = row + tl.arange(0, BLOCK_Q)
        head_index = batch * HEADS + head
        head_bias, head_mask, dropout_key = score_terms_of_head(
            bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
        )
        # Zeros beyond the end: what memory holds there times P = 0 may be NaN.
        q = load_tile(
            query_source, head, row, q_end, HEADS, BLOCK_Q, DIM, HEAD_DIM, MASKED, TMA, q_first, INSIDE
        )  # fmt: skip
        d_o = load_tile(
            d_out_source, head, row, q_end, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA, q_first, INSIDE
        )  # fmt: skip
        # All tiles of scores in this kernel are [keys, queries]: S, P, dP and dS below are transposed.
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        # Beyond the end +inf, or 0 by TMA: such a step is always MASKED, which hides these rows in either case.
        row_lse = load_row(lse_log2_source, head_index, row, q_length, BLOCK_Q, float("inf"), MASKED, TMA)
        p, slope = probabilities(
            scores, row, rows[None, :], first_column, columns, row_lse[None, :], head_bias, q_rows, kv_rows,
            head_mask, q_length, kv_length, SCALE, SOFT_CAP, LOWEST, HIGHEST, BANDED, HAS_ROWS, MASK, BIAS, MASKED,
        )  # fmt: skip
        dropped_p = p
        keep_factor = p
        if THRESHOLD > 0:
            keep_factor = tl.where(dropout_keep_mask(dropout_key, rows[None, :], columns, THRESHOLD), KEEP_SCALE, 0.0)
            dropped_p = p * keep_factor
        # Pᵀ is the left operand, which wgmma takes from registers.
        d_v = tl.dot(dropped_p.to(d_o.dtype), d_o, d_v, input_precision=PRECISION)
        d_p = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
        if THRESHOLD > 0:
            d_p = d_p * keep_factor
        row_delta = load_row(delta_source, head_index, row, q_length, BLOCK_Q, 0.0, MASKED, TMA)
        # P, not dropped_p: delta is a sum of dP over all probabilities, and softmax comes before the dropout.
        d_s = p * (d_p - row_delta[None, :])
        if SOFT_CAP > 0.0:
            d_s = d_s * slope
        rounded_d_s = d_s.to(q.dtype)
        # dK before dQ: in the other order Triton 3.6 makes a loop of it that ptxas serialises.
        d_k = tl.dot(rounded_d_s, q, d_k, input_precision=PRECISION)
        if FUSED:
            if BIAS >= 0:
                head_d_bias = scores_of_head(d_bias, batch, head, HEADS, q_length, kv_length, 15)
                pointers = score_pointers(head_d_bias, row, rows[None, :], first_column, columns, kv_length, 15)
                tl.store(pointers, d_s, mask=(rows < q_length)[None, :] & (columns < kv_length))
            # Computed transposed, dQᵀ [DIM, queries] = Kᵀ dSᵀ: no operand has to go through registers, and a tile of
            # few queries still is a wgmma: they are its N, which may be small, and not its M, which is 64.
            d_q = tl.dot(tl.trans(k), rounded_d_s, input_precision=PRECISION)
            add_to_accumulator(d_query, d_q, head, row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    return d_k, d_v


@triton.jit
def attention_key_value_gradients(
    query, key, value, d_out, lse_log2, delta, bias, q_rows, kv_rows, mask, query_ranges, inside, dropout_keys,
    d_query, d_bias,
    q_length, kv_length,
    d_key, d_value,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, HAS_ROWS: tl.constexpr, Q_ROWS_BATCH: tl.constexpr, KV_ROWS_BATCH: tl.constexpr,
    MASK: tl.constexpr, RANGES: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, FUSED: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of one tile of keys of one head of keys, over all query heads that share it.

    If ``FUSED``, adds to ``d_query``, float32 ``[batch, heads, head_dim, padded_length(q_length)]`` without the scale,
    and writes the visible part of ``d_bias`` [batch, heads, q_length, kv_length].
    """
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tile, head_index = decode_program_id((kv_length + BLOCK_K - 1) // BLOCK_K, AT_ONCE, LAST_FIRST)
    batch, kv_head = head_index // KV_HEADS, head_index % KV_HEADS
    first_column, first_head = tile * BLOCK_K, kv_head * GROUPS
    batch_64 = batch.to(tl.int64)
    key_offset = batch_64 * kv_length * (KV_HEADS * HEAD_DIM)
    value_offset = batch_64 * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    query_offset = batch_64 * q_length * (HEADS * HEAD_DIM)
    out_offset = batch_64 * q_length * (HEADS * HEAD_VALUE_DIM)
    q_first, q_end, kv_first, kv_end = inside_of_batch(inside, batch, q_length, kv_length, INSIDE)
    k = load_resident_tile(
        key + key_offset, kv_head, first_column, kv_end, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA, kv_first, INSIDE
    )  # fmt: skip
    v = load_resident_tile(
        value + value_offset, kv_head, first_column, kv_end, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA,
        kv_first, INSIDE,
    )  # fmt: skip
    query_source = tile_source(
        query + query_offset, q_end, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA, q_first, INSIDE
    )  # fmt: skip
    d_out_source = tile_source(
        d_out + out_offset, q_end, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA, q_first, INSIDE
    )  # fmt: skip
    # Rows of statistics up to this batch element's last one: the descriptor bounds what TMA reads.
    num_rows = (batch + 1) * HEADS
    lse_log2_source = row_source(lse_log2, num_rows, q_length, BLOCK_Q, TMA)
    delta_source = row_source(delta, num_rows, q_length, BLOCK_Q, TMA)
    d_query_target = d_query
    if FUSED:
        batch_d_query = d_query + batch_64 * (HEADS * HEAD_DIM) * padded_length(q_length)
        d_query_target = accumulator_target(batch_d_query, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    q_rows, kv_rows = rows_of_batch(q_rows, kv_rows, batch, q_length, kv_length, Q_ROWS_BATCH, KV_ROWS_BATCH)
    ranges = ranges_of_head(query_ranges, batch, first_head, kv_length, HEADS, RANGES)
    # Ranges of each head (shape bit 4) differ within a group: its queries are the union of the members' ranges.
    members: tl.constexpr = GROUPS if RANGES & 4 else 1
    # MASK_TAIL if fused: unmasked keys beyond the end get a P like any other. Their dK and dV are not stored, but
    # their dS must not reach dQ.
    bounds = visible_span(
        first_column, kv_length, q_length, ranges, members, BLOCK_K, BLOCK_Q, -HIGHEST, -LOWEST, BANDED, RANGES >= 0,
        FUSED,
    )  # fmt: skip
    d_k = tl.zeros((BLOCK_K, DIM), tl.float32)
    d_v = tl.zeros((BLOCK_K, VALUE_DIM), tl.float32)
    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            d_k, d_v = key_value_steps(
                d_k, d_v, k, v, query_source, d_out_source, lse_log2_source, delta_source,
                bias, q_rows, kv_rows, mask, dropout_keys, d_query_target, d_bias, batch, first_head, first_column,
                bounds[part], bounds[part + 1], q_length, kv_length, q_first, q_end,
                HEADS, GROUPS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST,
                HIGHEST, BANDED, HAS_ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE,
                PRECISION, TMA, FUSED, part != 1, INSIDE,
            )  # fmt: skip
    # dS is the gradient of SCALE · S, so the scale multiplies the sums once.
    store_tile(d_key + key_offset, d_k * SCALE, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA)
    store_tile(
        d_value + value_offset, d_v, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM,
        HEAD_VALUE_DIM, TMA,
    )  # fmt: skip


@triton.jit
def query_steps(
    d_q, q, d_o, row_lse, row_delta, key, value, bias, d_bias, q_rows, kv_rows, mask, dropout_key,
    kv_head, first_row, start, end, q_length, kv_length, kv_first, kv_end,
    KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, HAS_ROWS: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the keys from ``start`` to ``end`` to dQ of a tile of queries, and writes their dbias.

    Scores are [queries, keys] here. The bias, ``d_bias``, the mask and the dropout's key are those of the head.
    """
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        k = load_tile(
            key, kv_head, column, kv_end, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, MASKED, TMA, kv_first, INSIDE
        )  # fmt: skip
        v = load_tile(
            value, kv_head, column, kv_end, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA, kv_first, INSIDE
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # Before the exponentials, which it does not depend on.
        d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        p, slope = probabilities(
            scores, first_row, rows, column, columns, row_lse[:, None], bias, q_rows, kv_rows, mask,
            q_length, kv_length, SCALE, SOFT_CAP, LOWEST, HIGHEST, BANDED, HAS_ROWS, MASK, BIAS, MASKED,
        )  # fmt: skip
        if THRESHOLD > 0:
            d_p = d_p * tl.where(dropout_keep_mask(dropout_key, rows, columns, THRESHOLD), KEEP_SCALE, 0.0)
        # As by keys: P without the dropout, d_p with it.
        d_s = p * (d_p - row_delta[:, None])
        if SOFT_CAP > 0.0:
            d_s = d_s * slope
        if BIAS >= 0:
            inside = (rows < q_length) & (columns < kv_length)
            pointers = score_pointers(d_bias, first_row, rows, column, columns, kv_length, 15)
            tl.store(pointers, d_s, mask=inside)
        d_q = tl.dot(d_s.to(k.dtype), k, d_q, input_precision=PRECISION)
    return d_q


@triton.jit
def attention_query_gradients(
    query, key, value, d_out, lse_log2, delta, bias, q_rows, kv_rows, mask, key_ranges, inside, dropout_keys, d_bias,
    q_length, kv_length,
    d_query,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, HAS_ROWS: tl.constexpr, Q_ROWS_BATCH: tl.constexpr, KV_ROWS_BATCH: tl.constexpr,
    MASK: tl.constexpr, RANGES: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Computes dQ of one tile of queries of one head, and the visible part of its dbias.

    ``d_bias`` is float32 [batch, heads, q_length, kv_length], zeros before the launch.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tile, head_index = decode_program_id((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = head_index // HEADS, head_index % HEADS
    kv_head = head // GROUPS
    first_row = tile * BLOCK_Q
    batch_64 = batch.to(tl.int64)
    query_offset = batch_64 * q_length * (HEADS * HEAD_DIM)
    out_offset = batch_64 * q_length * (HEADS * HEAD_VALUE_DIM)
    key += batch_64 * kv_length * (KV_HEADS * HEAD_DIM)
    value += batch_64 * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    bias, mask, dropout_key = score_terms_of_head(
        bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
    )
    if BIAS >= 0:
        d_bias = scores_of_head(d_bias, batch, head, HEADS, q_length, kv_length, 15)
    q_rows, kv_rows = rows_of_batch(q_rows, kv_rows, batch, q_length, kv_length, Q_ROWS_BATCH, KV_ROWS_BATCH)
    ranges = ranges_of_head(key_ranges, batch, head, q_length, HEADS, RANGES)
    # Queries beyond the end need no mask (MASK_TAIL is false): their lse_log2 is +inf, and their dQ is not stored.
    bounds = visible_span(
        first_row, q_length, kv_length, ranges, 1, BLOCK_Q, BLOCK_K, LOWEST, HIGHEST, BANDED, RANGES >= 0, False
    )
    q_first, q_end, kv_first, kv_end = inside_of_batch(inside, batch, q_length, kv_length, INSIDE)
    q = load_resident_tile(
        query + query_offset, head, first_row, q_end, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA, q_first, INSIDE
    )  # fmt: skip
    d_o = load_resident_tile(
        d_out + out_offset, head, first_row, q_end, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA, q_first, INSIDE
    )  # fmt: skip
    # Loaded once, before the loop: pointers suffice, and beyond the end they give +inf where TMA gives zeros.
    row_lse = load_row(lse_log2, head_index, first_row, q_length, BLOCK_Q, float("inf"), True, False)
    row_delta = load_row(delta, head_index, first_row, q_length, BLOCK_Q, 0.0, True, False)
    key_source = tile_source(key, kv_end, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA, kv_first, INSIDE)
    value_source = tile_source(value, kv_end, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA, kv_first, INSIDE)
    d_q = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            d_q = query_steps(
                d_q, q, d_o, row_lse, row_delta, key_source, value_source, bias, d_bias, q_rows, kv_rows, mask,
                dropout_key, kv_head, first_row, bounds[part], bounds[part + 1], q_length, kv_length, kv_first,
                kv_end, KV_HEADS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST,
                HIGHEST, BANDED, HAS_ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, part != 1, INSIDE,
            )  # fmt: skip
    store_tile(d_query + query_offset, d_q * SCALE, head, first_row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
