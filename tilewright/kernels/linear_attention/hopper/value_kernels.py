# mypy: disable-error-code="assignment"
"""The gradients of values, strengths and decays behind ``tokens``, in Triton, one chunk of one head per program."""

import triton
import triton.language as tl

SIZE = tl.constexpr(64)


@triton.jit
def value_gradients(
    value, beta, d_updates, gates, sums, chunks, d_value, d_beta, d_decay,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Writes β dR, the sums of dR ⊙ V with what keys add to them, and the sums of dγ to the end of the chunk.

    gates, sums   [chunks, HV, 8, 64] and [chunks, HV, 5, 64], see `plan.PassOperands` and ``tokens``
    """
    head, chunk = tl.program_id(0) % HV, tl.program_id(0) // HV
    first, rows = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    tokens = tl.load(chunks + 3 * chunk + 2)
    i, v = tl.arange(0, SIZE), tl.arange(0, BLOCK_V)
    inside, written = i < tokens, i < rows
    place, of_head = chunk.to(tl.int64) * HV + head, first * HV + head
    of_token = of_head + i * HV
    strength = tl.load(beta + of_token, inside, other=0.0).to(tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for step in tl.static_range(0, V, BLOCK_V):
        values = of_head * V + step + (i * (HV * V))[:, None] + v[None, :]
        mask = inside[:, None] & (step + v < V)[None, :]
        above = tl.load(d_updates + values, mask, other=0.0).to(tl.float32)
        given = tl.load(value + values, mask, other=0.0).to(tl.float32)
        total += tl.sum(above * given, 1)
        target = (strength[:, None] * above).to(d_value.dtype.element_ty)
        tl.store(d_value + values, target, written[:, None] & (step + v < V)[None, :])
    row = sums + place * (5 * SIZE) + i
    by_key = tl.load(row + SIZE, inside, other=0.0)
    tl.store(d_beta + of_token, total + by_key, written)
    if GATE:
        of_last = tl.load(row + 2 * SIZE, inside, other=0.0)
        d_gamma = tl.load(row, inside, other=0.0) - tl.load(row + 3 * SIZE, inside, other=0.0)
        d_gamma += strength * by_key + of_last
        # By channel of V, not by token; without a token it is not read.
        overlap = tl.sum(tl.load(row + 4 * SIZE, (i >= 0) & (tokens > 0), other=0.0), 0)
        last = tl.load(gates + place * (8 * SIZE) + 5 * SIZE, tokens > 0, other=0.0)
        # 2^(γ_C - γ) has the decays behind a token, and 2^γ_C those of all.
        d_gamma = tl.cumsum(d_gamma, 0, reverse=True) + tl.cumsum(of_last, 0) - of_last
        tl.store(d_decay + of_token, tl.where(inside, d_gamma + last * overlap, 0.0), written)
