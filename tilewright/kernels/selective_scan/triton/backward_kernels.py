# mypy: disable-error-code="assignment"
"""Triton kernels of the selective scan, backward: from the end of a piece, chunk by chunk, as the forward ones.

With ``mu`` what comes to the state behind a token from the next one, ``g`` the cotangent of its sum over the state,
``w = delta · u`` and ``a = exp(delta · A)``:

    d_h = mu + C · g          mu of the token before = a · d_h
    d_C = sum over channels of g · h              d_B = sum over channels of d_h · w
    e = d_h · a · h of the token before           d_A += e · delta
    d_delta = sum over states of e · A + u · (sum over states of d_h · B)
    d_u = delta · (sum over states of d_h · B)

States are computed anew from that before the chunk: once to write those between parts of it to scratch memory, which is
read soon after, and once for the tokens of each part, in registers.
"""

import triton
import triton.language as tl

from tilewright.kernels.selective_scan.triton.forward_kernels import COLUMNS, block_of
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


@triton.jit
def _cotangent(d_out, z, token, d, r, is_token, channels, width: tl.constexpr, has_gate: tl.constexpr):
    """The cotangent of the sum over a state and of the skip connection."""
    g = channel(d_out, token, d, r, is_token, channels, width)
    if has_gate:
        gate = channel(z, token, d, r, is_token, channels, width)
        g *= gate * sigmoid(gate)
    return g


@triton.jit
def piece_starts(
    table, delta, decay, c, z, bias, marks, d_out, starts, sums,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, block_d: tl.constexpr, block_n: tl.constexpr,
    block_t: tl.constexpr, has_gate: tl.constexpr, has_bias: tl.constexpr, delta_softplus: tl.constexpr,
    has_marks: tl.constexpr,
):  # fmt: skip
    """The cotangents of the states before the pieces, without those behind, and the sums of delta."""
    number, _, group, d, r = block_of(channels, groups, block_d)
    width: tl.constexpr = channels // groups
    inside = r < width
    piece = number.to(tl.int64)
    n = tl.arange(0, block_n)
    at = elements(d, state, block_n)
    mask = inside[None, :] & (n < state)[:, None]
    first = tl.load(table + piece * COLUMNS).to(tl.int64)
    delta += first * channels
    c += first * (groups * state)
    d_out += first * channels
    if has_gate:
        z += first * channels
    if has_marks:
        marks += first
    count = tl.load(table + piece * COLUMNS + 2)
    a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32) * LOG2E
    offset = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
    mu = tl.zeros([block_n, block_d], tl.float32)
    total = tl.zeros([block_d], tl.float32)
    blocks = (count + block_t - 1) // block_t
    for block in range(blocks):
        t = (blocks - 1 - block) * block_t
        cotangents, raws, marked = (), (), ()
        for i in tl.static_range(block_t):
            token = t + (block_t - 1 - i)
            mark = mark_of(marks, token, t + (block_t - 1 - i) < count, has_marks)
            marked += (mark,)
            cotangents += (_cotangent(d_out, z, token, d, r, mark != 2, channels, width, has_gate),)
            raws += (channel(delta, token, d, r, mark != 2, channels, width) + offset,)
        for i in tl.static_range(block_t):
            token = t + (block_t - 1 - i)
            step = step_of(raws[i], marked[i] != 2, delta_softplus)
            columns = by_state(c, token, group, n, marked[i] != 2, groups, state)
            mu = tl.exp2(a * step[None, :]) * (mu + columns * cotangents[i][None, :])
            mu = unless_reset(marked[i], mu, has_marks)
            total += step
    tl.store(starts + piece * (channels * state) + at, mu, mask=mask)
    tl.store(sums + piece * channels + d, total, mask=inside)


@triton.jit
def _states_between(
    u, delta, b, marks, between, h, a, offset, group, d, r, n, tile, begin, size,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, width: tl.constexpr, block_t: tl.constexpr,
    elements_of_tile: tl.constexpr, delta_softplus: tl.constexpr, has_marks: tl.constexpr,
):  # fmt: skip
    """Writes the states before the blocks of a chunk to scratch memory, from that before the chunk."""
    # Other threads may still read the states of the chunk before.
    tl.debug_barrier()
    for t in range(0, size, block_t):
        tl.store(between + t // block_t * elements_of_tile + tile, h)
        inputs, raws, marked = (), (), ()
        for i in tl.static_range(block_t):
            token = begin + t + i
            mark = mark_of(marks, token, t + i < size, has_marks)
            marked += (mark,)
            inputs += (channel(u, token, d, r, mark != 2, channels, width),)
            raws += (channel(delta, token, d, r, mark != 2, channels, width) + offset,)
        for i in tl.static_range(block_t):
            step = step_of(raws[i], marked[i] != 2, delta_softplus)
            rows = by_state(b, begin + t + i, group, n, marked[i] != 2, groups, state)
            h = unless_reset(marked[i], h, has_marks)
            h = tl.exp2(a * step[None, :]) * h + rows * (step * inputs[i])[None, :]
    tl.debug_barrier()


@triton.jit
def _no_gradients(
    d_u, d_delta, d_z, d_b, d_c, count, covered, group, d, inside, n,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, has_gate: tl.constexpr,
):  # fmt: skip
    """Writes zeros for the tokens of a piece that belong to no sequence."""
    zeros = tl.zeros(d.shape, tl.float32)
    for token in range(count, covered):
        tl.store(d_u + token * channels + d, zeros.to(d_u.dtype.element_ty), mask=inside)
        tl.store(d_delta + token * channels + d, zeros.to(d_delta.dtype.element_ty), mask=inside)
        if has_gate:
            tl.store(d_z + token * channels + d, zeros.to(d_z.dtype.element_ty), mask=inside)
        place = (token * groups + group) * state + n
        tl.store(d_b + place, tl.zeros(n.shape, tl.float32), mask=n < state)
        tl.store(d_c + place, tl.zeros(n.shape, tl.float32), mask=n < state)


@triton.jit
def gradients(
    table, u, delta, decay, b, c, skip, z, bias, marks, chunk_states, d_out, d_final, starts, sums,
    d_u, d_delta, d_z, d_decay, d_b, d_c, d_skip, d_bias, d_initial, scratch,
    tokens: tl.constexpr, channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, block_d: tl.constexpr,
    block_n: tl.constexpr, block_t: tl.constexpr, chunk: tl.constexpr, has_skip: tl.constexpr, has_gate: tl.constexpr,
    has_bias: tl.constexpr, delta_softplus: tl.constexpr, has_initial: tl.constexpr, has_marks: tl.constexpr,
    has_final: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """Writes all gradients.

    Args:
      d_decay: [pieces, channels, state], d_skip and d_bias: [pieces, channels], to be summed over the pieces.
      d_b, d_c: [blocks of channels of a group, tokens, groups, state], to be summed over the blocks.
      scratch: [pieces, blocks of channels, chunk / block_t, block_n, block_d].
    """
    number, part, group, d, r = block_of(channels, groups, block_d)
    width: tl.constexpr = channels // groups
    inside = r < width
    piece = number.to(tl.int64)
    n = tl.arange(0, block_n)
    at = elements(d, state, block_n)
    mask = inside[None, :] & (n < state)[:, None]
    row = table + piece * COLUMNS
    parts: tl.constexpr = (width + block_d - 1) // block_d
    first = tl.load(row).to(tl.int64)
    of_block = ((part % parts).to(tl.int64) * tokens + first) * (groups * state)
    u, delta, d_out = u + first * channels, delta + first * channels, d_out + first * channels
    d_u, d_delta = d_u + first * channels, d_delta + first * channels
    b, c = b + first * (groups * state), c + first * (groups * state)
    d_b, d_c = d_b + of_block, d_c + of_block
    if has_gate:
        z += first * channels
        d_z += first * channels
    if has_marks:
        marks += first
    covered = tl.load(row + 1)
    count = tl.load(row + 2)
    sequence = tl.load(row + 3).to(tl.int64)
    last = tl.load(row + 5)
    chunk_row = tl.load(row + 6).to(tl.int64)
    a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32) * LOG2E
    offset = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
    weight = tl.load(skip + d, mask=inside, other=0.0).to(tl.float32) if has_skip else 0.0
    mu = tl.zeros([block_n, block_d], tl.float32)
    if has_final:
        mu = tl.load(
            d_final + sequence * (channels * state) + at,
            mask=up_to(r, width, sequence >= 0)[None, :] & (n < state)[:, None],
            other=0.0,
        )
    if split:
        for back in range(last - number):
            place = tl.cast(last - back, tl.int64)
            step = tl.load(sums + place * channels + d, mask=inside, other=0.0)
            carried = tl.exp2(a * step[None, :]) * mu
            if has_marks:
                carried = tl.where(tl.load(table + place * COLUMNS + 7) == 1, 0.0, carried)
            mu = carried + tl.load(starts + place * (channels * state) + at, mask=mask, other=0.0)

    between = scratch + (piece * (parts * groups) + part) * (chunk // block_t * block_n * block_d)
    tile = n[:, None] * block_d + tl.arange(0, block_d)[None, :]
    d_a = tl.zeros([block_n, block_d], tl.float32)
    d_weight, d_offset = tl.zeros([block_d], tl.float32), tl.zeros([block_d], tl.float32)
    chunks = (count + chunk - 1) // chunk
    for index in range(chunks):
        begin = (chunks - 1 - index) * chunk
        size = tl.minimum(count - begin, chunk)
        h = tl.load(chunk_states + (chunk_row + begin // chunk) * (channels * state) + at, mask=mask, other=0.0)
        _states_between(
            u, delta, b, marks, between, h, a, offset, group, d, r, n, tile, begin, size,
            channels, groups, state, width, block_t, block_n * block_d, delta_softplus, has_marks,
        )  # fmt: skip
        blocks = (size + block_t - 1) // block_t
        for block in range(blocks):
            t = begin + (blocks - 1 - block) * block_t
            h = tl.load(between + (blocks - 1 - block) * (block_n * block_d) + tile)
            inputs, raws, steps, marked, seen = (), (), (), (), ()
            for i in tl.static_range(block_t):
                mark = mark_of(marks, t + i, t + i < count, has_marks)
                marked += (mark,)
                inputs += (channel(u, t + i, d, r, mark != 2, channels, width),)
                raws += (channel(delta, t + i, d, r, mark != 2, channels, width) + offset,)
            for i in tl.static_range(block_t):
                steps += (step_of(raws[i], marked[i] != 2, delta_softplus),)
                h = unless_reset(marked[i], h, has_marks)
                seen += (h,)
                if i < block_t - 1:
                    rows = by_state(b, t + i, group, n, marked[i] != 2, groups, state)
                    h = tl.exp2(a * steps[i][None, :]) * h + rows * (steps[i] * inputs[i])[None, :]
            # Other values of the tokens are loaded again, for want of registers.
            for k in tl.static_range(block_t - 1, -1, -1):
                token = t + k
                mark = mark_of(marks, token, token < count, has_marks)
                is_token = mark != 2
                stored = up_to(r, width, t + k < count)
                rows = by_state(b, token, group, n, is_token, groups, state)
                columns = by_state(c, token, group, n, is_token, groups, state)
                d_y = channel(d_out, token, d, r, is_token, channels, width)
                x, step = channel(u, token, d, r, is_token, channels, width), steps[k]
                factor = tl.exp2(a * step[None, :])
                decayed = factor * seen[k]
                behind = decayed + rows * (step * x)[None, :]
                if has_gate:
                    gate = channel(z, token, d, r, is_token, channels, width)
                    share = sigmoid(gate)
                    y = tl.sum(behind * columns, 0) + weight * x
                    slope = share * (1.0 + gate * (1.0 - share))
                    if has_marks:
                        y = tl.where(is_token, y, 0.0)
                    tl.store(d_z + token * channels + d, (d_y * y * slope).to(d_z.dtype.element_ty), mask=stored)
                    d_y *= gate * share
                d_h = mu + columns * d_y[None, :]
                exponent = d_h * decayed
                shared = tl.sum(d_h * rows, 0)
                d_step = tl.sum(exponent * a, 0) * (1.0 / LOG2E) + x * shared
                if delta_softplus:
                    d_step *= sigmoid(channel(delta, token, d, r, is_token, channels, width) + offset)
                d_step = tl.where(is_token, d_step, 0.0)
                d_x = step * shared + weight * d_y
                if has_marks:
                    d_x = tl.where(is_token, d_x, 0.0)
                    exponent = tl.where(is_token, exponent, 0.0)
                d_a += exponent * step[None, :]
                d_weight += d_y * x
                d_offset += d_step
                tl.store(d_u + token * channels + d, d_x.to(d_u.dtype.element_ty), mask=stored)
                tl.store(d_delta + token * channels + d, d_step.to(d_delta.dtype.element_ty), mask=stored)
                of_rows = tl.sum(d_h * (step * x)[None, :], 1)
                of_columns = tl.sum(behind * d_y[None, :], 1)
                if has_marks:
                    of_rows = tl.where(is_token, of_rows, 0.0)
                    of_columns = tl.where(is_token, of_columns, 0.0)
                place = (token * groups + group) * state + n
                tl.store(d_b + place, of_rows, mask=up_to(n, state, t + k < count))
                tl.store(d_c + place, of_columns, mask=up_to(n, state, t + k < count))
                mu = unless_reset(mark, factor * d_h, has_marks)
    _no_gradients(d_u, d_delta, d_z, d_b, d_c, count, covered, group, d, inside, n, channels, groups, state, has_gate)
    tl.store(d_decay + piece * (channels * state) + at, d_a, mask=mask)
    if has_skip:
        tl.store(d_skip + piece * channels + d, d_weight, mask=inside)
    if has_bias:
        tl.store(d_bias + piece * channels + d, d_offset, mask=inside)
    if has_initial:
        is_first = (tl.load(row + 4) == number) & (sequence >= 0)
        tl.store(
            d_initial + sequence * (channels * state) + at,
            mu,
            mask=up_to(r, width, is_first)[None, :] & (n < state)[:, None],
        )
