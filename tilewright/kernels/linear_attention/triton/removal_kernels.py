# mypy: disable-error-code="assignment"
"""The chunk form of linear attention with a removal in Triton, over chunks of 64 tokens.

A token makes Diag(e^g) S + b (aᵀ S) + k vᵀ of S, with decays of channels. γ, states, ``from_query``, ``to_end`` and
A(x, y) are those of ``channel_kernels``; A⁻ is A with γ⁻, the sum up to the token before, in place of γ of what reads,
since a reads a state before it decays.

  Aγ       ``from_read`` = a 2^γ⁻, and Bε, ``write_to_end`` = b 2^(γ_C - γ), both [chunks, HV, 64, K]
  P(q, k)  scale · (A(q, k) + Diag(q · k)), ``key_pairs`` [chunks, HV, 64, 64]; P(q, b) are ``write_pairs``
  A⁻(a, k) ``read_pairs`` of the same shape
  T        ``inverse`` = (I - A⁻(a, b))⁻¹, float32; before that A⁻(a, b), ``negative``, is in its place
  Y        T (Aγ S + A⁻(a, k) V), ``updates`` [rows, HV, V]: what a reads of the states before each token
  O        Qγ S + P(q, k) V + P(q, b) Y, and behind the chunk S is Diag(2^γ_C) S + Kεᵀ V + Bεᵀ Y
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import finite
from tilewright.kernels.linear_attention.triton.channel_kernels import (
    LEVELS,
    anchored,
    block_anchors,
    block_level,
    is_parted,
    on_grid,
    power,
    sums_before,
)
from tilewright.kernels.linear_attention.triton.forward_kernels import applied, solved_updates

SIZE = tl.constexpr(64)


@triton.jit
def removal_scores(
    query, key, read, write, gamma, chunks, from_query, from_read, to_end, write_to_end, key_pairs, write_pairs,
    read_pairs, negative, levels,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, SCALE: tl.constexpr, GRID: tl.constexpr, RANGE: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Computes what tokens of a chunk are to the states, and tokens of a block to each other.

    levels   log2 of the tokens of the chunk's blocks, int32
    """
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    place = chunk.to(tl.int64) * HV + head
    if tokens > 0:
        i, k = tl.arange(0, SIZE), tl.arange(0, WIDTH)
        row, column = i[:, None], i[None, :]
        inside = i < tokens
        key_head: tl.constexpr = HV // H
        begin, of_head, of_chunk = (first * H + head // key_head) * K, (first * HV + head) * K, place * (SIZE * K)
        operand = key_pairs.dtype.element_ty
        own_key = tl.zeros((SIZE,), tl.float32)
        own_write = tl.zeros((SIZE,), tl.float32)
        # Apart from the other loop as in channel_scores.
        for step in tl.range(0, K, WIDTH):
            k_inside, block = step + k < K, of_chunk + step
            mask, written = inside[:, None] & k_inside[None, :], (row >= 0) & k_inside[None, :]
            of_key, of_read = (i * (H * K))[:, None] + k[None, :], (i * (HV * K))[:, None] + k[None, :]
            of_token = (i * K)[:, None] + k[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            reads = tl.load(read + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
            writes = tl.load(write + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
            sums = tl.load(gamma + block + of_token, written, other=0.0)
            last = tl.load(gamma + block + (SIZE - 1) * K + k, k_inside, other=0.0)
            before = sums_before(gamma + block, i, k, k_inside, K)
            own_key += tl.sum(queries * keys, 1)
            own_write += tl.sum(queries * writes, 1)
            end = tl.exp2(last[None, :] - sums)
            tl.store(from_query + block + of_token, (SCALE * queries * tl.exp2(sums)).to(operand), written)
            tl.store(from_read + block + of_token, (reads * tl.exp2(before)).to(operand), written)
            tl.store(to_end + block + of_token, (keys * end).to(operand), written)
            tl.store(write_to_end + block + of_token, (writes * end).to(operand), written)
        all_k, k = tl.arange(0, CHANNELS), tl.arange(0, BLOCK_K)
        level = block_level(gamma + of_chunk, all_k, all_k < K, K, CHANNELS, RANGE)
        tl.store(levels + place, level)
        of_key, of_read = (i * (H * K))[:, None] + k[None, :], (i * (HV * K))[:, None] + k[None, :]
        of_token = (i * K)[:, None] + k[None, :]
        by_key = tl.zeros((SIZE, SIZE), tl.float32)
        by_write = tl.zeros((SIZE, SIZE), tl.float32)
        read_key = tl.zeros((SIZE, SIZE), tl.float32)
        read_write = tl.zeros((SIZE, SIZE), tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            k_inside, block = step + k < K, of_chunk + step
            mask = inside[:, None] & k_inside[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            reads = tl.load(read + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
            writes = tl.load(write + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
            sums = on_grid(tl.load(gamma + block + of_token, (row >= 0) & k_inside[None, :], other=0.0), GRID)
            before = on_grid(sums_before(gamma + block, i, k, k_inside, K), GRID)
            anchors = block_anchors(gamma + block, i, k, k_inside, K, level, RANGE)
            # As in channel_scores, for the layouts.
            late_query = queries * power(tl.where(inside[:, None], sums - anchors, 0.0))
            late_read = reads * power(tl.where(inside[:, None], before - anchors, 0.0))
            early = power(anchors - sums)
            early_key, early_write = tl.trans((keys * early).to(operand)), tl.trans(writes * early)
            late = late_query.to(operand)
            by_key = tl.dot(late, early_key, by_key, input_precision=PRECISION)
            by_write = tl.dot(late, early_write.to(operand), by_write, input_precision=PRECISION)
            read_key = tl.dot(late_read.to(operand), early_key, read_key, input_precision=PRECISION)
            read_write = tl.dot(late_read, early_write, read_write, input_precision=INVERSE)
        together, same = (row >> level == column >> level) & (row > column), row == column
        of_pair = place * (SIZE * SIZE) + row * SIZE + column
        by_key = tl.where(together, by_key, tl.where(same, own_key[:, None], 0.0))
        by_write = tl.where(together, by_write, tl.where(same, own_write[:, None], 0.0))
        tl.store(key_pairs + of_pair, (SCALE * by_key).to(operand))
        tl.store(write_pairs + of_pair, (SCALE * by_write).to(operand))
        tl.store(read_pairs + of_pair, tl.where(together, read_key, 0.0).to(operand))
        tl.store(negative + of_pair, tl.where(together, read_write, 0.0))
    else:
        tl.store(levels + place, LEVELS)


@triton.jit
def removal_scores_of_halves(
    query, key, read, write, gamma, chunks, levels, key_pairs, write_pairs, read_pairs, negative,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SCALE: tl.constexpr,
    GRID: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Computes what tokens of a chunk are to those of other blocks, in the last four arrays."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    place = chunk.to(tl.int64) * HV + head
    first_level = tl.load(levels + place)
    if first_level < LEVELS:
        first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
        i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
        row, column = i[:, None], i[None, :]
        key_head: tl.constexpr = HV // H
        begin, of_key = (first * H + head // key_head) * K, (i * (H * K))[:, None] + k[None, :]
        of_head, of_read = (first * HV + head) * K, (i * (HV * K))[:, None] + k[None, :]
        of_chunk, of_token = place * (SIZE * K), (i * K)[:, None] + k[None, :]
        of_pair = place * (SIZE * SIZE) + row * SIZE + column
        operand = key_pairs.dtype.element_ty
        for level in tl.range(first_level, LEVELS):
            by_key = tl.zeros((SIZE, SIZE), tl.float32)
            by_write = tl.zeros((SIZE, SIZE), tl.float32)
            read_key = tl.zeros((SIZE, SIZE), tl.float32)
            read_write = tl.zeros((SIZE, SIZE), tl.float32)
            for step in tl.range(0, K, BLOCK_K):
                k_inside = step + k < K
                mask, block = (i < tokens)[:, None] & k_inside[None, :], of_chunk + step
                queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
                keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
                reads = tl.load(read + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
                writes = tl.load(write + (of_head + step) + of_read, mask, other=0.0).to(tl.float32)
                sums = tl.load(gamma + block + of_token, (row >= 0) & k_inside[None, :], other=0.0)
                before = on_grid(sums_before(gamma + block, i, k, k_inside, K), GRID)
                sums = on_grid(sums, GRID)
                decays = anchored(sums, sums, gamma + block, i, k, k_inside, K, 1 << level)
                late_read = reads * anchored(before, sums, gamma + block, i, k, k_inside, K, 1 << level)
                early_key, early_write = tl.trans((keys * decays).to(operand)), tl.trans(writes * decays)
                late = (queries * decays).to(operand)
                by_key = tl.dot(late, early_key, by_key, input_precision=PRECISION)
                by_write = tl.dot(late, early_write.to(operand), by_write, input_precision=PRECISION)
                read_key = tl.dot(late_read.to(operand), early_key, read_key, input_precision=PRECISION)
                read_write = tl.dot(late_read, early_write, read_write, input_precision=INVERSE)
            parted = is_parted(row, column, 1 << level) & (row > column)
            tl.store(key_pairs + of_pair, (SCALE * by_key).to(operand), parted)
            tl.store(write_pairs + of_pair, (SCALE * by_write).to(operand), parted)
            tl.store(read_pairs + of_pair, read_key.to(operand), parted)
            tl.store(negative + of_pair, read_write, parted)


@triton.jit
def removal_states(
    value, from_read, to_end, write_to_end, read_pairs, inverse, gamma, initial, chunks, sequences,
    states, updates, final,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes through the chunks of a sequence: writes S before each, Y of each, and S behind the last to ``final``."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    of_token, token_inside = (i * K)[:, None] + k[None, :], (i[:, None] >= 0) & (k < K)[None, :]
    of_value, of_pair = (i * (HV * V))[:, None] + v[None, :], i[:, None] * SIZE + i[None, :]
    operand = states.dtype.element_ty
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if INITIAL:
        state = tl.load(initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state_inside, other=0.0)
    for number in tl.range(0, count):
        chunk = begin + number
        place = chunk.to(tl.int64) * HV + head
        narrow = state.to(operand)
        tl.store(states + place * (K * V) + of_state, narrow, state_inside)
        first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
        value_inside = (i < tokens)[:, None] & (v < V)[None, :]
        values = tl.load(value + (first * HV + head) * V + of_value, value_inside, other=0.0).to(operand)
        reads = tl.load(from_read + place * (SIZE * K) + of_token, token_inside, other=0.0)
        pairs = tl.load(read_pairs + place * (SIZE * SIZE) + of_pair)
        solve = tl.load(inverse + place * (SIZE * SIZE) + of_pair)
        seen = tl.dot(reads, narrow, input_precision=PRECISION)
        seen = tl.dot(pairs, finite(values), seen, input_precision=PRECISION)
        update = solved_updates(solve, seen, operand, PRECISION).to(operand)
        tl.store(updates + (first * HV + head) * V + of_value, update, value_inside)
        ends = tl.load(to_end + place * (SIZE * K) + of_token, token_inside, other=0.0)
        write_ends = tl.load(write_to_end + place * (SIZE * K) + of_token, token_inside, other=0.0)
        last = tl.load(gamma + place * (SIZE * K) + (SIZE - 1) * K + k, k < K, other=0.0)
        state *= tl.exp2(last)[:, None]
        state = tl.dot(tl.trans(ends), values, state, input_precision=PRECISION)
        state = tl.dot(tl.trans(write_ends), update, state, input_precision=PRECISION)
    if FINAL:
        tl.store(final + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)


@triton.jit
def removal_outputs(
    value, from_query, key_pairs, write_pairs, updates, states, chunks, out,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes O of a chunk, and zeros in the rows of padding."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    chunk = tl.program_id(0) // (v_blocks * HV)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    place = chunk.to(tl.int64) * HV + head
    begin, of_value = (first * HV + head) * V, (i * (HV * V))[:, None] + v[None, :]
    of_state, of_pair = k[:, None] * V + v[None, :], i[:, None] * SIZE + i[None, :]
    result = tl.zeros((SIZE, BLOCK_V), tl.float32)
    if tokens > 0:
        operand = states.dtype.element_ty
        of_token = (i * K)[:, None] + k[None, :]
        for step in tl.range(0, K, BLOCK_K):
            k_inside = step + k < K
            mask = (i[:, None] >= 0) & k_inside[None, :]
            queries = tl.load(from_query + (place * (SIZE * K) + step) + of_token, mask, other=0.0)
            before = states + (place * (K * V) + step * V)
            state = tl.load(before + of_state, k_inside[:, None] & (v < V)[None, :], other=0.0)
            result = tl.dot(queries, state, result, input_precision=PRECISION)
        value_inside = (i < tokens)[:, None] & (v < V)[None, :]
        values = tl.load(value + begin + of_value, value_inside, other=0.0).to(operand)
        pairs = tl.load(key_pairs + place * (SIZE * SIZE) + of_pair)
        result = applied(pairs, values, result, PRECISION)
        update = tl.load(updates + begin + of_value, value_inside, other=0.0)
        pairs = tl.load(write_pairs + place * (SIZE * SIZE) + of_pair)
        result = applied(pairs, update, result, PRECISION)
    tl.store(out + begin + of_value, result.to(out.dtype.element_ty), (i < rows)[:, None] & (v < V)[None, :])
