# mypy: disable-error-code="assignment"
"""The rows of a mixture of experts in Triton: the order of choices, and what is computed of rows beside matmuls.

  choice          token · K + j: the j-th choice of a token
  experts         the expert of each choice; there are E, and others do not exist
  positions       the row of each choice; −1 if it is dropped
  source          the choice of each row; −1 in rows that hold none
  counts, before  for each block of choices the number of choices of each expert in it, and in all blocks before it
  starts, ends    the first row of each expert, and the row behind its last
  weights, bias   a number for each choice, and a row for each expert

Rows have D elements, those of a gated unit N. Offsets of rows are 64-bit: an array may have more than 2³¹ elements.
Sums are float32, and every result is written by one program, in one order.

Grids have one axis:
  count_choices, place_choices  a program for each block of choices; those of a batch's elements stand one after another
  sum_counts                    a program for each BLOCK_E experts of an element of the batch
  spread, combine               a program for each BLOCK_D columns of each BLOCK_TOKENS tokens
  dots                          a program for each BLOCK_CHOICES choices
  gate_gradients                a program for each BLOCK_ROWS rows
"""

import triton
import triton.language as tl

from tilewright.kernels.triton.activations import gated


@triton.jit
def count_choices(
    experts, choices, blocks, counts,
    E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Counts the choices of each expert in one block."""
    program = tl.program_id(0)
    batch, choice = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(experts + batch.to(tl.int64) * choices + choice, mask=choice < choices, other=-1)
    for first in tl.range(0, E, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        found = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + program.to(tl.int64) * E + expert, found, mask=expert < E)


@triton.jit
def sum_counts(
    counts, blocks, capacity, before, group_sizes,
    E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Adds up the counts of BLOCK_E experts over the blocks, and limits the sums over all to the capacity."""
    across: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    batch = tl.program_id(0) // across
    expert = tl.program_id(0) % across * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for first in tl.range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        at = (batch * blocks + block).to(tl.int64)[:, None] * E + expert[None, :]
        inside = (block < blocks)[:, None] & (expert < E)[None, :]
        found = tl.load(counts + at, mask=inside, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        total += tl.sum(found, 0)
    tl.store(group_sizes + batch * E + expert, tl.minimum(total, capacity), mask=expert < E)


@triton.jit
def place_choices(
    experts, before, starts, ends, choices, blocks, capacity, source, positions,
    E: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Finds the rows of the choices of one block."""
    program = tl.program_id(0)
    batch, choice = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    start_of_batch = batch.to(tl.int64) * choices
    there = choice < choices
    ids = tl.load(experts + start_of_batch + choice, mask=there, other=-1)
    exists = (ids >= 0) & (ids < E)
    rank = tl.load(before + program.to(tl.int64) * E + ids, mask=exists, other=0)
    # In parts: a tile of all pairs of a block would not fit into registers.
    for first in tl.static_range(0, BLOCK, PART):
        other = program % blocks * BLOCK + first + tl.arange(0, PART)
        other_ids = tl.load(experts + start_of_batch + other, mask=other < choices, other=-1)
        is_before = (other_ids[None, :] == ids[:, None]) & (other[None, :] < choice[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    is_kept = exists & (rank < capacity)
    position = tl.load(starts + batch * E + ids, mask=exists, other=0) + rank
    tl.store(positions + start_of_batch + choice, tl.where(is_kept, position, -1), mask=there)
    tl.store(source + start_of_batch + position, choice, mask=is_kept)
    # Rows behind the last expert's, as many as choices are dropped, are no choice's row.
    tl.store(source + start_of_batch + choice, -1, mask=there & (choice >= tl.load(ends + batch * E + E - 1)))


@triton.jit
def columns_inside(inside, column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a tile: of rows alone where blocks divide the columns, so that accesses stay 16 bytes wide."""
    mask = inside[:, None]
    if COLUMNS % BLOCK != 0:
        mask = mask & (column < COLUMNS)[None, :]
    return mask


@triton.jit
def spread(
    x, positions, source, weights, tokens, out,
    K: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr,
    FILLS: tl.constexpr,
):  # fmt: skip
    """Writes columns of tokens to the rows of their choices: each is read once, and not by all of its rows."""
    across: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    token = tl.program_id(0) // across * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    there = token < tokens
    at = token.to(tl.int64)[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=columns_inside(there, column, D, BLOCK_D), other=0.0)
    nothing = tl.zeros((BLOCK_TOKENS, BLOCK_D), value.dtype)
    for j in tl.static_range(K):
        choice = token * K + j
        position = tl.load(positions + choice, mask=there, other=-1)
        row = value
        if WEIGHTED:
            weight = tl.load(weights + choice, mask=there, other=0.0).to(tl.float32)
            row = (value.to(tl.float32) * weight[:, None]).to(value.dtype)
        to = position.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(out + to, row, mask=columns_inside(position >= 0, column, D, BLOCK_D))
        if FILLS:
            # As many rows as there are choices: this program also sees to those of the same numbers, if they hold none.
            held = tl.load(source + choice, mask=there, other=0)
            to = choice.to(tl.int64)[:, None] * D + column[None, :]
            tl.store(out + to, nothing, mask=columns_inside(held < 0, column, D, BLOCK_D))


@triton.jit
def combine(
    rows, positions, weights, bias, experts, tokens, out,
    K: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Sums columns of the rows of tokens, in the order of their choices."""
    across: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    token = tl.program_id(0) // across * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    there = token < tokens
    total = tl.zeros((BLOCK_TOKENS, BLOCK_D), tl.float32)
    for j in tl.static_range(K):
        choice = token * K + j
        position = tl.load(positions + choice, mask=there, other=-1)
        is_kept = position >= 0
        mask = columns_inside(is_kept, column, D, BLOCK_D)
        # Nothing of a dropped choice is loaded: its term is 0 · 0, whatever its weight is.
        row = tl.load(rows + position.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if BIASED:
            expert = tl.load(experts + choice, mask=is_kept, other=0).to(tl.int64)
            row += tl.load(bias + expert[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + choice, mask=is_kept, other=0.0).to(tl.float32)[:, None]
        total += row
    at = token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=columns_inside(there, column, D, BLOCK_D))


@triton.jit
def dots(
    y, rows, positions, bias, experts, choices, out,
    K: tl.constexpr, D: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK_D: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Computes the inner products of the tokens of choices with their rows; the choices of a token share its row."""
    choice = tl.program_id(0) * BLOCK_CHOICES + tl.arange(0, BLOCK_CHOICES)
    there = choice < choices
    position = tl.load(positions + choice, mask=there, other=-1)
    is_kept = position >= 0
    if BIASED:
        expert = tl.load(experts + choice, mask=is_kept, other=0).to(tl.int64)
    terms = tl.zeros((BLOCK_CHOICES, BLOCK_D), tl.float32)
    for first in tl.range(0, D, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        mask = columns_inside(is_kept, column, D, BLOCK_D)
        row = tl.load(rows + position.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if BIASED:
            row += tl.load(bias + expert[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        of_token = y + (choice // K).to(tl.int64)[:, None] * D + column[None, :]
        terms += row * tl.load(of_token, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + choice, tl.sum(terms, 1), mask=there)


@triton.jit
def gate_gradients(
    gate, up, d_hidden, row_weights, source, rows, d_gate, d_up, weighted, dots,
    N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of both pre-activations of rows, their results times weights, and inner products."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # What rows without a choice hold is not defined, and nobody reads their gradients.
    there = tl.load(source + row, mask=row < rows, other=-1) >= 0
    weight = tl.load(row_weights + row, mask=there, other=0.0).to(tl.float32)[:, None]
    terms = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
    # Over several devices most rows may hold none, and a tile of these has nothing to do.
    columns = tl.max(there.to(tl.int32), 0) * N
    for first in tl.range(0, columns, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        mask = columns_inside(there, column, N, BLOCK_N)
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        gate_tile = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        up_tile = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
        d_tile = tl.load(d_hidden + at, mask=mask, other=0.0).to(tl.float32)
        hidden, by_gate, by_up = gated(gate_tile, up_tile, ACTIVATION)
        terms += d_tile * hidden
        d_tile *= weight
        tl.store(d_gate + at, (d_tile * by_gate).to(d_gate.dtype.element_ty), mask=mask)
        tl.store(d_up + at, (d_tile * by_up).to(d_up.dtype.element_ty), mask=mask)
        tl.store(weighted + at, (weight * hidden).to(weighted.dtype.element_ty), mask=mask)
    tl.store(dots + row, tl.sum(terms, 1), mask=there)
