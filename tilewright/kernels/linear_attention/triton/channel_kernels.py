# mypy: disable-error-code="assignment"
"""The chunk form of linear attention with decays of the channels of keys in Triton, over chunks of 64 tokens.

  γ        ``gamma``, [chunks, HV, 64, K]: sums of log2 of the decays of a chunk up to each token, in float32; behind
           the last token that of the last one, γ_C
  A        A_ij(x, y) = Σ_c x_ic y_jc 2^(γ_ic - γ_jc) below the diagonal
  P        ``scores`` = scale · (A(q, k) + Diag(q · k)), [chunks, HV, 64, 64]; with a bonus u the diagonal has q · u k,
           and γ of what reads, here and in Qγ, is that of the token before
  T        ``inverse`` = (I + β A(k, k))⁻¹, float32: unlike that of decays of heads it has the decays inside; at first
           -β A(k, k), ``negative``, is in its place
  Qγ, Kγ   ``from_query`` = scale · Q 2^γ and ``from_key`` = K 2^γ, [chunks, HV, 64, K]: what reads the state before
  Kε       ``to_end`` = K 2^(γ_C - γ), of the same shape: what writes into the state behind
  S        the state before a chunk, [K, V]; ``states`` are those of all chunks, [chunks, HV, K, V]
  R, U     R = β (V - Kγ S) and U = T R, ``updates`` [rows, HV, V]; without a delta rule U = V
  O        Qγ S + P U, and behind the chunk S is Diag(2^γ_C) S + Kεᵀ U

2^(γ_i - γ_j) of a pair is no product of factors that are finite for each token. But 2^(γ_i - a) and 2^(a - γ_j) are

  in blocks    of 64, 32 or 16 tokens, the widest in which no channel decays to less than 2^-RANGE, if there are such:
               with a = ⌊γ before the block⌋ - RANGE / 2, both are within 2^±(RANGE / 2 + 1) for all its tokens
  in halves    of wider blocks, down to those of 2 tokens if there are none: with a = ⌊γ at the end of the earlier half⌋
               no exponent is above 1

So A is one product by pairs in blocks, and up to six by pairs of halves. Later tokens decide how a chunk is divided,
but no bit of earlier ones depends on it: a is a whole number that no later token has a part in, and γ of pairs is on a
grid so coarse that γ - a is exact. Then factors of two divisions differ by powers of two, as ``power`` has the same
digits for arguments that differ by a whole number, and all products of a query and a key, added up in one order, are
the same.

Operands and sums are as in ``forward_kernels``; grids have one axis, of (chunk or sequence, head, block of K or V).
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import sums_of_decays
from tilewright.kernels.linear_attention.triton.forward_kernels import applied, solved_updates

SIZE = tl.constexpr(64)
LEVELS = tl.constexpr(6)


@triton.jit
def channel_gates(log_decay, chunks, gamma, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums the decays of a chunk; log_decay is [rows, HV, K]."""
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks % HV
    chunk = tl.program_id(0) // (blocks * HV)
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    i, k = tl.arange(0, SIZE), block * BLOCK_K + tl.arange(0, BLOCK_K)
    given = log_decay + (first * HV + head) * K + (i * (HV * K))[:, None] + k[None, :]
    total = sums_of_decays(tl.load(given, (i < tokens)[:, None] & (k < K)[None, :], other=0.0))
    place = chunk.to(tl.int64) * HV + head
    tl.store(gamma + place * (SIZE * K) + (i * K)[:, None] + k[None, :], total, (i[:, None] >= 0) & (k < K)[None, :])


@triton.jit
def power(x):
    """2^x, with digits that only the fraction of x decides: exp2 of the GPU has others for x + 1. 0 below 2^-126."""
    # The sum has the nearest half, at ties the nearest whole number, in its last bits; without the last one, what is
    # left of x is from -0.25 to 0.75 whatever the whole number is, which is shifted into the bits of an exponent.
    sums = tl.where(x < -127.0, -127.0, x) + 6291456.0
    whole = sums.to(tl.int32, bitcast=True) & -2
    of_whole = ((whole << 22) + (127 << 23)).to(tl.float32, bitcast=True)
    return tl.exp2(x - (whole.to(tl.float32, bitcast=True) - 6291456.0)) * of_whole


@triton.jit
def is_later(i, HALF):
    """True for tokens in the later half of their block of 2 · HALF."""
    return i // HALF % 2 == 1


@triton.jit
def is_parted(i, j, HALF):
    """True for pairs in the two halves of one block of 2 · HALF tokens."""
    return (i // (2 * HALF) == j // (2 * HALF)) & (i // HALF != j // HALF)


@triton.jit
def anchored(reading, sums, gamma, i, k, k_inside, K: tl.constexpr, HALF):
    """The decays between each token and the end of the earlier half of its block of 2 · HALF.

    reading, sums   γ of tokens that read, which are later ones, and of those that have written
    """
    end = i // (2 * HALF) * (2 * HALF) + (HALF - 1)
    anchor = tl.load(gamma + (end * K)[:, None] + k[None, :], k_inside[None, :] & (i[:, None] >= 0), other=0.0)
    anchor = tl.floor(anchor)
    return power(tl.where(is_later(i, HALF)[:, None], reading - anchor, anchor - sums))


@triton.jit
def block_level(gamma, k, k_inside, K: tl.constexpr, CHANNELS: tl.constexpr, RANGE: tl.constexpr):
    """log2 of the tokens of the widest blocks in which no channel decays to less than 2^-RANGE: 6, 5, 4, or else 0."""
    block = tl.arange(0, SIZE // 16)[:, None]
    end = gamma + (block * 16 + 15) * K + k[None, :]
    before = tl.load(end - 16 * K, (block > 0) & k_inside[None, :], other=0.0)
    drop = before - tl.load(end, (block >= 0) & k_inside[None, :], other=0.0)
    # NaN is too much, too.
    drop = tl.where(drop <= RANGE, drop, 2.0 * RANGE)
    of_halves = tl.sum(tl.reshape(drop, (2, 2, CHANNELS)), 1)
    narrower = tl.where(tl.sum(drop, 0) > RANGE, 1, 0)
    narrower = tl.where(tl.max(of_halves, 0) > RANGE, 2, narrower)
    return LEVELS - tl.max(tl.where(tl.max(drop, 0) > RANGE, LEVELS, narrower), 0)


@triton.jit
def block_anchors(gamma, i, k, k_inside, K: tl.constexpr, level, RANGE: tl.constexpr):
    """The anchors of the blocks of 2^level tokens, RANGE / 2 below the sums before a block."""
    before = (i >> level << level) - 1
    sums = tl.load(gamma + (before * K)[:, None] + k[None, :], (before >= 0)[:, None] & k_inside[None, :], other=0.0)
    return tl.floor(sums) - RANGE // 2


@triton.jit
def pair_anchors(gamma, i, k, k_inside, K: tl.constexpr, level, whole, RANGE: tl.constexpr):
    """Anchors of blocks of 2 · 2^level tokens: those of ``block_anchors`` if ``whole``, else sums of earlier halves."""
    token = (i >> level + 1 << level + 1) - 1 + tl.where(whole, 0, 1 << level)
    sums = tl.load(gamma + (token * K)[:, None] + k[None, :], (token >= 0)[:, None] & k_inside[None, :], other=0.0)
    return sums - tl.where(whole, RANGE // 2, 0)


@triton.jit
def on_grid(sums, GRID: tl.constexpr):
    """Multiples of the last digit of GRID: less a whole number near by, they are exact."""
    return (sums - GRID) + GRID


@triton.jit
def sums_before(gamma, i, k, k_inside, K: tl.constexpr):
    """γ of the token before each, 0 for the first: with a bonus a token reads before it lets the state decay."""
    return tl.load(gamma + ((i - 1) * K)[:, None] + k[None, :], (i > 0)[:, None] & k_inside[None, :], other=0.0)


@triton.jit
def channel_scores(
    query, key, beta, bonus, gamma, chunks, from_query, from_key, to_end, scores, negative, levels,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, DELTA: tl.constexpr, BONUS: tl.constexpr, SCALE: tl.constexpr, GRID: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
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
        begin, of_chunk = (first * H + head // key_head) * K, place * (SIZE * K)
        operand = scores.dtype.element_ty
        own = tl.zeros((SIZE,), tl.float32)
        # First what is streamed through, with many loads at once: stores in the other loop are waited for by matmuls.
        for step in tl.range(0, K, WIDTH):
            k_inside, block = step + k < K, of_chunk + step
            mask, written = inside[:, None] & k_inside[None, :], (row >= 0) & k_inside[None, :]
            of_key, of_token = (i * (H * K))[:, None] + k[None, :], (i * K)[:, None] + k[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            sums = tl.load(gamma + block + of_token, written, other=0.0)
            last = tl.load(gamma + block + (SIZE - 1) * K + k, k_inside, other=0.0)
            reading, matching = sums, queries * keys
            if BONUS:
                reading = sums_before(gamma + block, i, k, k_inside, K)
                matching *= tl.load(bonus + head * K + step + k, k_inside, other=0.0).to(tl.float32)[None, :]
            own += tl.sum(matching, 1)
            start = tl.exp2(reading)
            tl.store(from_query + block + of_token, (SCALE * queries * start).to(operand), written)
            tl.store(to_end + block + of_token, (keys * tl.exp2(last[None, :] - sums)).to(operand), written)
            if DELTA:
                tl.store(from_key + block + of_token, (keys * start).to(operand), written)
        all_k, k = tl.arange(0, CHANNELS), tl.arange(0, BLOCK_K)
        level = block_level(gamma + of_chunk, all_k, all_k < K, K, CHANNELS, RANGE)
        tl.store(levels + place, level)
        of_key, of_token = (i * (H * K))[:, None] + k[None, :], (i * K)[:, None] + k[None, :]
        by_query = tl.zeros((SIZE, SIZE), tl.float32)
        by_key = tl.zeros((SIZE, SIZE), tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            k_inside, block = step + k < K, of_chunk + step
            mask = inside[:, None] & k_inside[None, :]
            queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
            sums = tl.load(gamma + block + of_token, (row >= 0) & k_inside[None, :], other=0.0)
            anchors = block_anchors(gamma + block, i, k, k_inside, K, level, RANGE)
            reading = sums
            if BONUS:
                reading = sums_before(gamma + block, i, k, k_inside, K)
            # Without a condition of rows Triton computes the first operands of both matmuls again, in their layouts.
            late = power(tl.where(inside[:, None], on_grid(reading, GRID) - anchors, 0.0))
            early = keys * power(anchors - on_grid(sums, GRID))
            transposed = tl.trans(early.to(operand))
            by_query = tl.dot((queries * late).to(operand), transposed, by_query, input_precision=PRECISION)
            if DELTA:
                by_key = tl.dot(keys * late, tl.trans(early), by_key, input_precision=INVERSE)
        together = (row >> level == column >> level) & (row > column)
        by_query = tl.where(together, by_query, tl.where(row == column, own[:, None], 0.0))
        of_pair = place * (SIZE * SIZE) + row * SIZE + column
        tl.store(scores + of_pair, (SCALE * by_query).to(operand))
        if DELTA:
            strength = tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
            tl.store(negative + of_pair, tl.where(together, -strength[:, None] * by_key, 0.0))
    else:
        tl.store(levels + place, LEVELS)


@triton.jit
def channel_scores_of_halves(
    query, key, beta, gamma, chunks, levels, scores, negative,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, DELTA: tl.constexpr,
    BONUS: tl.constexpr, SCALE: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Computes what tokens of a chunk are to those of other blocks, in ``scores`` and ``negative``."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    place = chunk.to(tl.int64) * HV + head
    first_level = tl.load(levels + place)
    if first_level < LEVELS:
        first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
        i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
        row, column = i[:, None], i[None, :]
        inside = i < tokens
        key_head: tl.constexpr = HV // H
        begin, of_key = (first * H + head // key_head) * K, (i * (H * K))[:, None] + k[None, :]
        of_chunk, of_token = place * (SIZE * K), (i * K)[:, None] + k[None, :]
        of_pair = place * (SIZE * SIZE) + row * SIZE + column
        operand = scores.dtype.element_ty
        for level in tl.range(first_level, LEVELS):
            by_query = tl.zeros((SIZE, SIZE), tl.float32)
            by_key = tl.zeros((SIZE, SIZE), tl.float32)
            for step in tl.range(0, K, BLOCK_K):
                k_inside = step + k < K
                mask, block = inside[:, None] & k_inside[None, :], of_chunk + step
                queries = tl.load(query + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
                keys = tl.load(key + (begin + step) + of_key, mask, other=0.0).to(tl.float32)
                sums = tl.load(gamma + block + of_token, (row >= 0) & k_inside[None, :], other=0.0)
                reading = sums
                if BONUS:
                    reading = sums_before(gamma + block, i, k, k_inside, K)
                reading, sums = on_grid(reading, GRID), on_grid(sums, GRID)
                decays = anchored(reading, sums, gamma + block, i, k, k_inside, K, 1 << level)
                late, early = (queries * decays).to(operand), keys * decays
                by_query = tl.dot(late, tl.trans(early.to(operand)), by_query, input_precision=PRECISION)
                if DELTA:
                    by_key = tl.dot(early, tl.trans(early), by_key, input_precision=INVERSE)
            parted = is_parted(row, column, 1 << level) & (row > column)
            tl.store(scores + of_pair, (SCALE * by_query).to(operand), parted)
            if DELTA:
                strength = tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
                tl.store(negative + of_pair, -strength[:, None] * by_key, parted)


@triton.jit
def channel_states(
    value, beta, from_key, to_end, inverse, gamma, initial, chunks, sequences, states, updates, final,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes through the chunks of a sequence: writes S before each, U of each, and S behind the last to ``final``."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    i, k, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    of_token, token_inside = (i * K)[:, None] + k[None, :], (i[:, None] >= 0) & (k < K)[None, :]
    of_value = (i * (HV * V))[:, None] + v[None, :]
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
        inside = i < tokens
        value_inside = inside[:, None] & (v < V)[None, :]
        update = tl.load(value + (first * HV + head) * V + of_value, value_inside, other=0.0).to(tl.float32)
        if DELTA:
            keys = tl.load(from_key + place * (SIZE * K) + of_token, token_inside, other=0.0)
            solve = tl.load(inverse + place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :])
            strength = tl.load(beta + first * HV + head + i * HV, inside, other=0.0).to(tl.float32)
            expected = tl.dot(keys, narrow, input_precision=PRECISION)
            update = solved_updates(solve, strength[:, None] * (update - expected), operand, PRECISION)
            tl.store(updates + (first * HV + head) * V + of_value, update.to(operand), value_inside)
        ends = tl.load(to_end + place * (SIZE * K) + of_token, token_inside, other=0.0)
        last = tl.load(gamma + place * (SIZE * K) + (SIZE - 1) * K + k, k < K, other=0.0)
        state *= tl.exp2(last)[:, None]
        state = tl.dot(tl.trans(ends), update.to(operand), state, input_precision=PRECISION)
    if FINAL:
        tl.store(final + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state, state_inside)


@triton.jit
def channel_outputs(
    from_query, scores, updates, states, chunks, out,
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
    values, of_value = (first * HV + head) * V, (i * (HV * V))[:, None] + v[None, :]
    of_state = k[:, None] * V + v[None, :]
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
        pairs = tl.load(scores + place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :])
        update = tl.load(updates + values + of_value, (i < tokens)[:, None] & (v < V)[None, :], other=0.0).to(operand)
        result = applied(pairs, update, result, PRECISION)
    tl.store(out + values + of_value, result.to(out.dtype.element_ty), (i < rows)[:, None] & (v < V)[None, :])
