# mypy: disable-error-code="assignment"
"""The gradients of linear attention with a decay per head in Triton, with the names of ``forward_kernels``.

With P = scale · Γ ⊙ Q Kᵀ and D the gradient of the state behind a chunk (``d_states``):

  dU       Pᵀ dO + 2^(γ_C - γ) K D, with a delta rule dR = Tᵀ dU: ``d_updates`` [rows, HV, V]
  E        -β 2^γ dR, the gradient of K S
  D before 2^γ_C D + Qᵀ (scale 2^γ dO) + Kᵀ E
  Y        scale · Γ ⊙ dO Uᵀ on and below the diagonal
  X        -β Γ ⊙ dR Uᵀ below the diagonal
  dQ       scale 2^γ dO Sᵀ + Y K
  dK       E Sᵀ + Yᵀ Q + (X + Xᵀ) K + 2^(γ_C - γ) U Dᵀ
  dV, dβ   β dR, and the row sums of dR ⊙ (V - 2^γ K S) and of X / β ⊙ K Kᵀ; β may be 0, so nothing is divided by it
  dγ       row sums less column sums of Z = Y ⊙ Q Kᵀ + X ⊙ K Kᵀ, the row sums of what S adds to dQ ⊙ Q and of E Sᵀ ⊙ K,
           less those of what D adds to dK ⊙ K, whose sum and 2^γ_C <S, D> belong to γ_C
  dg       sums of dγ from each token to the end of its chunk

Transposed products are computed as such: the transpose of an accumulator never is an operand.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.triton.forward_kernels import solved

SIZE = tl.constexpr(64)


@triton.jit
def local_gradients(
    query, key, d_out, gamma, chunks, d_updates,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes Pᵀ dO of a chunk, and zeros in the rows of padding."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    chunk = tl.program_id(0) // (v_blocks * HV)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    values, of_value = (first * HV + head) * V, (i * (HV * V))[:, None] + v[None, :]
    result = tl.zeros((SIZE, BLOCK_V), tl.float32)
    if tokens > 0:
        operand = d_updates.dtype.element_ty
        inside = i < tokens
        key_head: tl.constexpr = HV // H
        begin, of_key = (first * H + head // key_head) * K, (i * (H * K))[:, None] + k[None, :]
        scores = tl.zeros((SIZE, SIZE), tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            mask = inside[:, None] & (step + k < K)[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(operand)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(operand)
            scores = tl.dot(keys, tl.trans(queries), scores, input_precision=PRECISION)
        later = i[:, None] <= i[None, :]
        if GATE:
            sums = tl.load(gamma + (chunk.to(tl.int64) * HV + head) * SIZE + i)
            scores *= tl.exp2(tl.where(later, sums[None, :] - sums[:, None], 0.0))
        scores = tl.where(later, SCALE * scores, 0.0)
        above = tl.load(d_out + values + of_value, inside[:, None] & (v < V)[None, :], other=0.0).to(operand)
        result = tl.dot(scores.to(operand), above, input_precision=PRECISION)
    tl.store(
        d_updates + values + of_value, result.to(d_updates.dtype.element_ty), (i < rows)[:, None] & (v < V)[None, :]
    )


@triton.jit
def state_gradients(
    query, key, d_out, beta, inverse, gamma, d_final, chunks, sequences, d_updates, d_states, d_initial,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes back through the chunks of a sequence: writes D behind each, and d_updates over Pᵀ dO."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    key_head: tl.constexpr = HV // H
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    of_key, of_value = (i * (H * K))[:, None] + k[None, :], (i * (HV * V))[:, None] + v[None, :]
    later = i[:, None] <= i[None, :]
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
        key_inside, value_inside = inside[:, None] & (k < K)[None, :], inside[:, None] & (v < V)[None, :]
        rows, values = (first * H + head // key_head) * K, (first * HV + head) * V
        queries = tl.load(query + rows + of_key, key_inside, other=0.0).to(operand)
        keys = tl.load(key + rows + of_key, key_inside, other=0.0).to(operand)
        above = SCALE * tl.load(d_out + values + of_value, value_inside, other=0.0).to(tl.float32)
        update = tl.load(d_updates + values + of_value, value_inside, other=0.0).to(tl.float32)
        from_state = tl.dot(keys, narrow, input_precision=PRECISION)
        if GATE:
            sums, last = tl.load(gamma + place * SIZE + i), tl.load(gamma + place * SIZE + (SIZE - 1))
            from_state *= tl.exp2(last - sums)[:, None]
            above *= tl.exp2(sums)[:, None]
            state *= tl.exp2(last)
        update += from_state
        state = tl.dot(tl.trans(queries), above.to(operand), state, input_precision=PRECISION)
        if DELTA:
            solve = tl.trans(tl.load(inverse + place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :])).to(tl.float32)
            if GATE:
                solve *= tl.exp2(tl.where(later, sums[None, :] - sums[:, None], 0.0))
            update = solved(solve, update, operand, PRECISION)
            erased = -tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
            if GATE:
                erased *= tl.exp2(sums)
            state = tl.dot(tl.trans(keys), (erased[:, None] * update).to(operand), state, input_precision=PRECISION)
        tl.store(d_updates + values + of_value, update.to(operand), value_inside)
    if INITIAL:
        tl.store(d_initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)


@triton.jit
def token_gradients(
    query, key, value, beta, updates, d_out, d_updates, states, d_states, gamma, chunks, rows_of_all,
    d_query, d_key, d_value, d_beta, d_decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a block of channels of the keys of a chunk, from all value heads of a key head.

    d_beta, d_decay   [blocks of K, rows, HV], each block's share
    """
    k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block, key_head = tl.program_id(0) % k_blocks, tl.program_id(0) // k_blocks % H
    chunk = tl.program_id(0) // (k_blocks * H)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    # Without a token all loads are masked, and the gradients of the rows are zeros.
    inside, written, k_inside, has_state = i < tokens, i < rows, k < K, k < tl.minimum(tokens, 1) * K
    of_key, key_mask = (i * (H * K))[:, None] + k[None, :], inside[:, None] & k_inside[None, :]
    of_value, of_state = (i * (HV * V))[:, None] + v[None, :], k[:, None] * V + v[None, :]
    keys_begin = (first * H + key_head) * K
    earlier, later = i[:, None] > i[None, :], i[:, None] < i[None, :]
    same = i[:, None] == i[None, :]
    operand = states.dtype.element_ty
    d_queries = tl.zeros((SIZE, BLOCK_K), tl.float32)
    d_keys = tl.zeros((SIZE, BLOCK_K), tl.float32)
    own, share = block + i * 0 == 0, block.to(tl.int64) * rows_of_all * HV
    group: tl.constexpr = HV // H
    for member in tl.range(group):
        head = key_head * group + member
        place = chunk.to(tl.int64) * HV + head
        of_head = first * HV + head
        # Two passes over V, of what a token reads and of what it writes: accumulators of both would spill.
        y = tl.zeros((SIZE, SIZE), tl.float32)
        x = tl.zeros((SIZE, SIZE), tl.float32)
        by_query = tl.zeros((SIZE, BLOCK_K), tl.float32)
        by_key = tl.zeros((SIZE, BLOCK_K), tl.float32)
        if DELTA:
            strength = tl.load(beta + of_head + i * HV, inside, other=0.0).to(tl.float32)
            by_strength = tl.zeros((SIZE,), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            values, before = of_head * V + step, place * (K * V) + step
            above = tl.load(d_out + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            update = tl.load(updates + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            y = tl.dot(above, tl.trans(update), y, input_precision=PRECISION)
            by_query = tl.dot(above, tl.trans(state), by_query, input_precision=PRECISION)
            if DELTA:
                d_update = tl.load(d_updates + values + of_value, inside[:, None] & v_inside, other=0.0)
                x = tl.dot(d_update, tl.trans(update), x, input_precision=PRECISION)
                by_key = tl.dot(d_update, tl.trans(state), by_key, input_precision=PRECISION)
                # The first block of K has these, of all of V.
                wide = d_update.to(tl.float32)
                given = tl.load(value + values + of_value, (inside & own)[:, None] & v_inside, other=0.0).to(tl.float32)
                by_strength += tl.sum(wide * given, 1)
                target = (strength[:, None] * wide).to(d_value.dtype.element_ty)
                tl.store(d_value + values + of_value, target, (written & own)[:, None] & v_inside)
        queries = tl.load(query + keys_begin + of_key, key_mask, other=0.0).to(operand)
        keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(operand)
        y = tl.where(earlier | same, SCALE * y, 0.0)
        by_query *= SCALE
        if GATE:
            sums, last = tl.load(gamma + place * SIZE + i), tl.load(gamma + place * SIZE + (SIZE - 1))
            decays = tl.exp2(tl.where(earlier, sums[:, None] - sums[None, :], 0.0))
            y *= decays
            by_query *= tl.exp2(sums)[:, None]
            by_key *= tl.exp2(sums)[:, None]
            # The diagonal of Z cancels.
            z = tl.where(earlier, y * tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)
            d_sums = tl.sum(by_query * queries.to(tl.float32), 1)
        d_queries += by_query
        d_queries = tl.dot(y.to(operand), keys, d_queries, input_precision=PRECISION)
        if DELTA:
            x = tl.where(earlier, -x, 0.0)
            if GATE:
                x *= decays
            products = x * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
            by_key_row = tl.sum(by_key * keys.to(tl.float32), 1)
            tl.store(d_beta + share + of_head + i * HV, by_strength + tl.sum(products, 1) - by_key_row, written)
            if GATE:
                z += strength[:, None] * products
                d_sums -= strength * by_key_row
            d_keys -= strength[:, None] * by_key
            d_keys = tl.dot((strength[:, None] * x).to(operand), keys, d_keys, input_precision=PRECISION)
        if GATE:
            d_sums += tl.sum(z, 1) - tl.sum(z, 0)

        y_transposed = tl.zeros((SIZE, SIZE), tl.float32)
        x_transposed = tl.zeros((SIZE, SIZE), tl.float32)
        by_state = tl.zeros((SIZE, BLOCK_K), tl.float32)
        overlap = tl.zeros((BLOCK_K,), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            values, before = of_head * V + step, place * (K * V) + step
            above = tl.load(d_out + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            update = tl.load(updates + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            d_state = tl.load(d_states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            y_transposed = tl.dot(update, tl.trans(above), y_transposed, input_precision=PRECISION)
            by_state = tl.dot(update, tl.trans(d_state), by_state, input_precision=PRECISION)
            if GATE:
                state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
                overlap += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            if DELTA:
                d_update = tl.load(d_updates + values + of_value, inside[:, None] & v_inside, other=0.0)
                x_transposed = tl.dot(update, tl.trans(d_update), x_transposed, input_precision=PRECISION)
        y_transposed = tl.where(later | same, SCALE * y_transposed, 0.0)
        if GATE:
            decays = tl.exp2(tl.where(later, sums[None, :] - sums[:, None], 0.0))
            y_transposed *= decays
            by_state *= tl.exp2(last - sums)[:, None]
            of_last = tl.sum(by_state * keys.to(tl.float32), 1)
            # Each decay is in γ_C.
            total = tl.sum(of_last, 0) + tl.exp2(last) * tl.sum(overlap, 0)
            found = tl.where(inside, tl.cumsum(d_sums - of_last, 0, reverse=True) + total, 0.0)
            tl.store(d_decay + share + of_head + i * HV, found, written)
        d_keys += by_state
        d_keys = tl.dot(y_transposed.to(operand), queries, d_keys, input_precision=PRECISION)
        if DELTA:
            x_transposed = tl.where(later, -strength[None, :] * x_transposed, 0.0)
            if GATE:
                x_transposed *= decays
            d_keys = tl.dot(x_transposed.to(operand), keys, d_keys, input_precision=PRECISION)
    target = written[:, None] & k_inside[None, :]
    tl.store(d_query + keys_begin + of_key, d_queries.to(d_query.dtype.element_ty), target)
    tl.store(d_key + keys_begin + of_key, d_keys.to(d_key.dtype.element_ty), target)
