# mypy: disable-error-code="assignment"
"""Operands of `forward` besides Q, K and V, in Triton, one chunk of one key head per program.

r      1 / √(sum of squares + eps) of a token's key or query; 1 without norms
γ      sums of log2 of the decays of a chunk up to each token; behind the last token that of the last one, γ_C
T0     ``(I + tril(β_i r_i k_i · r_j k_j, -1))⁻¹``, see ``inverse_kernels``
T      ``2^(γ_i - γ_j) T0`` below the diagonal, 0 elsewhere
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import sums_of_decays
from tilewright.kernels.linear_attention.inverse_kernels import (
    SIZE,
    high_part,
    inverse_blocks,
    store_diagonal,
    store_lower_left,
)


@triton.jit
def norm_factors(rows, mask, K: tl.constexpr, EPS: tl.constexpr):
    """r of tokens, whose rows begin at pointers to 64 channels each."""
    total = tl.zeros((SIZE,), tl.float32)
    for step in tl.range(0, K, SIZE):
        x = tl.load(rows + step, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
    return tl.rsqrt(total + EPS)


@triton.jit
def store_solve(target, diagonal, lower_left, gamma):
    """Stores T in two parts, from T0 in the form of `inverse_blocks`."""
    HALF: tl.constexpr = SIZE // 2
    gamma = tl.reshape(gamma, (2, HALF))
    i = tl.arange(0, HALF)
    below = i[None, :, None] > i[None, None, :]
    decays = tl.exp2(tl.where(below, gamma[:, :, None] - gamma[:, None, :], 0.0))
    exact = tl.where(below, diagonal * decays, 0.0)
    high = high_part(exact)
    store_diagonal(target, high)
    store_diagonal(target + SIZE * SIZE, exact - high)
    of_columns, of_rows = tl.split(tl.trans(gamma))
    exact = lower_left * tl.exp2(of_rows[None, :, None] - of_columns[None, None, :])
    high = high_part(exact)
    store_lower_left(target, high)
    store_lower_left(target + SIZE * SIZE, exact - high)


@triton.jit
def prepare_chunk(
    query, key, log_decay, beta, chunks, gates, solve,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, GATE: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Writes the gates of all value heads of a key head and, for a delta rule, T; of chunks that have a token.

    log_decay   [rows, HV] and STRIDE HV, or [HV] and 0
    chunks      as in ``ChunkTable``
    gates       [chunks, HV, 8, 64], see `plan.PassOperands`
    solve       [chunks, HV, 128, 64]: T rounded, and below it the rest
    """
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    if tokens > 0:
        i, k = tl.arange(0, SIZE), tl.arange(0, SIZE)
        inside = i < tokens
        rows = (first * H + head) * K + (i * (H * K))[:, None] + k[None, :]
        # Rows behind the last token may hold NaN.
        mask = inside[:, None] & (k >= 0)[None, :]
        of_key = tl.full((SIZE,), 1.0, tl.float32)
        of_query = tl.full((SIZE,), 1.0, tl.float32)
        if NORM:
            of_query = norm_factors(query + rows, mask, K, EPS)
        if NORM and not DELTA:
            of_key = norm_factors(key + rows, mask, K, EPS)
        if DELTA:
            products = tl.zeros((SIZE, SIZE), tl.float32)
            for step in tl.range(0, K, SIZE):
                keys = tl.load(key + rows + step, mask=mask, other=0.0)
                products = tl.dot(keys, tl.trans(keys), products)
            if NORM:
                of_key = tl.rsqrt(tl.sum(tl.where(i[:, None] == i[None, :], products, -0.0), 1) + EPS)
            negative = tl.where(i[:, None] > i[None, :], products * -of_key[:, None] * of_key[None, :], 0.0)
        of_query *= SCALE
        group: tl.constexpr = HV // H
        for member in tl.range(group):
            value_head = head * group + member
            place = chunk.to(tl.int64) * HV + value_head
            gamma = tl.zeros((SIZE,), tl.float32)
            if GATE:
                given = tl.load(log_decay + first * STRIDE + value_head + i * STRIDE, mask=inside, other=0.0)
                gamma = sums_of_decays(given)
            last = tl.sum(tl.where(i == SIZE - 1, gamma, 0.0), 0)
            power = tl.exp2(gamma)
            row = gates + place * (8 * SIZE) + i
            tl.store(row, gamma)
            tl.store(row + 2 * SIZE, of_key * power)
            tl.store(row + 3 * SIZE, of_key * tl.exp2(last - gamma))
            tl.store(row + 4 * SIZE, of_query * power)
            tl.store(row + 5 * SIZE, tl.exp2(last + i * 0.0))
            tl.store(row + 6 * SIZE, of_key)
            tl.store(row + 7 * SIZE, of_query)
            if DELTA:
                strength = tl.load(beta + first * HV + value_head + i * HV, mask=inside, other=0.0).to(tl.float32)
                tl.store(row + SIZE, strength)
                diagonal, lower_left = inverse_blocks(strength[:, None] * negative, NORM)
                target = solve + place * (2 * SIZE * SIZE)
                store_solve(target, diagonal, lower_left, gamma)


@triton.jit
def clear_padding(chunks, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes zeros to the rows of a chunk that belong to no sequence; out is [rows, WIDTH]."""
    chunk = tl.program_id(0)
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    column = tl.arange(0, BLOCK)
    for row in tl.range(tokens, rows):
        for begin in tl.range(0, WIDTH, BLOCK):
            target = out + (first + row) * WIDTH + begin + column
            tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=begin + column < WIDTH)
