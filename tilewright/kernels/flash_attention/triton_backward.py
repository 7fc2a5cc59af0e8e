"""The backward pass of attention in Triton: dK and dV by keys, dQ by queries, each repeatable bit for bit.

Dao, "FlashAttention-2" (2023). Scores are transposed where keys are the rows of an accumulator, so that probabilities
and their gradients go from registers into the products.
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton_scores import (
    LOG2E,
    capped,
    described,
    head_of_scores,
    kept,
    load_tile,
    pointers_of_scores,
    program_place,
    store_tile,
    visible,
    visible_span,
)


@triton.jit
def attention_row_terms(
    out, d_out, lse, d_lse,
    q_length,
    delta, exponent,
    HEADS: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """What every logit's gradient of a row subtracts, and lse in units of log 2, +inf for rows that see nothing."""
    tile, place = program_place((q_length + BLOCK - 1) // BLOCK, 1, False)
    batch, head = place // HEADS, place % HEADS
    STRIDE: tl.constexpr = HEADS * HEAD_VALUE_DIM
    start = tile * BLOCK
    offset = batch.to(tl.int64) * q_length * STRIDE + head * HEAD_VALUE_DIM
    left = load_tile(out + offset, start, q_length, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, STRIDE, True, False)
    right = load_tile(d_out + offset, start, q_length, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, STRIDE, True, False)
    rows = start + tl.arange(0, BLOCK)
    inside = rows < q_length
    row = place.to(tl.int64) * q_length + rows
    term = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    if HAS_D_LSE:
        term -= tl.load(d_lse + row, mask=inside, other=0.0)
    log_sum = tl.load(lse + row, mask=inside, other=0.0)
    blind = log_sum == float("-inf")
    tl.store(delta + row, tl.where(blind, 0.0, term), mask=inside)
    tl.store(exponent + row, tl.where(blind, float("inf"), log_sum * LOG2E), mask=inside)


@triton.jit
def probabilities(
    products, first_row, rows, first_column, columns, exponent, bias, row_terms, column_terms, mask, q_length,
    kv_length,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr,
    ROWS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of one tile of scores, either way, and the derivative of the cap."""
    slope = products
    if SOFT_CAP > 0.0 or BIAS >= 0:
        logits, slope = capped(
            products, first_row, rows, first_column, columns, q_length, kv_length, bias, SCALE, SOFT_CAP, BIAS
        )
        weights = tl.exp2(logits - exponent)
    else:
        weights = tl.exp2(products * (SCALE * LOG2E) - exponent)
    if MASKED:
        seen = visible(
            first_row, rows, first_column, columns, q_length, kv_length, row_terms, column_terms, mask, LOWEST, HIGHEST,
            BANDED, ROWS, MASK,
        )  # fmt: skip
        weights = tl.where(seen, weights, 0.0)
    return weights, slope


@triton.jit
def key_value_steps(
    d_key, d_value, keys_here, values_here, query, d_out, exponents, deltas, bias, row_terms, column_terms, mask, keys,
    first_column, start, end, q_length, kv_length,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_VALUE_DIM: tl.constexpr, QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from ``start`` to ``end`` give to the gradients of a tile of keys and values."""
    columns = first_column + tl.arange(0, BLOCK_K)[:, None]
    for row in tl.range(start, end, BLOCK_Q):
        rows = row + tl.arange(0, BLOCK_Q)
        queries = load_tile(query, row, q_length, BLOCK_Q, DIM, HEAD_DIM, QUERY_STRIDE, MASKED, TMA)
        d_outs = load_tile(d_out, row, q_length, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, OUT_STRIDE, MASKED, TMA)
        if MASKED:
            exponent = tl.load(exponents + rows, mask=rows < q_length, other=float("inf"))
        else:
            exponent = tl.load(exponents + rows)
        products = tl.dot(keys_here, tl.trans(queries), input_precision=PRECISION)
        weights, slope = probabilities(
            products, row, rows[None, :], first_column, columns, exponent[None, :], bias, row_terms, column_terms, mask,
            q_length, kv_length, SCALE, SOFT_CAP, LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, MASKED,
        )  # fmt: skip
        dropped = weights
        factor = weights
        if THRESHOLD > 0:
            factor = tl.where(kept(keys, rows[None, :], columns, THRESHOLD), KEEP_SCALE, 0.0)
            dropped = weights * factor
        d_value = tl.dot(dropped.to(d_outs.dtype), d_outs, d_value, input_precision=PRECISION)
        d_weights = tl.dot(values_here, tl.trans(d_outs), input_precision=PRECISION)
        if THRESHOLD > 0:
            d_weights = d_weights * factor
        if MASKED:
            delta = tl.load(deltas + rows, mask=rows < q_length, other=0.0)
        else:
            delta = tl.load(deltas + rows)
        gradients = weights * (d_weights - delta[None, :])
        if SOFT_CAP > 0.0:
            gradients = gradients * slope
        d_key = tl.dot(gradients.to(queries.dtype), queries, d_key, input_precision=PRECISION)
    return d_key, d_value


@triton.jit
def attention_key_value_gradients(
    query, key, value, d_out, exponents, deltas, bias, q_rows, kv_rows, mask, query_ranges, dropout_keys,
    q_length, kv_length,
    d_key, d_value,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, ROWS: tl.constexpr, ROWS_BATCH: tl.constexpr, COLUMNS_BATCH: tl.constexpr, MASK: tl.constexpr,
    RANGES: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one head of keys, over all query heads that share it."""
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tile, place = program_place((kv_length + BLOCK_K - 1) // BLOCK_K, AT_ONCE, LAST_FIRST)
    batch, kv_head = place // KV_HEADS, place % KV_HEADS
    QUERY_STRIDE: tl.constexpr = HEADS * HEAD_DIM
    OUT_STRIDE: tl.constexpr = HEADS * HEAD_VALUE_DIM
    KEY_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    VALUE_STRIDE: tl.constexpr = KV_HEADS * HEAD_VALUE_DIM
    first_column = tile * BLOCK_K
    wide_batch = batch.to(tl.int64)
    key_offset = wide_batch * kv_length * KEY_STRIDE + kv_head * HEAD_DIM
    value_offset = wide_batch * kv_length * VALUE_STRIDE + kv_head * HEAD_VALUE_DIM
    keys_here = load_tile(key + key_offset, first_column, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE, True, False)
    values_here = load_tile(
        value + value_offset, first_column, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE, True, False
    )
    if ROWS:
        q_rows += wide_batch * ROWS_BATCH * 2 * q_length
        kv_rows += wide_batch * COLUMNS_BATCH * 2 * kv_length

    key_sum = tl.zeros((BLOCK_K, DIM), tl.float32)
    value_sum = tl.zeros((BLOCK_K, VALUE_DIM), tl.float32)
    for member in range(GROUPS):
        head = kv_head * GROUPS + member
        query_of = query + wide_batch * q_length * QUERY_STRIDE + head * HEAD_DIM
        d_out_of = d_out + wide_batch * q_length * OUT_STRIDE + head * HEAD_VALUE_DIM
        queries_from = described(query_of, q_length, BLOCK_Q, DIM, HEAD_DIM, QUERY_STRIDE, TMA)
        d_outs_from = described(d_out_of, q_length, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, OUT_STRIDE, TMA)
        row_place = (wide_batch * HEADS + head) * q_length
        exponents_of, deltas_of = exponents + row_place, deltas + row_place
        bias_of, mask_of, ranges_of, keys_of = bias, mask, query_ranges, dropout_keys
        if BIAS >= 0:
            bias_of = head_of_scores(bias, batch, head, HEADS, q_length, kv_length, BIAS)
        if MASK >= 0:
            mask_of = head_of_scores(mask, batch, head, HEADS, q_length, kv_length, MASK)
        if RANGES >= 0:
            ranges_of = head_of_scores(query_ranges, batch, head, HEADS, (kv_length + 63) // 64 * 2, 1, RANGES | 2)
        if THRESHOLD > 0:
            keys_of = dropout_keys + (batch * HEADS + head) * 2
        first, full_first, full_end, end = visible_span(
            first_column, kv_length, q_length, ranges_of, BLOCK_K, BLOCK_Q, -HIGHEST, -LOWEST, BANDED, RANGES >= 0
        )
        if BANDED and HIGHEST < (1 << 30) and RANGES < 0:
            key_sum, value_sum = key_value_steps(
                key_sum, value_sum, keys_here, values_here, queries_from, d_outs_from, exponents_of, deltas_of, bias_of,
                q_rows, kv_rows, mask_of, keys_of, first_column, first, full_first, q_length, kv_length,
                BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, QUERY_STRIDE, OUT_STRIDE, SCALE, SOFT_CAP,
                LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, True,
            )  # fmt: skip
        if RANGES < 0:
            key_sum, value_sum = key_value_steps(
                key_sum, value_sum, keys_here, values_here, queries_from, d_outs_from, exponents_of, deltas_of, bias_of,
                q_rows, kv_rows, mask_of, keys_of, first_column, full_first, full_end, q_length, kv_length,
                BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, QUERY_STRIDE, OUT_STRIDE, SCALE, SOFT_CAP,
                LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, False,
            )  # fmt: skip
        if RANGES >= 0 or (BANDED and LOWEST > -(1 << 30)) or not EVEN:
            key_sum, value_sum = key_value_steps(
                key_sum, value_sum, keys_here, values_here, queries_from, d_outs_from, exponents_of, deltas_of, bias_of,
                q_rows, kv_rows, mask_of, keys_of, first_column, full_end, end, q_length, kv_length,
                BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, QUERY_STRIDE, OUT_STRIDE, SCALE, SOFT_CAP,
                LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, True,
            )  # fmt: skip

    store_tile(d_key + key_offset, key_sum * SCALE, first_column, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE)
    store_tile(
        d_value + value_offset, value_sum, first_column, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE
    )


@triton.jit
def query_steps(
    d_query, queries, d_outs, exponent, delta, key, value, bias, d_bias, row_terms, column_terms, mask, keys,
    first_row, start, end, q_length, kv_length,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_VALUE_DIM: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from ``start`` to ``end`` give to the gradients of a tile of queries; writes a bias's."""
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        keys_here = load_tile(key, column, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE, MASKED, TMA)
        values_here = load_tile(value, column, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE, MASKED, TMA)
        products = tl.dot(queries, tl.trans(keys_here), input_precision=PRECISION)
        d_weights = tl.dot(d_outs, tl.trans(values_here), input_precision=PRECISION)
        weights, slope = probabilities(
            products, first_row, rows, column, columns, exponent[:, None], bias, row_terms, column_terms, mask,
            q_length, kv_length, SCALE, SOFT_CAP, LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, MASKED,
        )  # fmt: skip
        if THRESHOLD > 0:
            d_weights = d_weights * tl.where(kept(keys, rows, columns, THRESHOLD), KEEP_SCALE, 0.0)
        gradients = weights * (d_weights - delta[:, None])
        if SOFT_CAP > 0.0:
            gradients = gradients * slope
        if BIAS >= 0:
            inside = (rows < q_length) & (columns < kv_length)
            places = pointers_of_scores(d_bias, first_row, rows, column, columns, kv_length, 15)
            tl.store(places, gradients, mask=inside)
        d_query = tl.dot(gradients.to(keys_here.dtype), keys_here, d_query, input_precision=PRECISION)
    return d_query


@triton.jit
def attention_query_gradients(
    query, key, value, d_out, exponents, deltas, bias, q_rows, kv_rows, mask, key_ranges, dropout_keys, d_bias,
    q_length, kv_length,
    d_query,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, ROWS: tl.constexpr, ROWS_BATCH: tl.constexpr, COLUMNS_BATCH: tl.constexpr, MASK: tl.constexpr,
    RANGES: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries of one head, and the part of ``d_bias`` [batch, heads, q_length, kv_length] it sees."""
    tile, place = program_place((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = place // HEADS, place % HEADS
    kv_head = head // GROUPS
    QUERY_STRIDE: tl.constexpr = HEADS * HEAD_DIM
    OUT_STRIDE: tl.constexpr = HEADS * HEAD_VALUE_DIM
    KEY_STRIDE: tl.constexpr = HEADS // GROUPS * HEAD_DIM
    VALUE_STRIDE: tl.constexpr = HEADS // GROUPS * HEAD_VALUE_DIM
    first_row = tile * BLOCK_Q
    wide_batch = batch.to(tl.int64)
    query_offset = wide_batch * q_length * QUERY_STRIDE + head * HEAD_DIM
    out_offset = wide_batch * q_length * OUT_STRIDE + head * HEAD_VALUE_DIM
    key += wide_batch * kv_length * KEY_STRIDE + kv_head * HEAD_DIM
    value += wide_batch * kv_length * VALUE_STRIDE + kv_head * HEAD_VALUE_DIM
    if BIAS >= 0:
        bias = head_of_scores(bias, batch, head, HEADS, q_length, kv_length, BIAS)
        d_bias = head_of_scores(d_bias, batch, head, HEADS, q_length, kv_length, 15)
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
    queries = load_tile(query + query_offset, first_row, q_length, BLOCK_Q, DIM, HEAD_DIM, QUERY_STRIDE, True, False)
    d_outs = load_tile(
        d_out + out_offset, first_row, q_length, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, OUT_STRIDE, True, False
    )
    rows = first_row + tl.arange(0, BLOCK_Q)
    row_place = place.to(tl.int64) * q_length
    exponent = tl.load(exponents + row_place + rows, mask=rows < q_length, other=float("inf"))
    delta = tl.load(deltas + row_place + rows, mask=rows < q_length, other=0.0)
    keys_from = described(key, kv_length, BLOCK_K, DIM, HEAD_DIM, KEY_STRIDE, TMA)
    values_from = described(value, kv_length, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, VALUE_STRIDE, TMA)
    total = tl.zeros((BLOCK_Q, DIM), tl.float32)
    if BANDED and LOWEST > -(1 << 30) and RANGES < 0:
        total = query_steps(
            total, queries, d_outs, exponent, delta, keys_from, values_from, bias, d_bias, q_rows, kv_rows, mask,
            dropout_keys, first_row, first, full_first, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, True,
        )  # fmt: skip
    if RANGES < 0:
        total = query_steps(
            total, queries, d_outs, exponent, delta, keys_from, values_from, bias, d_bias, q_rows, kv_rows, mask,
            dropout_keys, first_row, full_first, full_end, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, False,
        )  # fmt: skip
    if RANGES >= 0 or BANDED or not EVEN:
        total = query_steps(
            total, queries, d_outs, exponent, delta, keys_from, values_from, bias, d_bias, q_rows, kv_rows, mask,
            dropout_keys, first_row, full_end, end, q_length, kv_length,
            BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, SCALE, SOFT_CAP,
            LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, True,
        )  # fmt: skip
    store_tile(d_query + query_offset, total * SCALE, first_row, q_length, BLOCK_Q, DIM, HEAD_DIM, QUERY_STRIDE)
