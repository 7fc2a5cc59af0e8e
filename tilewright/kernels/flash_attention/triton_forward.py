"""The forward pass of attention in Triton.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton_scores import (
    LN2,
    LOG2E,
    capped,
    described,
    head_of_scores,
    kept,
    load_tile,
    program_place,
    store_tile,
    visible,
    visible_span,
)


@triton.jit
def attend(
    accumulator, total, largest, queries, key, value, bias, row_terms, column_terms, mask, keys, first_row, start, end,
    q_length, kv_length,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_VALUE_DIM: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Goes on with one tile of queries over the keys from ``start`` to ``end``, masked or all visible."""
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        keys_here = load_tile(key, column, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE, MASKED, TMA)
        logits = tl.dot(queries, tl.trans(keys_here), input_precision=PRECISION)
        if SOFT_CAP > 0.0 or BIAS >= 0:
            logits, _ = capped(
                logits, first_row, rows, column, columns, q_length, kv_length, bias, SCALE, SOFT_CAP, BIAS
            )
        elif MASKED:
            logits = logits * (SCALE * LOG2E)
        if MASKED:
            seen = visible(
                first_row, rows, column, columns, q_length, kv_length, row_terms, column_terms, mask, LOWEST,
                HIGHEST, BANDED, ROWS, MASK,
            )  # fmt: skip
            logits = tl.where(seen, logits, float("-inf"))
        if MASKED or SOFT_CAP > 0.0 or BIAS >= 0:
            new_largest = tl.maximum(largest, tl.max(logits, 1))
            # −inf − −inf would be NaN where nothing was seen yet.
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(logits - shift[:, None])
        else:
            new_largest = tl.maximum(largest, tl.max(logits, 1) * (SCALE * LOG2E))
            shift = new_largest
            weights = tl.exp2(logits * (SCALE * LOG2E) - shift[:, None])
        correction = tl.exp2(largest - shift)
        total = total * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        if THRESHOLD > 0:
            weights = tl.where(kept(keys, rows, columns, THRESHOLD), weights, 0.0)
        values_here = load_tile(value, column, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE, MASKED, TMA)
        accumulator = tl.dot(weights.to(values_here.dtype), values_here, accumulator, input_precision=PRECISION)
        largest = new_largest
    return accumulator, total, largest


@triton.jit
def attention_forward(
    query, key, value, bias, q_rows, kv_rows, mask, key_ranges, sinks, dropout_keys,
    q_length, kv_length,
    out, lse,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, ROWS: tl.constexpr, ROWS_BATCH: tl.constexpr, COLUMNS_BATCH: tl.constexpr, MASK: tl.constexpr,
    RANGES: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``out`` and ``lse`` of one tile of queries of one head."""
    tile, place = program_place((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = place // HEADS, place % HEADS
    kv_head = head // GROUPS
    QUERY_STRIDE: tl.constexpr = HEADS * HEAD_DIM
    OUT_STRIDE: tl.constexpr = HEADS * HEAD_VALUE_DIM
    KEY_STRIDE: tl.constexpr = HEADS // GROUPS * HEAD_DIM
    VALUE_STRIDE: tl.constexpr = HEADS // GROUPS * HEAD_VALUE_DIM
    first_row = tile * BLOCK_Q
    wide_batch = batch.to(tl.int64)
    query += wide_batch * q_length * QUERY_STRIDE + head * HEAD_DIM
    out += wide_batch * q_length * OUT_STRIDE + head * HEAD_VALUE_DIM
    key += wide_batch * kv_length * KEY_STRIDE + kv_head * HEAD_DIM
    value += wide_batch * kv_length * VALUE_STRIDE + kv_head * HEAD_VALUE_DIM
    lse += place.to(tl.int64) * q_length
    if BIAS >= 0:
        bias = head_of_scores(bias, batch, head, HEADS, q_length, kv_length, BIAS)
    if MASK >= 0:
        mask = head_of_scores(mask, batch, head, HEADS, q_length, kv_length, MASK)
    if ROWS:
        q_rows += wide_batch * ROWS_BATCH * 2 * q_length
        kv_rows += wide_batch * COLUMNS_BATCH * 2 * kv_length
    if RANGES >= 0:
        key_ranges = head_of_scores(key_ranges, batch, head, HEADS, (q_length + 63) // 64 * 2, 1, RANGES | 2)
    if THRESHOLD > 0:
        dropout_keys += place * 2

    first, full_first, full_end, end = visible_span(
        first_row, q_length, kv_length, key_ranges, BLOCK_Q, BLOCK_K, LOWEST, HIGHEST, BANDED, RANGES >= 0
    )
    queries = load_tile(query, first_row, q_length, BLOCK_Q, DIM, HEAD_DIM, QUERY_STRIDE, True, False)
    keys_from = described(key, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE, TMA)
    values_from = described(value, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE, TMA)
    accumulator = tl.zeros((BLOCK_Q, VALUE_DIM), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if SINKS:
        largest = tl.zeros((BLOCK_Q,), tl.float32) + tl.load(sinks + place) * LOG2E
        total = tl.where(largest == float("-inf"), 0.0, 1.0)

    if BANDED and LOWEST > -(1 << 30) and RANGES < 0:
        accumulator, total, largest = attend(
            accumulator, total, largest, queries, keys_from, values_from, bias, q_rows, kv_rows, mask, dropout_keys,
            first_row, first, full_first, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, PRECISION, TMA, True,
        )  # fmt: skip
    if RANGES < 0:
        accumulator, total, largest = attend(
            accumulator, total, largest, queries, keys_from, values_from, bias, q_rows, kv_rows, mask, dropout_keys,
            first_row, full_first, full_end, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, PRECISION, TMA, False,
        )  # fmt: skip
    if RANGES >= 0 or BANDED or not EVEN:
        accumulator, total, largest = attend(
            accumulator, total, largest, queries, keys_from, values_from, bias, q_rows, kv_rows, mask, dropout_keys,
            first_row, full_end, end, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, PRECISION, TMA, True,
        )  # fmt: skip

    nothing = total == 0.0
    safe_total = tl.where(nothing, 1.0, total)
    rows = first_row + tl.arange(0, BLOCK_Q)
    log_sum = tl.where(nothing, float("-inf"), (largest + tl.log2(safe_total)) * LN2)
    tl.store(lse + rows, log_sum, mask=rows < q_length)
    accumulator = accumulator * (KEEP_SCALE / safe_total)[:, None]
    store_tile(out, accumulator, first_row, q_length, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, OUT_STRIDE)
