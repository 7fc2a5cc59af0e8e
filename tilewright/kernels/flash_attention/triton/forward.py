"""The forward pass of attention in Triton: O and lse by online softmax.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).

  Q, K, V   query, key, value; tiles ``q`` [BLOCK_Q, DIM], ``k`` [BLOCK_K, DIM], ``v`` [BLOCK_K, VALUE_DIM]
  S         ``scores`` = Q Kᵀ
  logits    soft_cap(SCALE · S + bias), times log2(e), so that exponentials are exp2; beside a bias in natural units
            until m is subtracted, for a bias that hides keys may be so low that it would overflow
  P         ``p`` = exp2(logits - m), not normalised
  m, l      ``row_max`` of the logits so far, ``row_sum`` of P so far (before the dropout)
  O         ``out`` = P V / l; ``accumulator`` holds P V relative to the current m
  lse       (m + log2(l)) · ln 2: log-sum-exp of the natural logits, -inf in fully masked rows

Operands of both MMAs have the input's dtype (float32 as TF32, or as three of them for PRECISION "tf32x3"); S, P, m, l
and the accumulator are float32.

Grid: one axis, a program for each tile of BLOCK_Q queries of each head of queries, in the order of
``scores.decode_program_id``. A program keeps its tile of Q and goes through tiles of K and V in three parts
(``scores.visible_span``), and the middle one evaluates no mask; PARTS has a bit for each part that may occur.
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton.scores import (
    HIDING_BIAS,
    LN2,
    LOG2E,
    capped_logits,
    decode_program_id,
    dropout_keep_mask,
    inside_of_batch,
    load_resident_tile,
    load_tile,
    ranges_of_head,
    rows_of_batch,
    score_terms_of_head,
    store_tile,
    tile_source,
    visibility_mask,
    visible_span,
)


@triton.jit
def forward_steps(
    accumulator, row_sum, row_max, q, key, value, bias, q_rows, kv_rows, mask, dropout_key, kv_head, first_row,
    start, end, q_length, kv_length, kv_first, kv_end,
    KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, HAS_ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Updates the accumulator, l and m of a tile of queries with the keys from ``start`` to ``end``.

    Without ``MASKED`` all of these keys are visible, and none is beyond the length.
    """
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        # Checked in masked parts only: the middle part consists of whole steps within the length.
        k = load_tile(
            key, kv_head, column, kv_end, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, MASKED, TMA, kv_first, INSIDE
        )  # fmt: skip
        # Fully visible plain scores stay unscaled here: their scale is applied after the maximum.
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP > 0.0 or BIAS >= 0:
            logits, _ = capped_logits(
                logits, first_row, rows, column, columns, q_length, kv_length, bias, SCALE, SOFT_CAP, BIAS
            )
            if BIAS < 0:
                logits = logits * LOG2E
        elif MASKED:
            logits = logits * (SCALE * LOG2E)
        if MASKED:
            visible = visibility_mask(
                first_row, rows, column, columns, q_length, kv_length, q_rows, kv_rows, mask, LOWEST,
                HIGHEST, BANDED, HAS_ROWS, MASK,
            )  # fmt: skip
            logits = tl.where(visible, logits, float("-inf"))
        if MASKED or SOFT_CAP > 0.0 or BIAS >= 0:
            new_row_max = tl.maximum(row_max, tl.max(logits, 1))
            # Rows without a visible key so far have m = -inf, and -inf - (-inf) would be NaN.
            shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
            if BIAS >= 0:
                p = tl.exp2((logits - shift[:, None]) * LOG2E)
            else:
                p = tl.exp2(logits - shift[:, None])
        else:
            # The scale is never negative: it can follow the maximum, and be one FMA with the subtraction.
            new_row_max = tl.maximum(row_max, tl.max(logits, 1) * (SCALE * LOG2E))
            shift = new_row_max
            p = tl.exp2(logits * (SCALE * LOG2E) - shift[:, None])
        # 0 as long as m is −inf: nothing has been summed yet.
        if BIAS >= 0:
            correction = tl.exp2((row_max - shift) * LOG2E)
        else:
            correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        accumulator = accumulator * correction[:, None]
        # Dropout comes after the sum: probabilities are normalised before some are dropped.
        if THRESHOLD > 0:
            p = tl.where(dropout_keep_mask(dropout_key, rows, columns, THRESHOLD), p, 0.0)
        # Zeros beyond the length: P is 0 there, but 0 times what memory holds may be NaN.
        v = load_tile(
            value, kv_head, column, kv_end, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA, kv_first, INSIDE
        )  # fmt: skip
        accumulator = tl.dot(p.to(v.dtype), v, accumulator, input_precision=PRECISION)
        row_max = new_row_max
    return accumulator, row_sum, row_max


@triton.jit
def attention_forward(
    query, key, value, bias, q_rows, kv_rows, mask, key_ranges, inside, sinks, dropout_keys,
    q_length, kv_length,
    out, lse,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, HAS_ROWS: tl.constexpr, Q_ROWS_BATCH: tl.constexpr, KV_ROWS_BATCH: tl.constexpr,
    MASK: tl.constexpr, RANGES: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Computes ``out`` and ``lse`` of one tile of queries of one head."""
    tile, head_index = decode_program_id((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = head_index // HEADS, head_index % HEADS
    kv_head = head // GROUPS
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    first_row = tile * BLOCK_Q
    # Added to the pointers once: offsets within a batch element fit 32 bits, and so does the arithmetic of the loop.
    batch_64 = batch.to(tl.int64)
    query += batch_64 * q_length * (HEADS * HEAD_DIM)
    out += batch_64 * q_length * (HEADS * HEAD_VALUE_DIM)
    key += batch_64 * kv_length * (KV_HEADS * HEAD_DIM)
    value += batch_64 * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    lse += head_index.to(tl.int64) * q_length
    bias, mask, dropout_key = score_terms_of_head(
        bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
    )
    q_rows, kv_rows = rows_of_batch(q_rows, kv_rows, batch, q_length, kv_length, Q_ROWS_BATCH, KV_ROWS_BATCH)
    ranges = ranges_of_head(key_ranges, batch, head, q_length, HEADS, RANGES)
    # Queries beyond the end need no mask (MASK_TAIL is false): their rows of out and lse are not stored.
    bounds = visible_span(
        first_row, q_length, kv_length, ranges, 1, BLOCK_Q, BLOCK_K, LOWEST, HIGHEST, BANDED, RANGES >= 0, False
    )
    q = load_resident_tile(query, head, first_row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    _, _, kv_first, kv_end = inside_of_batch(inside, batch, q_length, kv_length, INSIDE)
    key_source = tile_source(key, kv_end, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA, kv_first, INSIDE)
    value_source = tile_source(value, kv_end, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA, kv_first, INSIDE)
    accumulator = tl.zeros((BLOCK_Q, VALUE_DIM), tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    # Sinks are the log-sum-exp of a head's extra logits, whose values are zero: they begin m and l, not O.
    if SINKS:
        row_max = tl.zeros((BLOCK_Q,), tl.float32) + tl.load(sinks + head_index) * LOG2E
        if BIAS >= 0:
            row_max = row_max * LN2
        # l relative to m, which is their log-sum-exp: 1, or 0 where all sinks are −inf.
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)

    # A loop for each part, so that the middle one has no mask and no branch in it; PARTS leaves out those that never
    # run.
    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            accumulator, row_sum, row_max = forward_steps(
                accumulator, row_sum, row_max, q, key_source, value_source, bias, q_rows, kv_rows, mask, dropout_key,
                kv_head, first_row, bounds[part], bounds[part + 1], q_length, kv_length, kv_first, kv_end,
                KV_HEADS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST, HIGHEST,
                BANDED, HAS_ROWS, MASK, BIAS, THRESHOLD, PRECISION, TMA, part != 1, INSIDE,
            )  # fmt: skip

    # Fully masked rows have l = 0: out is 0 and lse is -inf there, not NaN.
    if BIAS >= 0:
        row_sum = tl.where(row_max <= HIDING_BIAS, 0.0, row_sum)
    fully_masked = row_sum == 0.0
    safe_row_sum = tl.where(fully_masked, 1.0, row_sum)
    rows = first_row + tl.arange(0, BLOCK_Q)
    if BIAS >= 0:
        log_sum = row_max + tl.log2(safe_row_sum) * LN2
    else:
        log_sum = (row_max + tl.log2(safe_row_sum)) * LN2
    log_sum = tl.where(fully_masked, float("-inf"), log_sum)
    tl.store(lse + rows, log_sum, mask=rows < q_length)
    # The dropout's factor multiplies O once, instead of every P.
    out_scale = KEEP_SCALE / safe_row_sum
    if BIAS >= 0:
        out_scale = tl.where(fully_masked, 0.0, out_scale)
    accumulator = accumulator * out_scale[:, None]
    store_tile(out, accumulator, head, first_row, q_length, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA)
