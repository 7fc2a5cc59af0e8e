# mypy: disable-error-code="assignment"
"""The gradients of linear attention with a removal in Triton, with the names of ``removal_kernels``.

With D the gradient of the state behind a chunk (``d_states``):

  dY       P(q, b)ᵀ dO + Bε D; dZ = Tᵀ dY: ``d_updates`` [rows, HV, V]
  dV       P(q, k)ᵀ dO + Kε D + A⁻(a, k)ᵀ dZ
  D before Diag(2^γ_C) D + Qγᵀ dO + Aγᵀ dZ
  pairs    scale · dO Vᵀ and scale · dO Yᵀ on and below the diagonal, of q with k and b; dZ Vᵀ and dZ Yᵀ below it, of a
  dγ       q dQ, less k dK and b dB, and dγ⁻ a dA; γ_C has k dK and b dB of what the state behind has, and 2^γ_C <S, D>
  dg       sums of dγ and dγ⁻ from each token to the end of its chunk, without the token's own dγ⁻

Above their diagonals the pairs are their transposes, as in ``channel_backward_kernels``.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.triton.channel_backward_kernels import gradients_of_pairs
from tilewright.kernels.linear_attention.triton.channel_kernels import block_level, sums_before
from tilewright.kernels.linear_attention.triton.forward_kernels import solved

SIZE = tl.constexpr(64)


@triton.jit
def removal_state_gradients(
    d_out, from_query, from_read, to_end, write_to_end, key_pairs, write_pairs, read_pairs, inverse, gamma, d_final,
    chunks, sequences, d_value, d_updates, d_states, d_initial,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes back through the chunks of a sequence: writes D behind each, d_updates and d_value."""
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
        of_chunk, of_square = place * (SIZE * K), place * (SIZE * SIZE)
        narrow = state.to(operand)
        tl.store(d_states + place * (K * V) + of_state, narrow, state_inside)
        first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
        values, value_inside = (first * HV + head) * V, (i < tokens)[:, None] & (v < V)[None, :]
        above = tl.load(d_out + values + of_value, value_inside, other=0.0).to(operand)
        ends = tl.load(write_to_end + of_chunk + of_token, token_inside, other=0.0)
        pairs = tl.load(write_pairs + of_square + of_pair)
        solve = tl.load(inverse + of_square + of_pair)
        update = tl.dot(ends, narrow, input_precision=PRECISION)
        update = tl.dot(tl.trans(pairs), above, update, input_precision=PRECISION)
        update = solved(tl.trans(solve), update, operand, PRECISION).to(operand)
        tl.store(d_updates + values + of_value, update, value_inside)
        queries = tl.load(from_query + of_chunk + of_token, token_inside, other=0.0)
        reads = tl.load(from_read + of_chunk + of_token, token_inside, other=0.0)
        last = tl.load(gamma + of_chunk + (SIZE - 1) * K + k, k < K, other=0.0)
        state *= tl.exp2(last)[:, None]
        state = tl.dot(tl.trans(queries), above, state, input_precision=PRECISION)
        state = tl.dot(tl.trans(reads), update, state, input_precision=PRECISION)
        ends = tl.load(to_end + of_chunk + of_token, token_inside, other=0.0)
        found = tl.dot(ends, narrow, input_precision=PRECISION)
        pairs = tl.load(key_pairs + of_square + of_pair)
        found = tl.dot(tl.trans(pairs), above, found, input_precision=PRECISION)
        pairs = tl.load(read_pairs + of_square + of_pair)
        found = tl.dot(tl.trans(pairs), update, found, input_precision=PRECISION)
        tl.store(d_value + values + of_value, found.to(d_value.dtype.element_ty), value_inside)
    if INITIAL:
        tl.store(d_initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)


@triton.jit
def pair_gradients(
    late, early, chunks, out,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes scale · late earlyᵀ on and below the diagonal of a chunk, and its transpose above it."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    i, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_V)
    row, column = i[:, None], i[None, :]
    operand = out.dtype.element_ty
    of_value = (i * (HV * V))[:, None] + v[None, :]
    below = tl.zeros((SIZE, SIZE), tl.float32)
    over = tl.zeros((SIZE, SIZE), tl.float32)
    for step in tl.range(0, V, BLOCK_V):
        mask, values = (row < tokens) & (step + v < V)[None, :], (first * HV + head) * V + step
        left = tl.load(late + values + of_value, mask, other=0.0).to(operand)
        right = tl.load(early + values + of_value, mask, other=0.0).to(operand)
        below = tl.dot(left, tl.trans(right), below, input_precision=PRECISION)
        over = tl.dot(right, tl.trans(left), over, input_precision=PRECISION)
    target = out + (chunk.to(tl.int64) * HV + head) * (SIZE * SIZE) + row * SIZE + column
    tl.store(target, (SCALE * tl.where(row >= column, below, over)).to(operand))


@triton.jit
def removal_token_gradients(
    query, key, read, write, value, updates, d_out, d_updates, states, d_states, query_key, query_write, read_key,
    read_write, gamma, chunks, d_query, d_key, d_read, d_write, d_decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, SCALE: tl.constexpr, RANGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a block of channels of the keys of a chunk, from all value heads of a key head.

    query_key, query_write, read_key, read_write   what ``pair_gradients`` wrote
    """
    k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block, key_head = tl.program_id(0) % k_blocks, tl.program_id(0) // k_blocks % H
    chunk = tl.program_id(0) // (k_blocks * H)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row, column = i[:, None], i[None, :]
    # Without a token all loads are masked, and the gradients of the rows are zeros.
    inside, k_inside, has_state = i < tokens, k < K, k < tl.minimum(tokens, 1) * K
    key_mask, target = inside[:, None] & k_inside[None, :], (i < rows)[:, None] & k_inside[None, :]
    of_key, of_value = (i * (H * K))[:, None] + k[None, :], (i * (HV * V))[:, None] + v[None, :]
    of_read, of_token = (i * (HV * K))[:, None] + k[None, :], (i * K)[:, None] + k[None, :]
    of_state, of_pair = k[:, None] * V + v[None, :], row * SIZE + column
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
        d_reads = tl.zeros((SIZE, BLOCK_K), tl.float32)
        by_end = tl.zeros((SIZE, BLOCK_K), tl.float32)
        d_writes = tl.zeros((SIZE, BLOCK_K), tl.float32)
        overlap = tl.zeros((BLOCK_K,), tl.float32)
        for step in tl.range(0, V, BLOCK_V):
            v_inside = (step + v < V)[None, :]
            mask, values, before = inside[:, None] & v_inside, of_head * V + step, place * (K * V) + step
            above = tl.load(d_out + values + of_value, mask, other=0.0).to(operand)
            d_update = tl.load(d_updates + values + of_value, mask, other=0.0)
            state = tl.load(states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            by_query = tl.dot(above, tl.trans(state), by_query, input_precision=PRECISION)
            d_reads = tl.dot(d_update, tl.trans(state), d_reads, input_precision=PRECISION)
            given = tl.load(value + values + of_value, mask, other=0.0).to(operand)
            update = tl.load(updates + values + of_value, mask, other=0.0)
            d_state = tl.load(d_states + before + of_state, has_state[:, None] & v_inside, other=0.0)
            by_end = tl.dot(given, tl.trans(d_state), by_end, input_precision=PRECISION)
            d_writes = tl.dot(update, tl.trans(d_state), d_writes, input_precision=PRECISION)
            overlap += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        reads = tl.load(read + of_head * K + of_read, key_mask, other=0.0).to(tl.float32)
        writes = tl.load(write + of_head * K + of_read, key_mask, other=0.0).to(tl.float32)
        of_chunk = place * (SIZE * K)
        # Rows behind the tokens, too: with other sums than those of the anchors they would overflow.
        sums = tl.load(gamma + of_chunk + of_token, (row >= 0) & has_state[None, :], other=0.0)
        last = tl.load(gamma + of_chunk + (SIZE - 1) * K + k, has_state, other=0.0)
        before_sums = sums_before(gamma + of_chunk, i, k, has_state, K)
        end = tl.exp2(last[None, :] - sums)
        by_query *= SCALE * tl.exp2(sums)
        by_end *= end
        d_writes *= end
        d_reads *= tl.exp2(before_sums)
        at_end = keys * by_end + writes * d_writes
        of_last = tl.sum(at_end, 0) + tl.exp2(last) * overlap
        d_reading = reads * d_reads
        d_sums = queries * by_query + d_reading - at_end
        d_queries += by_query
        d_keys += by_end
        of_square = place * (SIZE * SIZE) + of_pair
        blocks = block_level(gamma + of_chunk, k, has_state, K, BLOCK_K, RANGE)
        y = tl.load(query_key + of_square)
        found, others = gradients_of_pairs(
            y, queries, keys, sums, sums, gamma + of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
        )
        d_queries += found
        d_keys += others
        d_sums += queries * found - keys * others
        y = tl.load(query_write + of_square)
        found, others = gradients_of_pairs(
            y, queries, writes, sums, sums, gamma + of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
        )
        d_queries += found
        d_writes += others
        d_sums += queries * found - writes * others
        y = tl.load(read_key + of_square)
        found, others = gradients_of_pairs(
            y, reads, keys, before_sums, sums, gamma + of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
        )
        d_reads += found
        d_keys += others
        d_sums += reads * found - keys * others
        d_reading += reads * found
        y = tl.load(read_write + of_square)
        found, others = gradients_of_pairs(
            y, reads, writes, before_sums, sums, gamma + of_chunk, i, k, has_state, K, blocks, RANGE, operand, PRECISION
        )
        d_reads += found
        d_writes += others
        d_sums += reads * found - writes * others
        d_reading += reads * found
        same = row == column
        own_key = tl.sum(tl.load(query_key + of_square, same, other=0.0).to(tl.float32), 1)[:, None]
        own_write = tl.sum(tl.load(query_write + of_square, same, other=0.0).to(tl.float32), 1)[:, None]
        d_queries += own_key * keys + own_write * writes
        d_keys += own_key * queries
        d_writes += own_write * queries
        at = of_head * K + of_read
        tl.store(d_read + at, d_reads.to(d_read.dtype.element_ty), target)
        tl.store(d_write + at, d_writes.to(d_write.dtype.element_ty), target)
        # Each decay is in γ_C.
        found = tl.cumsum(d_sums, 0, reverse=True) + of_last[None, :] - d_reading
        tl.store(d_decay + at, tl.where(inside[:, None], found, 0.0), target)
    tl.store(d_query + keys_begin + of_key, d_queries.to(d_query.dtype.element_ty), target)
    tl.store(d_key + keys_begin + of_key, d_keys.to(d_key.dtype.element_ty), target)
