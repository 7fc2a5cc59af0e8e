# mypy: disable-error-code="assignment"
"""The gradients of states in Triton, chunk by chunk, with the names of ``gradient_kernels``."""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.triton.forward_kernels import rows_of_chunks, solved

SIZE = tl.constexpr(64)


@triton.jit
def state_gradients(
    query, key, d_out, beta, inverse, gamma, d_final, chunks, sequences, d_updates, d_states, d_initial,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    MAP: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes back through the chunks of a sequence: writes D behind each, and d_updates over Pᵀ dO.

    With MAP only D before the first one is written.
    """
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
    row, tokens = rows_of_chunks(chunks, begin, count)
    for back in tl.range(0, count):
        number = count - 1 - back
        place = (begin + number).to(tl.int64) * HV + head
        narrow = state.to(operand)
        if not MAP:
            tl.store(d_states + place * (K * V) + of_state, narrow, state_inside)
        first, inside = row + number * SIZE, i + number * SIZE < tokens
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
        if not MAP:
            tl.store(d_updates + values + of_value, update.to(operand), value_inside)
    if INITIAL:
        tl.store(d_initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)
