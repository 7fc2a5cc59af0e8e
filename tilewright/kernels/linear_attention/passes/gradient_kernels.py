# mypy: disable-error-code="assignment"
"""The gradients of linear attention with a decay per head in Triton, with the names of ``triton.forward_kernels``.

With P = scale · Γ ⊙ Q Kᵀ and D the gradient of the state behind a chunk (``d_states``):

  dU       Pᵀ dO + 2^(γ_C - γ) K D, with a delta rule dR = Tᵀ dU: ``d_updates`` [rows, HV, V]
  E        -β 2^γ dR, the gradient of K S
  D before 2^γ_C D + Qᵀ (scale 2^γ dO) + Kᵀ E
  Y        scale · Γ ⊙ dO Uᵀ on and below the diagonal
  X        -β Γ ⊙ dR Uᵀ below the diagonal
  dQ       scale 2^γ dO Sᵀ + Y K
  dK       E Sᵀ + Yᵀ Q + (X + Xᵀ) K + 2^(γ_C - γ) U Dᵀ
  dV, dβ   β dR, and the row sums of dR ⊙ V and of (E Sᵀ + X K) / β ⊙ K; β may be 0, so nothing is divided by it
  dγ       row sums of dQ ⊙ Q, of (E Sᵀ + X K) ⊙ K, and less those of the rest of dK ⊙ K; with γ_C go 2^γ_C <S, D> and
           the sum of what D adds to dK ⊙ K. Y and X add to the row of one token what they take from another's.
  dg       sums of dγ from each token to the end of its chunk

Transposed products are computed as such or read from memory: the transpose of an accumulator never is an operand.
"""

import triton
import triton.language as tl

SIZE = tl.constexpr(64)


@triton.jit
def local_gradients(
    query, key, updates, d_out, gamma, chunks, d_updates, pairs, diagonal,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, SCORES: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes Pᵀ dO of a chunk with SCORES, and zeros in the rows of padding; and Y.

    pairs      Y below the diagonal, [chunks, HV, 64, 64]
    diagonal   that of Y, [rows, HV] in float32
    """
    head, chunk = tl.program_id(0) % HV, tl.program_id(0) // HV
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    operand = pairs.dtype.element_ty
    # Without a token all loads are masked, and what is written are zeros.
    inside = i < tokens
    place, of_head = chunk.to(tl.int64) * HV + head, first * HV + head
    earlier, later = i[:, None] > i[None, :], i[:, None] <= i[None, :]
    if GATE:
        sums = tl.load(gamma + place * SIZE + i)
    if SCORES:
        begin, of_key = (first * H + head // (HV // H)) * K, (i * (H * K))[:, None] + k[None, :]
        scores = tl.zeros((SIZE, SIZE), tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            mask = inside[:, None] & (step + k < K)[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(operand)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(operand)
            scores = tl.dot(keys, tl.trans(queries), scores, input_precision=PRECISION)
        scores = tl.where(later, SCALE * scores, 0.0)
        if GATE:
            scores *= tl.exp2(tl.where(later, sums[None, :] - sums[:, None], 0.0))
        scores = scores.to(operand)
    y = tl.zeros((SIZE, SIZE), tl.float32)
    same = tl.zeros((SIZE,), tl.float32)
    for step in tl.range(0, V, BLOCK_V):
        values = of_head * V + step + (i * (HV * V))[:, None] + v[None, :]
        v_inside = (step + v < V)[None, :]
        above = tl.load(d_out + values, inside[:, None] & v_inside, other=0.0).to(operand)
        update = tl.load(updates + values, inside[:, None] & v_inside, other=0.0).to(operand)
        y = tl.dot(above, tl.trans(update), y, input_precision=PRECISION)
        same += tl.sum(above.to(tl.float32) * update.to(tl.float32), 1)
        if SCORES:
            result = tl.dot(scores, above, input_precision=PRECISION)
            tl.store(d_updates + values, result.to(operand), (i < rows)[:, None] & v_inside)
    y = tl.where(earlier, SCALE * y, 0.0)
    if GATE:
        y *= tl.exp2(tl.where(earlier, sums[:, None] - sums[None, :], 0.0))
    tl.store(pairs + place * (SIZE * SIZE) + (i * SIZE)[:, None] + i[None, :], y.to(operand))
    tl.store(diagonal + of_head + i * HV, SCALE * same, i < rows)


@triton.jit
def pair_gradients(
    value, beta, updates, d_updates, gamma, chunks, pairs, d_value, d_beta,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dV of a delta rule, X / β as ``pairs`` [chunks, HV, 64, 64], and the part of dβ that V has."""
    head, chunk = tl.program_id(0) % HV, tl.program_id(0) // HV
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_V)
    inside, written = i < tokens, i < rows
    place, of_head = chunk.to(tl.int64) * HV + head, first * HV + head
    operand = d_updates.dtype.element_ty
    strength = tl.load(beta + of_head + i * HV, inside, other=0.0).to(tl.float32)
    by_strength = tl.zeros((SIZE,), tl.float32)
    x = tl.zeros((SIZE, SIZE), tl.float32)
    for step in tl.range(0, V, BLOCK_V):
        values = of_head * V + step + (i * (HV * V))[:, None] + v[None, :]
        v_inside = (step + v < V)[None, :]
        d_update = tl.load(d_updates + values, inside[:, None] & v_inside, other=0.0)
        update = tl.load(updates + values, inside[:, None] & v_inside, other=0.0)
        given = tl.load(value + values, inside[:, None] & v_inside, other=0.0).to(tl.float32)
        x = tl.dot(d_update, tl.trans(update), x, input_precision=PRECISION)
        wide = d_update.to(tl.float32)
        by_strength += tl.sum(wide * given, 1)
        target = (strength[:, None] * wide).to(d_value.dtype.element_ty)
        tl.store(d_value + values, target, written[:, None] & v_inside)
    earlier = i[:, None] > i[None, :]
    x = tl.where(earlier, -x, 0.0)
    if GATE:
        sums = tl.load(gamma + place * SIZE + i)
        x *= tl.exp2(tl.where(earlier, sums[:, None] - sums[None, :], 0.0))
    tl.store(pairs + place * (SIZE * SIZE) + (i * SIZE)[:, None] + i[None, :], x.to(operand))
    tl.store(d_beta + of_head + i * HV, by_strength, written)


@triton.jit
def query_gradients(
    query, key, d_out, states, gamma, chunks, pairs, diagonal, rows_of_all, d_query, d_sums,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STATE_K: tl.constexpr, STATE_V: tl.constexpr, GATE: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dQ of a block of channels of the keys of a chunk, from all value heads of a key head.

    d_sums   the row sums of dQ ⊙ Q of each value head, but for what the diagonal of Y adds, which cancels in dγ:
             [blocks of K, rows, HV], each block's share
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
    of_value, of_state = (i * (HV * V))[:, None] + v[None, :], (k * STATE_K)[:, None] + (v * STATE_V)[None, :]
    keys_begin = (first * H + key_head) * K
    operand = states.dtype.element_ty
    keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(operand)
    d_queries = tl.zeros((SIZE, BLOCK_K), tl.float32)
    same = tl.zeros((SIZE,), tl.float32)
    group: tl.constexpr = HV // H
    # Where a head has no loop, the next one is loaded ahead.
    ahead: tl.constexpr = 2 if V <= BLOCK_V else 1
    for member in tl.range(group, num_stages=ahead):
        head = key_head * group + member
        place = chunk.to(tl.int64) * HV + head
        of_head = first * HV + head
        found = tl.zeros((SIZE, BLOCK_K), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            above = tl.load(d_out + (of_head * V + step) + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            state = tl.load(
                states + (place * (K * V) + step * STATE_V) + of_state, has_state[:, None] & v_inside, other=0.0
            )
            found = tl.dot(above, tl.trans(state), found, input_precision=PRECISION)
        found *= SCALE
        if GATE:
            found *= tl.exp2(tl.load(gamma + place * SIZE + i))[:, None]
        y = tl.load(pairs + place * (SIZE * SIZE) + (i * SIZE)[:, None] + i[None, :])
        found = tl.dot(y, keys, found, input_precision=PRECISION)
        if GATE:
            queries = tl.load(query + keys_begin + of_key, key_mask, other=0.0).to(tl.float32)
            share = block.to(tl.int64) * rows_of_all * HV + of_head
            tl.store(d_sums + share + i * HV, tl.sum(found * queries, 1), written)
        d_queries += found
        same += tl.load(diagonal + of_head + i * HV, inside, other=0.0)
    d_queries += same[:, None] * keys.to(tl.float32)
    target = written[:, None] & k_inside[None, :]
    tl.store(d_query + keys_begin + of_key, d_queries.to(d_query.dtype.element_ty), target)


@triton.jit
def key_gradients(
    query, key, beta, updates, d_updates, states, d_states, gamma, chunks, pairs, diagonal, erasing, d_sums,
    by_strength, rows_of_all, d_key, d_beta, d_decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STATE_K: tl.constexpr, STATE_V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dK of a block of channels of a chunk, from all value heads of a key head, dβ and dg.

    erasing           X / β, of ``pair_gradients``
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
    of_value, of_state = (i * (HV * V))[:, None] + v[None, :], (k * STATE_K)[:, None] + (v * STATE_V)[None, :]
    of_pair, transposed = (i * SIZE)[:, None] + i[None, :], (i * SIZE)[None, :] + i[:, None]
    keys_begin = (first * H + key_head) * K
    operand = states.dtype.element_ty
    d_keys = tl.zeros((SIZE, BLOCK_K), tl.float32)
    same = tl.zeros((SIZE,), tl.float32)
    share = block.to(tl.int64) * rows_of_all * HV
    group: tl.constexpr = HV // H
    # With a delta rule a head has too many blocks for two in shared memory.
    ahead: tl.constexpr = 2 if V <= BLOCK_V and not DELTA else 1
    for member in tl.range(group, num_stages=ahead):
        head = key_head * group + member
        place = chunk.to(tl.int64) * HV + head
        of_head = first * HV + head
        if GATE:
            sums, last = tl.load(gamma + place * SIZE + i), tl.load(gamma + place * SIZE + (SIZE - 1))
            d_gamma = tl.load(d_sums + share + of_head + i * HV, inside, other=0.0)
        # Loads of a tile are repeated: what stays in registers between the uses would spill.
        keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(operand)
        if DELTA:
            erased = tl.zeros((SIZE, BLOCK_K), tl.float32)
            for step in tl.range(0, V, BLOCK_V):
                v_inside = (step + v < V)[None, :]
                values, before = of_head * V + step, place * (K * V) + step * STATE_V
                d_update = tl.load(d_updates + values + of_value, inside[:, None] & v_inside, other=0.0)
                state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
                erased = tl.dot(d_update, tl.trans(state), erased, input_precision=PRECISION)
            if GATE:
                erased *= tl.exp2(sums)[:, None]
            x = tl.load(erasing + place * (SIZE * SIZE) + of_pair)
            erased = tl.dot(x, keys, -erased, input_precision=PRECISION)
            by_key = tl.sum(erased * keys.to(tl.float32), 1)
            own = tl.load(by_strength + of_head + i * HV, inside & (block + i * 0 == 0), other=0.0)
            tl.store(d_beta + share + of_head + i * HV, own + by_key, written)
            strength = tl.load(beta + of_head + i * HV, inside, other=0.0).to(tl.float32)
            d_keys += strength[:, None] * erased
            if GATE:
                d_gamma += strength * by_key
        found = tl.zeros((SIZE, BLOCK_K), tl.float32)
        overlap = tl.zeros((BLOCK_K,), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            values, before = of_head * V + step, place * (K * V) + step * STATE_V
            if GATE:
                state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            update = tl.load(updates + values + of_value, inside[:, None] & v_inside, other=0.0).to(operand)
            d_state = tl.load(d_states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            found = tl.dot(update, tl.trans(d_state), found, input_precision=PRECISION)
            if GATE:
                overlap += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        if GATE:
            found *= tl.exp2(last - sums)[:, None]
            keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(operand)
            of_last = tl.sum(found * keys.to(tl.float32), 1)
            d_gamma += of_last
        queries = tl.load(query + keys_begin + of_key, key_mask, other=0.0).to(operand)
        y = tl.load(pairs + place * (SIZE * SIZE) + transposed)
        if DELTA:
            x = tl.load(erasing + place * (SIZE * SIZE) + transposed)
            # The modifier keeps this load apart from the last one, whose layout is that of accumulators.
            keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0, cache_modifier=".ca").to(operand)
            scaled = (strength[:, None] * keys.to(tl.float32)).to(operand)
            found = tl.dot(x, scaled, found, input_precision=PRECISION)
        found = tl.dot(y, queries, found, input_precision=PRECISION)
        d_keys += found
        same += tl.load(diagonal + of_head + i * HV, inside, other=0.0)
        if GATE:
            keys = tl.load(key + keys_begin + of_key, key_mask, other=0.0).to(operand)
            d_gamma -= tl.sum(found * keys.to(tl.float32), 1)
            # 2^(γ_C - γ) has the decays behind a token, and 2^γ_C those of all.
            d_gamma = tl.cumsum(d_gamma, 0, reverse=True) + tl.cumsum(of_last, 0) - of_last
            d_gamma = tl.where(inside, d_gamma + tl.exp2(last) * tl.sum(overlap, 0), 0.0)
            tl.store(d_decay + share + of_head + i * HV, d_gamma, written)
    queries = tl.load(query + keys_begin + of_key, key_mask, other=0.0)
    d_keys += same[:, None] * queries.to(tl.float32)
    target = written[:, None] & k_inside[None, :]
    tl.store(d_key + keys_begin + of_key, d_keys.to(d_key.dtype.element_ty), target)


@triton.jit
def normalized_gradients(
    x, d_normalized, d_x,
    ROWS: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of rows [rows, K] from that of x / √(Σ x² + ε); it is 0 where that is, whatever x is."""
    row, k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    place, mask = row[:, None] * K + k[None, :], (row < ROWS)[:, None] & (k < K)[None, :]
    wide = tl.load(x + place, mask, other=0.0).to(tl.float32)
    gradient = tl.load(d_normalized + place, mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    along = tl.sum(wide * gradient, 1) * inverse * inverse
    found = inverse[:, None] * (gradient - along[:, None] * wide)
    # Rows of padding may hold NaN.
    reached = tl.sum(tl.abs(gradient), 1) != 0
    tl.store(d_x + place, tl.where(reached[:, None], found, 0.0).to(d_x.dtype.element_ty), mask)
