"""The backward pass of attention in Triton: dK and dV by keys, and dQ by queries or, ``FUSED``, on the way.

Dao, "FlashAttention-2" (2023). Scores are transposed where keys are the rows of an accumulator, so that probabilities
and their gradients go from registers into the products. On the way, dQ is five products instead of seven, but programs
add to it in the order in which they come; by queries it repeats bit for bit.
"""

import triton
import triton.language as tl

from tilewright.kernels.flash_attention.triton.scores import (
    LOG2E,
    add_to_sums,
    capped,
    described,
    described_rows,
    described_sums,
    head_of_scores,
    kept,
    load_only_tile,
    load_row,
    load_tile,
    of_batch,
    of_head,
    pointers_of_scores,
    program_place,
    ranges_of_head,
    store_tile,
    visible,
    visible_span,
    whole_length,
)


@triton.jit
def attention_row_terms(
    out, d_out, lse, d_lse,
    q_length,
    delta, exponent,
    HEADS: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """What every logit's gradient of a row subtracts, and lse in units of log 2, +inf for rows that see nothing.

    Both are float32 ``[batch, heads, whole_length(q_length)]``.
    """
    tile, place = program_place((q_length + BLOCK - 1) // BLOCK, 1, False)
    batch, head = place // HEADS, place % HEADS
    start = tile * BLOCK
    offset = batch.to(tl.int64) * q_length * (HEADS * HEAD_VALUE_DIM)
    left = load_tile(out + offset, head, start, q_length, HEADS, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, True, False)
    right = load_tile(d_out + offset, head, start, q_length, HEADS, BLOCK, VALUE_DIM, HEAD_VALUE_DIM, True, False)
    rows = start + tl.arange(0, BLOCK)
    inside = rows < q_length
    row = place.to(tl.int64) * q_length + rows
    term = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    if HAS_D_LSE:
        term -= tl.load(d_lse + row, mask=inside, other=0.0)
    log_sum = tl.load(lse + row, mask=inside, other=0.0)
    blind = log_sum == float("-inf")
    written = place.to(tl.int64) * whole_length(q_length) + rows
    tl.store(delta + written, tl.where(blind, 0.0, term), mask=inside)
    tl.store(exponent + written, tl.where(blind, float("inf"), log_sum * LOG2E), mask=inside)


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
    d_query, d_bias, batch, first_head, first_column, start, end, q_length, kv_length,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from ``start`` to ``end`` of every head give to the gradients of a tile of keys and values.

    The heads are one loop with the queries: one around it costs registers, and the start of a pipeline for each.
    """
    columns = first_column + tl.arange(0, BLOCK_K)[:, None]
    steps = (end - start + BLOCK_Q - 1) // BLOCK_Q
    for step in tl.range(0, GROUPS * steps):
        row, head = start + step * BLOCK_Q, first_head
        if GROUPS > 1:
            member = step // steps
            row, head = start + (step - member * steps) * BLOCK_Q, first_head + member
        rows = row + tl.arange(0, BLOCK_Q)
        place = batch * HEADS + head
        bias_of, mask_of, keys_of = of_head(
            bias, mask, keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
        )
        queries = load_tile(query, head, row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, MASKED, TMA)
        d_outs = load_tile(d_out, head, row, q_length, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA)
        products = tl.dot(keys_here, tl.trans(queries), input_precision=PRECISION)
        exponent = load_row(exponents, place, row, q_length, BLOCK_Q, float("inf"), MASKED, TMA)
        weights, slope = probabilities(
            products, row, rows[None, :], first_column, columns, exponent[None, :], bias_of, row_terms, column_terms,
            mask_of, q_length, kv_length, SCALE, SOFT_CAP, LOWEST, HIGHEST, BANDED, ROWS, MASK, BIAS, MASKED,
        )  # fmt: skip
        dropped = weights
        factor = weights
        if THRESHOLD > 0:
            factor = tl.where(kept(keys_of, rows[None, :], columns, THRESHOLD), KEEP_SCALE, 0.0)
            dropped = weights * factor
        d_value = tl.dot(dropped.to(d_outs.dtype), d_outs, d_value, input_precision=PRECISION)
        d_weights = tl.dot(values_here, tl.trans(d_outs), input_precision=PRECISION)
        if THRESHOLD > 0:
            d_weights = d_weights * factor
        delta = load_row(deltas, place, row, q_length, BLOCK_Q, 0.0, MASKED, TMA)
        gradients = weights * (d_weights - delta[None, :])
        if SOFT_CAP > 0.0:
            gradients = gradients * slope
        rounded = gradients.to(queries.dtype)
        # Before the product for dQ: after it, Triton 3.6 makes a loop of it that ptxas serialises.
        d_key = tl.dot(rounded, queries, d_key, input_precision=PRECISION)
        if FUSED:
            if BIAS >= 0:
                d_bias_of = head_of_scores(d_bias, batch, head, HEADS, q_length, kv_length, 15)
                places = pointers_of_scores(d_bias_of, row, rows[None, :], first_column, columns, kv_length, 15)
                tl.store(places, gradients, mask=(rows < q_length)[None, :] & (columns < kv_length))
            # Transposed, so that no operand goes through registers and few queries are still a product for Hopper.
            product = tl.dot(tl.trans(keys_here), rounded, input_precision=PRECISION)
            add_to_sums(d_query, product, head, row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    return d_key, d_value


@triton.jit
def attention_key_value_gradients(
    query, key, value, d_out, exponents, deltas, bias, q_rows, kv_rows, mask, query_ranges, dropout_keys, d_query,
    d_bias,
    q_length, kv_length,
    d_key, d_value,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    LAST_FIRST: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BANDED: tl.constexpr, ROWS: tl.constexpr, ROWS_BATCH: tl.constexpr, COLUMNS_BATCH: tl.constexpr, MASK: tl.constexpr,
    RANGES: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one head of keys, over all query heads that share it.

    If ``FUSED``, adds to ``d_query``, float32 ``[batch, heads, head_dim, whole_length(q_length)]`` without the scale,
    and writes the part of ``d_bias`` [batch, heads, q_length, kv_length] that it sees.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tile, place = program_place((kv_length + BLOCK_K - 1) // BLOCK_K, AT_ONCE, LAST_FIRST)
    batch, kv_head = place // KV_HEADS, place % KV_HEADS
    first_column, first_head = tile * BLOCK_K, kv_head * GROUPS
    wide_batch = batch.to(tl.int64)
    key_offset = wide_batch * kv_length * (KV_HEADS * HEAD_DIM)
    value_offset = wide_batch * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    query_offset = wide_batch * q_length * (HEADS * HEAD_DIM)
    out_offset = wide_batch * q_length * (HEADS * HEAD_VALUE_DIM)
    keys_here = load_only_tile(
        key + key_offset, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA
    )
    values_here = load_only_tile(
        value + value_offset, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA
    )
    queries_from = described(query + query_offset, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    d_outs_from = described(d_out + out_offset, q_length, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA)
    places = (batch + 1) * HEADS
    exponents_from = described_rows(exponents, places, q_length, BLOCK_Q, TMA)
    deltas_from = described_rows(deltas, places, q_length, BLOCK_Q, TMA)
    d_queries_to = d_query
    if FUSED:
        sums = d_query + wide_batch * (HEADS * HEAD_DIM) * whole_length(q_length)
        d_queries_to = described_sums(sums, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    q_rows, kv_rows = of_batch(q_rows, kv_rows, batch, q_length, kv_length, ROWS_BATCH, COLUMNS_BATCH)
    ranges = ranges_of_head(query_ranges, batch, first_head, kv_length, HEADS, RANGES)
    members: tl.constexpr = GROUPS if RANGES & 4 else 1
    # Without a mask, keys beyond the end would be as good as others, which gradients that nobody stores do not show.
    bounds = visible_span(
        first_column, kv_length, q_length, ranges, members, BLOCK_K, BLOCK_Q, -HIGHEST, -LOWEST, BANDED, RANGES >= 0,
        FUSED,
    )  # fmt: skip
    key_sum = tl.zeros((BLOCK_K, DIM), tl.float32)
    value_sum = tl.zeros((BLOCK_K, VALUE_DIM), tl.float32)
    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            key_sum, value_sum = key_value_steps(
                key_sum, value_sum, keys_here, values_here, queries_from, d_outs_from, exponents_from, deltas_from,
                bias, q_rows, kv_rows, mask, dropout_keys, d_queries_to, d_bias, batch, first_head, first_column,
                bounds[part], bounds[part + 1], q_length, kv_length,
                HEADS, GROUPS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST,
                HIGHEST, BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE,
                PRECISION, TMA, FUSED, part != 1,
            )  # fmt: skip
    store_tile(
        d_key + key_offset, key_sum * SCALE, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA
    )
    store_tile(
        d_value + value_offset, value_sum, kv_head, first_column, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM,
        HEAD_VALUE_DIM, TMA,
    )  # fmt: skip


@triton.jit
def query_steps(
    d_query, queries, d_outs, exponent, delta, key, value, bias, d_bias, row_terms, column_terms, mask, keys,
    kv_head, first_row, start, end, q_length, kv_length,
    KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from ``start`` to ``end`` give to the gradients of a tile of queries; writes a bias's."""
    rows = first_row + tl.arange(0, BLOCK_Q)[:, None]
    for column in tl.range(start, end, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        keys_here = load_tile(key, kv_head, column, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, MASKED, TMA)
        values_here = load_tile(
            value, kv_head, column, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, MASKED, TMA
        )
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
    PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries of one head, and the part of ``d_bias`` [batch, heads, q_length, kv_length] it sees."""
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    tile, place = program_place((q_length + BLOCK_Q - 1) // BLOCK_Q, AT_ONCE, LAST_FIRST)
    batch, head = place // HEADS, place % HEADS
    kv_head = head // GROUPS
    first_row = tile * BLOCK_Q
    wide_batch = batch.to(tl.int64)
    query_offset = wide_batch * q_length * (HEADS * HEAD_DIM)
    out_offset = wide_batch * q_length * (HEADS * HEAD_VALUE_DIM)
    key += wide_batch * kv_length * (KV_HEADS * HEAD_DIM)
    value += wide_batch * kv_length * (KV_HEADS * HEAD_VALUE_DIM)
    bias, mask, dropout_keys = of_head(
        bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS, BIAS, MASK, THRESHOLD
    )
    if BIAS >= 0:
        d_bias = head_of_scores(d_bias, batch, head, HEADS, q_length, kv_length, 15)
    q_rows, kv_rows = of_batch(q_rows, kv_rows, batch, q_length, kv_length, ROWS_BATCH, COLUMNS_BATCH)
    ranges = ranges_of_head(key_ranges, batch, head, q_length, HEADS, RANGES)
    bounds = visible_span(
        first_row, q_length, kv_length, ranges, 1, BLOCK_Q, BLOCK_K, LOWEST, HIGHEST, BANDED, RANGES >= 0, False
    )
    queries = load_only_tile(query + query_offset, head, first_row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
    d_outs = load_only_tile(
        d_out + out_offset, head, first_row, q_length, HEADS, BLOCK_Q, VALUE_DIM, HEAD_VALUE_DIM, TMA
    )
    exponent = load_row(exponents, place, first_row, q_length, BLOCK_Q, float("inf"), True, False)
    delta = load_row(deltas, place, first_row, q_length, BLOCK_Q, 0.0, True, False)
    keys_from = described(key, kv_length, KV_HEADS, BLOCK_K, DIM, HEAD_DIM, TMA)
    values_from = described(value, kv_length, KV_HEADS, BLOCK_K, VALUE_DIM, HEAD_VALUE_DIM, TMA)
    total = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for part in tl.static_range(3):
        if (PARTS >> part) & 1:
            total = query_steps(
                total, queries, d_outs, exponent, delta, keys_from, values_from, bias, d_bias, q_rows, kv_rows, mask,
                dropout_keys, kv_head, first_row, bounds[part], bounds[part + 1], q_length, kv_length,
                KV_HEADS, BLOCK_Q, BLOCK_K, DIM, VALUE_DIM, HEAD_DIM, HEAD_VALUE_DIM, SCALE, SOFT_CAP, LOWEST, HIGHEST,
                BANDED, ROWS, MASK, BIAS, THRESHOLD, KEEP_SCALE, PRECISION, TMA, part != 1,
            )  # fmt: skip
    store_tile(d_query + query_offset, total * SCALE, head, first_row, q_length, HEADS, BLOCK_Q, DIM, HEAD_DIM, TMA)
