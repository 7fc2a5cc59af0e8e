# mypy: disable-error-code="assignment"
"""Triton kernels of the selective scan, forward: a program goes through a piece of a sequence, for a block of channels.

The state is a tile [block_n, block_d] in registers. With 32 channels a warp a thread has all of a channel's state, so
that the sum over it is its own; with 16 or 8 it is spread over 2 or 4 threads, each of which computes delta and gate.

Several pieces of one sequence run at once, each from the states and the sums of delta that a first pass found:

    state behind a piece = exp(A · sum of delta) · state before it + state behind it, from a state of zeros

The table has a row for each piece: ``(first token, tokens, those of a sequence, sequence, first piece of the sequence,
last one, first chunk, 1 if a token does not see the state before the piece)``.
"""

import triton
import triton.language as tl

from tilewright.kernels.selective_scan.triton.tokens import (
    LOG2E,
    by_state,
    channel,
    elements,
    mark_of,
    sigmoid,
    step_of,
    unless_reset,
    up_to,
)

COLUMNS = tl.constexpr(8)


@triton.jit
def block_of(channels: tl.constexpr, groups: tl.constexpr, block_d: tl.constexpr):
    """``(piece, block, group, channels, those in the group)`` of a program; a block does not go beyond a group."""
    per_group: tl.constexpr = channels // groups
    parts: tl.constexpr = (per_group + block_d - 1) // block_d
    number = tl.program_id(0) // (parts * groups)
    part = tl.program_id(0) % (parts * groups)
    r = part % parts * block_d + tl.arange(0, block_d)
    return number, part, part // parts, part // parts * per_group + r, r


@triton.jit
def piece_ends(
    table, u, delta, decay, b, bias, marks, ends, sums,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, block_d: tl.constexpr, block_n: tl.constexpr,
    block_t: tl.constexpr, has_bias: tl.constexpr, delta_softplus: tl.constexpr, has_marks: tl.constexpr,
):  # fmt: skip
    """The states behind the pieces from states of zeros, [pieces, channels, state], and the sums of delta."""
    number, _, group, d, r = block_of(channels, groups, block_d)
    width: tl.constexpr = channels // groups
    inside = r < width
    piece = number.to(tl.int64)
    n = tl.arange(0, block_n)
    at = elements(d, state, block_n)
    mask = inside[None, :] & (n < state)[:, None]
    # Places in a piece are in 32 bits.
    first = tl.load(table + piece * COLUMNS).to(tl.int64)
    u += first * channels
    delta += first * channels
    b += first * (groups * state)
    if has_marks:
        marks += first
    count = tl.load(table + piece * COLUMNS + 2)
    a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32) * LOG2E
    offset = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
    h = tl.zeros([block_n, block_d], tl.float32)
    total = tl.zeros([block_d], tl.float32)
    for t in range(0, count, block_t):
        inputs, raws, marked = (), (), ()
        for i in tl.static_range(block_t):
            mark = mark_of(marks, t + i, t + i < count, has_marks)
            marked += (mark,)
            inputs += (channel(u, t + i, d, r, mark != 2, channels, width),)
            raws += (channel(delta, t + i, d, r, mark != 2, channels, width) + offset,)
        for i in tl.static_range(block_t):
            step = step_of(raws[i], marked[i] != 2, delta_softplus)
            column = by_state(b, t + i, group, n, marked[i] != 2, groups, state)
            h = unless_reset(marked[i], h, has_marks)
            h = tl.exp2(a * step[None, :]) * h + column * (step * inputs[i])[None, :]
            total += step
    tl.store(ends + piece * (channels * state) + at, h, mask=mask)
    tl.store(sums + piece * channels + d, total, mask=inside)


@triton.jit
def scan(
    table, u, delta, decay, b, c, skip, z, bias, initial, marks, ends, sums, out, final, chunk_states,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, block_d: tl.constexpr, block_n: tl.constexpr,
    block_t: tl.constexpr, chunk: tl.constexpr, has_skip: tl.constexpr, has_gate: tl.constexpr, has_bias: tl.constexpr,
    delta_softplus: tl.constexpr, has_initial: tl.constexpr, has_marks: tl.constexpr, split: tl.constexpr,
    returns_state: tl.constexpr, keeps: tl.constexpr,
):  # fmt: skip
    """Writes the output, the states behind the sequences and those before the chunks.

    Args:
      u, delta, z: [tokens, channels].
      decay: [channels, state].
      b, c: [tokens, groups, state].
      initial, final: [sequences, channels, state].
      marks: [tokens]; without them every token of a piece is one of its sequence.
      ends, sums: of ``piece_ends``, where sequences are ``split``.
      chunk_states: [chunks, channels, state].
    """
    number, _, group, d, r = block_of(channels, groups, block_d)
    width: tl.constexpr = channels // groups
    inside = r < width
    piece = number.to(tl.int64)
    n = tl.arange(0, block_n)
    at = elements(d, state, block_n)
    mask = inside[None, :] & (n < state)[:, None]
    row = table + piece * COLUMNS
    first = tl.load(row).to(tl.int64)
    u += first * channels
    delta += first * channels
    b += first * (groups * state)
    c += first * (groups * state)
    out += first * channels
    if has_gate:
        z += first * channels
    if has_marks:
        marks += first
    covered = tl.load(row + 1)
    count = tl.load(row + 2)
    sequence = tl.load(row + 3).to(tl.int64)
    a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32) * LOG2E
    offset = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
    weight = tl.load(skip + d, mask=inside, other=0.0).to(tl.float32) if has_skip else 0.0
    h = tl.zeros([block_n, block_d], tl.float32)
    if has_initial:
        h = tl.load(
            initial + sequence * (channels * state) + at,
            mask=up_to(r, width, sequence >= 0)[None, :] & (n < state)[:, None],
            other=0.0,
        )
    if split:
        for earlier in range(tl.load(row + 4), number):
            place = tl.cast(earlier, tl.int64)
            step = tl.load(sums + place * channels + d, mask=inside, other=0.0)
            carried = tl.exp2(a * step[None, :]) * h
            if has_marks:
                carried = tl.where(tl.load(table + place * COLUMNS + 7) == 1, 0.0, carried)
            h = carried + tl.load(ends + place * (channels * state) + at, mask=mask, other=0.0)
    chunk_row = tl.load(row + 6).to(tl.int64)
    for t in range(0, count, block_t):
        if keeps and t % chunk == 0:
            tl.store(chunk_states + (chunk_row + t // chunk) * (channels * state) + at, h, mask=mask)
        inputs, raws, gates, marked = (), (), (), ()
        for i in tl.static_range(block_t):
            mark = mark_of(marks, t + i, t + i < count, has_marks)
            marked += (mark,)
            inputs += (channel(u, t + i, d, r, mark != 2, channels, width),)
            raws += (channel(delta, t + i, d, r, mark != 2, channels, width) + offset,)
            if has_gate:
                gates += (channel(z, t + i, d, r, mark != 2, channels, width),)
        for i in tl.static_range(block_t):
            step = step_of(raws[i], marked[i] != 2, delta_softplus)
            rows = by_state(b, t + i, group, n, marked[i] != 2, groups, state)
            columns = by_state(c, t + i, group, n, marked[i] != 2, groups, state)
            h = unless_reset(marked[i], h, has_marks)
            h = tl.exp2(a * step[None, :]) * h + rows * (step * inputs[i])[None, :]
            y = tl.sum(h * columns, 0)
            if has_skip:
                y += weight * inputs[i]
            if has_gate:
                y *= gates[i] * sigmoid(gates[i])
            if has_marks:
                # States that are not finite belong to a segment before the padding.
                y = tl.where(marked[i] == 2, 0.0, y)
            tl.store(out + (t + i) * channels + d, y.to(out.dtype.element_ty), mask=up_to(r, width, t + i < count))
    for t in range(count, covered):
        zeros = tl.zeros([block_d], out.dtype.element_ty)
        tl.store(out + t * channels + d, zeros, mask=inside)
    if returns_state:
        is_last = (tl.load(row + 5) == number) & (sequence >= 0)
        tl.store(
            final + sequence * (channels * state) + at, h, mask=up_to(r, width, is_last)[None, :] & (n < state)[:, None]
        )
