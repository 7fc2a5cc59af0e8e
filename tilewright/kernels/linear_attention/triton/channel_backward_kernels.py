# mypy: disable-error-code="assignment"
"""The gradients of linear attention with decays of channels in Triton, with the names of ``channel_kernels``.

With D the gradient of the state behind a chunk (``d_states``):

  dU       Pᵀ dO + Kε D, with a delta rule dR = Tᵀ dU: ``d_updates`` [rows, HV, V]
  D before Diag(2^γ_C) D + Qγᵀ dO - Kγᵀ (β dR)
  Y        scale · dO Uᵀ on and below the diagonal, X = -dR Uᵀ below it
  dQ       scale 2^γ dO Sᵀ, and Σ_j Y_ij k_jc 2^(γ_ic - γ_jc)
  dK       of tokens that read: -2^γ (β dR) Sᵀ, and β Σ_j X_ij k_jc 2^(γ_ic - γ_jc);
           of tokens that write: 2^(γ_C - γ) U Dᵀ, and Σ_i (Y_ij q_ic + β_i X_ij k_ic) 2^(γ_ic - γ_jc)
  dV, dβ   β dR, and the row sums of dR ⊙ (V - Kγ S) and of X ⊙ A(k, k); β may be 0, so nothing is divided by it
  dγ       q dQ + k dK of what reads, less k dK of what writes; γ_C has k dK of what the state behind has, and
           2^γ_C <S, D>
  dg       sums of dγ from each token to the end of its chunk, with a bonus without what reads the token's own q

Above the diagonal of Y and X are their transposes, that of X with β. Within blocks that have one anchor two matmuls
take what is below and what is above it. Of a pair of halves the rows of later tokens are what reads and those of
earlier ones what writes, in one matmul for both.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.triton.channel_kernels import (
    block_level,
    is_later,
    is_parted,
    pair_anchors,
    sums_before,
)
from tilewright.kernels.linear_attention.triton.forward_kernels import solved

SIZE = tl.constexpr(64)
LEVELS = tl.constexpr(6)


@triton.jit
def channel_state_gradients(
    d_out, beta, from_query, from_key, to_end, scores, inverse, gamma, d_final, chunks, sequences, d_updates,
    d_states, d_initial,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes back through the chunks of a sequence: writes D behind each, and d_updates."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    of_token, token_inside = (i * K)[:, None] + k[None, :], (i[:, None] >= 0) & (k < K)[None, :]
    of_value, of_pair = (i * (HV * V))[:, None] + v[None, :], i[:, None] * SIZE + i[None, :]
    operand = d_states.dtype.element_ty
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if FINAL:
        state = tl.load(d_final + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state_inside, other=0.0)
    for back in tl.range(0, count):
        chunk = begin + count - 1 - back
        place = chunk.to(tl.int64) * HV + head
        narrow = state.to(operand)
        tl.store(d_states + place * (K * V) + of_state, narrow, state_inside)
        first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
        inside = i < tokens
        values, value_inside = (first * HV + head) * V, inside[:, None] & (v < V)[None, :]
        above = tl.load(d_out + values + of_value, value_inside, other=0.0).to(operand)
        pairs = tl.load(scores + place * (SIZE * SIZE) + of_pair)
        ends = tl.load(to_end + place * (SIZE * K) + of_token, token_inside, other=0.0)
        queries = tl.load(from_query + place * (SIZE * K) + of_token, token_inside, other=0.0)
        last = tl.load(gamma + place * (SIZE * K) + (SIZE - 1) * K + k, k < K, other=0.0)
        update = tl.dot(ends, narrow, input_precision=PRECISION)
        update = tl.dot(tl.trans(pairs), above, update, input_precision=PRECISION)
        state *= tl.exp2(last)[:, None]
        state = tl.dot(tl.trans(queries), above, state, input_precision=PRECISION)
        if DELTA:
            keys = tl.load(from_key + place * (SIZE * K) + of_token, token_inside, other=0.0)
            solve = tl.load(inverse + place * (SIZE * SIZE) + of_pair)
            update = solved(tl.trans(solve), update, operand, PRECISION)
            erased = -tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
            state = tl.dot(tl.trans(keys), (erased[:, None] * update).to(operand), state, input_precision=PRECISION)
        tl.store(d_updates + values + of_value, update.to(operand), value_inside)
    if INITIAL:
        tl.store(d_initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)


@triton.jit
def channel_pair_gradients(
    value, beta, updates, d_out, d_updates, chunks, d_scores, d_products, d_value, d_beta,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes Y (``d_scores``), X (``d_products``), dV and the share of V in dβ, with zeros in the rows of padding."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_V)
    row, column = i[:, None], i[None, :]
    inside, written = i < tokens, i < rows
    operand = d_scores.dtype.element_ty
    of_head, of_value = first * HV + head, (i * (HV * V))[:, None] + v[None, :]
    y = tl.zeros((SIZE, SIZE), tl.float32)
    y_transposed = tl.zeros((SIZE, SIZE), tl.float32)
    if DELTA:
        x = tl.zeros((SIZE, SIZE), tl.float32)
        x_transposed = tl.zeros((SIZE, SIZE), tl.float32)
        strength = tl.load(beta + of_head + i * HV, inside, other=0.0).to(tl.float32)
        by_value = tl.zeros((SIZE,), tl.float32)
    for step in tl.range(0, V, BLOCK_V):
        v_inside = (step + v < V)[None, :]
        mask, values = inside[:, None] & v_inside, of_head * V + step
        above = tl.load(d_out + values + of_value, mask, other=0.0).to(operand)
        update = tl.load(updates + values + of_value, mask, other=0.0).to(operand)
        y = tl.dot(above, tl.trans(update), y, input_precision=PRECISION)
        y_transposed = tl.dot(update, tl.trans(above), y_transposed, input_precision=PRECISION)
        if DELTA:
            d_update = tl.load(d_updates + values + of_value, mask, other=0.0)
            x = tl.dot(d_update, tl.trans(update), x, input_precision=PRECISION)
            x_transposed = tl.dot(update, tl.trans(d_update), x_transposed, input_precision=PRECISION)
            wide = d_update.to(tl.float32)
            by_value += tl.sum(wide * tl.load(value + values + of_value, mask, other=0.0).to(tl.float32), 1)
            target = (strength[:, None] * wide).to(d_value.dtype.element_ty)
            tl.store(d_value + values + of_value, target, written[:, None] & v_inside)
    of_pair = (chunk.to(tl.int64) * HV + head) * (SIZE * SIZE) + row * SIZE + column
    tl.store(d_scores + of_pair, (SCALE * tl.where(row >= column, y, y_transposed)).to(operand))
    if DELTA:
        tl.store(d_beta + of_head + i * HV, by_value, written)
        found = tl.where(row > column, -x, -strength[None, :] * x_transposed)
        tl.store(d_products + of_pair, tl.where(row == column, 0.0, found).to(operand))


@triton.jit
def gradients_of_pairs(
    pairs, late, early, reading, sums, gamma, i, k, k_inside, K: tl.constexpr, blocks, RANGE: tl.constexpr,
    operand: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of rows that read and of rows that have written, from those of their products by pairs.

    pairs           [64, 64], of later rows and earlier columns below the diagonal, and its transpose above it
    reading, sums   γ of the rows that read and of those that have written
    blocks          as in ``block_level``
    """
    row, column = i[:, None], i[None, :]
    d_late = tl.zeros_like(late)
    d_early = tl.zeros_like(early)
    # From pairs in one block to those in the two halves of the chunk; a block of one token has none.
    for level in tl.range(tl.maximum(blocks - 1, 0), LEVELS):
        whole, later = level < blocks, is_later(i, 1 << level)[:, None]
        anchors = pair_anchors(gamma, i, k, k_inside, K, level, whole, RANGE)
        rise = tl.exp2(tl.where(whole | later, reading - anchors, float("-inf")))
        fall = tl.exp2(tl.where(whole | (later == 0), anchors - sums, float("-inf")))
        chosen = (row >> level + 1 == column >> level + 1) & (whole | is_parted(row, column, 1 << level))
        chosen_late = tl.where(chosen & (row > column), pairs, 0.0).to(operand)
        d_late += rise * tl.dot(chosen_late, (early * fall).to(operand), input_precision=PRECISION)
        chosen_early = tl.where(chosen & (row < column), pairs, 0.0).to(operand)
        d_early += fall * tl.dot(chosen_early, (late * rise).to(operand), input_precision=PRECISION)
    return d_late, d_early


@triton.jit
def channel_token_gradients(
    query, key, beta, bonus, updates, d_out, d_updates, states, d_states, d_scores, d_products, gamma, chunks,
    rows_of_all, d_query, d_key, d_beta, d_bonus, d_decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, BONUS: tl.constexpr, SCALE: tl.constexpr, RANGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a block of channels of the keys of a chunk, from all value heads of a key head.

    d_beta    [blocks of K, rows, HV], each block's share
    d_bonus   [chunks, HV, K], each chunk's share
    """
    k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block, key_head = tl.program_id(0) % k_blocks, tl.program_id(0) // k_blocks % H
    chunk = tl.program_id(0) // (k_blocks * H)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row, column = i[:, None], i[None, :]
    # Without a token all loads are masked, and the gradients of the rows are zeros.
    inside, written, k_inside = i < tokens, i < rows, k < K
    has_state, key_mask = k < tl.minimum(tokens, 1) * K, inside[:, None] & k_inside[None, :]
    of_key, of_value = (i * (H * K))[:, None] + k[None, :], (i * (HV * V))[:, None] + v[None, :]
    of_token, of_state = (i * K)[:, None] + k[None, :], k[:, None] * V + v[None, :]
    target = written[:, None] & k_inside[None, :]
    keys_begin = (first * H + key_head) * K
    operand = states.dtype.element_ty
    queries = tl.load(query + keys_begin + of_key, key_mask, other=0.0).to(tl.float32)
    keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(tl.float32)
    d_queries = tl.zeros((SIZE, BLOCK_K), tl.float32)
    d_keys = tl.zeros((SIZE, BLOCK_K), tl.float32)
    group: tl.constexpr = HV // H
    for member in tl.range(group):
        head = key_head * group + member
        place = chunk.to(tl.int64) * HV + head
        of_head = first * HV + head
        by_query = tl.zeros((SIZE, BLOCK_K), tl.float32)
        by_key = tl.zeros((SIZE, BLOCK_K), tl.float32)
        by_end = tl.zeros((SIZE, BLOCK_K), tl.float32)
        overlap = tl.zeros((BLOCK_K,), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            values, before = of_head * V + step, place * (K * V) + step
            above = tl.load(d_out + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            update = tl.load(updates + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            d_state = tl.load(d_states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            by_query = tl.dot(above, tl.trans(state), by_query, input_precision=PRECISION)
            by_end = tl.dot(update, tl.trans(d_state), by_end, input_precision=PRECISION)
            overlap += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            if DELTA:
                d_update = tl.load(d_updates + values + of_value, inside[:, None] & v_inside, other=0.0)
                by_key = tl.dot(d_update, tl.trans(state), by_key, input_precision=PRECISION)
        # Rows behind the tokens, too: with other sums than those of the anchors they would overflow.
        sums = tl.load(gamma + place * (SIZE * K) + of_token, (row >= 0) & has_state[None, :], other=0.0)
        last = tl.load(gamma + place * (SIZE * K) + (SIZE - 1) * K + k, has_state, other=0.0)
        reading = sums
        if BONUS:
            reading = sums_before(gamma + place * (SIZE * K), i, k, has_state, K)
        start = tl.exp2(reading)
        by_query *= SCALE * start
        by_end *= tl.exp2(last[None, :] - sums)
        d_reading = queries * by_query
        d_sums = d_reading - keys * by_end
        d_queries += by_query
        d_keys += by_end
        of_last = tl.sum(keys * by_end, 0) + tl.exp2(last) * overlap
        if DELTA:
            strength = tl.load(beta + of_head + i * HV, inside, other=0.0).to(tl.float32)
            by_key *= -start
            by_strength = tl.sum(keys * by_key, 1)
            d_keys += strength[:, None] * by_key
            d_sums += strength[:, None] * (keys * by_key)
        of_pair = place * (SIZE * SIZE) + row * SIZE + column
        y = tl.load(d_scores + of_pair)
        blocks = block_level(gamma + place * (SIZE * K), k, has_state, K, BLOCK_K, RANGE)
        of_chunk = gamma + place * (SIZE * K)
        found, others = gradients_of_pairs(
            y, queries, keys, reading, sums, of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
        )
        d_queries += found
        d_keys += others
        d_sums += queries * found - keys * others
        if BONUS:
            d_reading += queries * found
        own = tl.sum(tl.where(row == column, y.to(tl.float32), 0.0), 1)[:, None]
        if BONUS:
            tl.store(d_bonus + place * K + k, tl.sum(own * queries * keys, 0), k_inside)
            own *= tl.load(bonus + head * K + k, k_inside, other=0.0).to(tl.float32)[None, :]
        d_queries += own * keys
        d_keys += own * queries
        if DELTA:
            x = tl.load(d_products + of_pair)
            found, others = gradients_of_pairs(
                x, keys, keys, reading, sums, of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
            )
            by_strength += tl.sum(keys * found, 1)
            found = strength[:, None] * found
            d_keys += found + others
            d_sums += keys * (found - others)
            share = block.to(tl.int64) * rows_of_all * HV
            tl.store(d_beta + share + of_head + i * HV, by_strength, written)
        # Each decay is in γ_C.
        found = tl.cumsum(d_sums, 0, reverse=True) + of_last[None, :]
        if BONUS:
            found -= d_reading
        found = tl.where(inside[:, None], found, 0.0)
        tl.store(d_decay + of_head * K + (i * (HV * K))[:, None] + k[None, :], found, target)
    tl.store(d_query + keys_begin + of_key, d_queries.to(d_query.dtype.element_ty), target)
    tl.store(d_key + keys_begin + of_key, d_keys.to(d_key.dtype.element_ty), target)
