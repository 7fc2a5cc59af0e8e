# mypy: disable-error-code="assignment"
"""The chunk form of linear attention with a decay per head in Triton: three passes over chunks of 64 tokens.

  γ        ``gamma``, [chunks, HV, 64]: sums of log2 of the decays of a chunk up to each token, in float32; behind the
           last token that of the last one, γ_C
  Γ_ij     2^(γ_i - γ_j) for i >= j; the exponent is masked, so that nothing overflows above the diagonal
  T0       ``inverse`` of the chunk, [chunks, HV, 64, 64]; the gate comes in by T = Γ ⊙ T0
  S        the state before a chunk, [K, V]; ``states`` are those of all chunks, [chunks, HV, K, V]
  R, U     R = β (V - 2^γ K S) and U = T R, ``updates`` [rows, HV, V]; without a delta rule U = V
  O        scale · (2^γ Q S + (Γ ⊙ Q Kᵀ) U), and behind the chunk S is 2^γ_C S + Kᵀ (2^(γ_C - γ) U)

Tokens are rows of [batch · length]; ``chunks`` and ``sequences`` are those of ``ChunkTable``. Operands of matmuls have
the dtype of the states, bfloat16 or float32; accumulators, S among them, are float32. Every sum has one order.

Grids have one axis, of (chunk or sequence, head, block of V), the last fastest: neighbours share what they load.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import broken_from, finite, first_broken, sums_of_decays

SIZE = tl.constexpr(64)


@triton.jit
def chunk_gates(log_decay, chunks, gamma, HV: tl.constexpr, BLOCK_H: tl.constexpr, STRIDE: tl.constexpr):
    """Sums the decays of a chunk; log_decay is [rows, HV] and STRIDE HV, or [HV] and 0."""
    blocks: tl.constexpr = (HV + BLOCK_H - 1) // BLOCK_H
    chunk = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    i = tl.arange(0, SIZE)
    given = log_decay + first * STRIDE + (i * STRIDE)[:, None] + head[None, :]
    total = sums_of_decays(tl.load(given, mask=(i < tokens)[:, None] & (head < HV)[None, :], other=0.0))
    target = gamma + chunk.to(tl.int64) * (HV * SIZE) + (head * SIZE)[None, :] + i[:, None]
    tl.store(target, total, mask=(head < HV)[None, :] & (i[:, None] >= 0))


@triton.jit
def solved(solve, rest, operand: tl.constexpr, PRECISION: tl.constexpr):
    """``solve @ rest``, where rounding ``solve`` once to 16 bits would cost what keys that are alike leave of R.

    With equal keys and β = 2 the error of U is 8 times as large without the second part.
    """
    high, narrow = solve.to(operand), rest.to(operand)
    found = tl.dot(high, narrow, input_precision=PRECISION)
    if operand != tl.float32:
        found = tl.dot((solve - high.to(tl.float32)).to(operand), narrow, found, input_precision=PRECISION)
    return found


@triton.jit
def solved_updates(solve, rest, operand: tl.constexpr, PRECISION: tl.constexpr):
    """The same of values: one that is NaN or infinite is NaN in its own row, and ``applied`` knows what it reaches."""
    return solved(solve, finite(rest), operand, PRECISION) + rest * 0.0


@triton.jit
def applied(pairs, update, result, PRECISION: tl.constexpr):
    """``result + pairs @ update``, with ``pairs`` 0 above the diagonal.

    A number of ``update`` that is NaN or infinite makes its own row and all later ones NaN in its column, none before.
    """
    broken = first_broken(update, 0)[None, :]
    return broken_from(tl.dot(pairs, finite(update), result, input_precision=PRECISION), broken)


@triton.jit
def rows_of_chunks(chunks, begin, count):
    """The first row of consecutive chunks of a sequence, and the number of their tokens: all but the last are full.

    A loop over chunks that has no load of where they lie is pipelined: its other loads are issued chunks ahead.
    """
    first = tl.load(chunks + 3 * begin, mask=count > 0, other=0).to(tl.int64)
    return first, (count - 1) * SIZE + tl.load(chunks + 3 * (begin + count - 1) + 2, mask=count > 0, other=0)


@triton.jit
def chunk_states(
    key, value, beta, inverse, gamma, initial, chunks, sequences, states, updates, final,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes through the chunks of a sequence: writes S before each, U of each, and S behind the last to ``final``.

    With MAP only ``final`` is written, which is what the chunks make of any S, for ``segment_states``: behind the V
    channels that they make of S = 0 come, with a delta rule, the K ones that they make of S = I without values.
    """
    columns: tl.constexpr = V + K if MAP and DELTA else V
    v_blocks: tl.constexpr = (columns + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    key_head: tl.constexpr = HV // H
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    of_key, of_value = (i * (H * K))[:, None] + k[None, :], (i * (HV * V))[:, None] + v[None, :]
    causal = i[:, None] >= i[None, :]
    operand = states.dtype.element_ty
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if MAP and DELTA:
        state = tl.where((k[:, None] == v[None, :] - V) & (v < columns)[None, :], 1.0, 0.0)
    if INITIAL:
        state = tl.load(initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state_inside, other=0.0)
    row, tokens = rows_of_chunks(chunks, begin, count)
    for number in tl.range(0, count):
        place = (begin + number).to(tl.int64) * HV + head
        narrow = state.to(operand)
        if not MAP:
            tl.store(states + place * (K * V) + of_state, narrow, state_inside)
        first, inside = row + number * SIZE, i + number * SIZE < tokens
        key_inside, value_inside = inside[:, None] & (k < K)[None, :], inside[:, None] & (v < V)[None, :]
        keys = tl.load(key + (first * H + head // key_head) * K + of_key, key_inside, other=0.0).to(operand)
        update = tl.load(value + (first * HV + head) * V + of_value, value_inside, other=0.0).to(tl.float32)
        if GATE:
            sums, last = tl.load(gamma + place * SIZE + i), tl.load(gamma + place * SIZE + (SIZE - 1))
        if DELTA:
            expected = tl.dot(keys, narrow, input_precision=PRECISION)
            solve = tl.load(inverse + place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]).to(tl.float32)
            if GATE:
                expected *= tl.exp2(sums)[:, None]
                solve *= tl.exp2(tl.where(causal, sums[:, None] - sums[None, :], 0.0))
            strength = tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
            update = solved_updates(solve, strength[:, None] * (update - expected), operand, PRECISION)
            if not MAP:
                tl.store(updates + (first * HV + head) * V + of_value, update.to(operand), value_inside)
        if GATE:
            update *= tl.exp2(last - sums)[:, None]
            state *= tl.exp2(last)
        state = tl.dot(tl.trans(keys), update.to(operand), state, input_precision=PRECISION)
    if FINAL:
        target = final + (sequence * HV + head).to(tl.int64) * (K * columns) + k[:, None] * columns + v[None, :]
        tl.store(target, state, (k < K)[:, None] & (v < columns)[None, :])


@triton.jit
def chunk_outputs(
    query, key, updates, states, gamma, chunks, out,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, GATE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes O of a chunk, and zeros in the rows of padding."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    chunk = tl.program_id(0) // (v_blocks * HV)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    place = chunk.to(tl.int64) * HV + head
    values, of_value = (first * HV + head) * V, (i * (HV * V))[:, None] + v[None, :]
    result = tl.zeros((SIZE, BLOCK_V), tl.float32)
    if tokens > 0:
        operand = states.dtype.element_ty
        inside = i < tokens
        key_head: tl.constexpr = HV // H
        begin, of_key = (first * H + head // key_head) * K, (i * (H * K))[:, None] + k[None, :]
        of_state = k[:, None] * V + v[None, :]
        scores = tl.zeros((SIZE, SIZE), tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            mask = inside[:, None] & (step + k < K)[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(operand)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(operand)
            before = states + (place * (K * V) + step * V)
            state = tl.load(before + of_state, (step + k < K)[:, None] & (v < V)[None, :], other=0.0)
            scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
            result = tl.dot(queries, state, result, input_precision=PRECISION)
        causal = i[:, None] >= i[None, :]
        if GATE:
            sums = tl.load(gamma + place * SIZE + i)
            result *= tl.exp2(sums)[:, None]
            scores *= tl.exp2(tl.where(causal, sums[:, None] - sums[None, :], 0.0))
        scores = tl.where(causal, scores, 0.0)
        update = tl.load(updates + values + of_value, inside[:, None] & (v < V)[None, :], other=0.0).to(operand)
        result = SCALE * applied(scores.to(operand), update, result, PRECISION)
    tl.store(out + values + of_value, result.to(out.dtype.element_ty), (i < rows)[:, None] & (v < V)[None, :])
