"""The forward pass of attention in Triton.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton.scores import (
    LN2,
    LOG2E,
    capped,
    described,
    kept,
    load_only_tile,
    load_tile,
    of_batch,
    of_head,
    program_place,
    ranges_of_head,
    store_tile,
    visible,
    visible_span,
)


@triton.jit
def attend(
    accumulator, total, largest, queries, key, value, bias, row_terms, column_terms, mask, keys, kv_head, first_row,
    start, end, q_length, kv_length,
    KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Goes on with one tile of queries over the keys from ``start`` to ``end``, masked or all visible."""
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        keys_here = load_tile(key, kv_head, column, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, MASKED, TMA)
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
        values_here = load_tile(
            value, kv_head, column, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA
        )
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
    PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``out`` and ``lse`` of one tile of queries of one head."""
    tile, place = program_place((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = place // HEADS, place % HEADS
    kv_head = head // GROUPS
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    first_row = tile * BLOCK_Q
    wide_batch = batch.to(tl.int64)
    query += wide_batch * q_length * (HEADS * HEAD_DIM)
    out += wide_batch * q_length * (HEADS * HEAD_VALUE_DIM)
    key += wide_batch * kv_length * (KV_HEADS * HEAD_DIM)
    value += wide_batch * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    lse += place.to(tl.int64) * q_length
    bias, mask, dropout_keys = of_head(
        bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
    )
    q_rows, kv_rows = of_batch(q_rows, kv_rows, batch, q_length, kv_length, ROWS_BATCH, COLUMNS_BATCH)
    ranges = ranges_of_head(key_ranges, batch, head, q_length, HEADS, RANGES)
    bounds = visible_span(
        first_row, q_length, kv_length, ranges, 1, BLOCK_Q, BLOCK_K, LOWEST, HIGHEST, BANDED, RANGES >= 0, False
    )
    queries = load_only_tile(query, head, first_row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    keys_from = described(key, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA)
    values_from = described(value, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA)
    accumulator = tl.zeros((BLOCK_Q, VALUE_DIM), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if SINKS:
        largest = tl.zeros((BLOCK_Q,), tl.float32) + tl.load(sinks + place) * LOG2E
        total = tl.where(largest == float("-inf"), 0.0, 1.0)

    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            accumulator, total, largest = attend(
                accumulator, total, largest, queries, keys_from, values_from, bias, q_rows, kv_rows, mask, dropout_keys,
                kv_head, first_row, bounds[part], bounds[part + 1], q_length, kv_length,
                KV_HEADS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST, HIGHEST,
                BANDED, ROWS, MASK, BIAS, THRESHOLD, PRECISION, TMA, part != 1,
            )  # fmt: skip

    nothing = total == 0.0
    safe_total = tl.where(nothing, 1.0, total)
    rows = first_row + tl.arange(0, BLOCK_Q)
    log_sum = tl.where(nothing, float("-inf"), (largest + tl.log2(safe_total)) * LN2)
    tl.store(lse + rows, log_sum, mask=rows < q_length)
    accumulator = accumulator * (KEEP_SCALE / safe_total)[:, None]
    store_tile(out, accumulator, head, first_row, q_length, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA)
