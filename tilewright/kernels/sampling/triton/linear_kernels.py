# mypy: disable-error-code="assignment"
"""The best tokens of tiles of logits that are never in memory, in Triton; ``kernels.best_of_rows`` follows.

x, weight, bias and logits are as in ``linear_logits``; key and temperature are by row, results [rows, GROUPS] by group
of GROUP tokens, as in ``kernels``.
"""

import triton
import triton.language as tl

from tilewright.kernels.sampling.triton.groups import (
    GROUP,
    MEANINGS,  # noqa: F401 - the interpreter looks for it in the module of a kernel
    best_of_groups,
    group_masses,
    gumbel,
    slope_of,
    words_of,
)
from tilewright.kernels.triton.linear_logits import decode_tile, linear_logits


@triton.jit
def best_of_tiles(
    x, weight, bias, key, temperature, rows, tiles, top, score, token, logit, mass,
    D: tl.constexpr, VOCAB: tl.constexpr, D_STRIDE: tl.constexpr, VOCAB_STRIDE: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Finds the best token of each group of a tile of rows and tokens, and its mass."""
    row_tile, column = decode_tile(tl.program_id(0), tiles, VOCAB, BLOCK_V, TOGETHER)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = column * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = linear_logits(
        x, weight, bias, row, tokens, rows, D, VOCAB, D_STRIDE, VOCAB_STRIDE, BIAS, CAP, BLOCK_ROWS, BLOCK_V, BLOCK_K,
        PRECISION,
    )  # fmt: skip
    if VOCAB % BLOCK_V != 0:
        logits = tl.where((tokens < VOCAB)[None, :], logits, float("-inf"))
    logits = tl.where(logits != logits, float("-inf"), logits)
    # A row of this is a group of a row of logits.
    across: tl.constexpr = BLOCK_V // GROUP
    logits = tl.reshape(logits, (BLOCK_ROWS * across, GROUP))
    line = tl.arange(0, BLOCK_ROWS * across)
    row, group = row_tile * BLOCK_ROWS + line // across, column * across + line % across
    inside = (row < rows)[:, None] & (group < GROUPS)[:, None]
    safe = tl.minimum(row, rows - 1)
    slope, is_greedy = slope_of(temperature, safe, HAS_TEMPERATURE)
    slope, is_greedy = slope[:, None], is_greedy[:, None]
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pair = group.to(tl.uint32)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :].to(tl.uint32)
    left, right = words_of(pair, tl.load(key + 2 * safe)[:, None], tl.load(key + 2 * safe + 1)[:, None])
    noise = gumbel(tl.interleave(left, right))
    largest, best, drawn, its_logit = best_of_groups(logits, tokens, noise, slope, is_greedy)
    at = row.to(tl.int64)[:, None] * GROUPS + group[:, None]
    tl.store(top + at, largest, mask=inside)
    tl.store(score + at, best, mask=inside)
    tl.store(token + at, drawn, mask=inside)
    tl.store(logit + at, its_logit, mask=inside)
    tl.store(mass + at, group_masses(logits, largest, slope), mask=inside)
