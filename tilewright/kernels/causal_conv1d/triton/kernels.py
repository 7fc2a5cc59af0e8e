# mypy: disable-error-code="assignment"
"""The causal depthwise convolution in Triton: one pass over memory forward, one backward, and a step in place.

  x, y       inputs and results, [batch, length, channels]; ``rows`` are some tokens of a block of channels
  w, b       weight as [width, channels], and bias
  z          b + Σ_j w_j · x_{t - width + 1 + j}, the pre-activation; y = act(z)
  dz         the cotangent of y times act'(z)
  dx         Σ_i w_{width - 1 - i} · dz_{t + i}
  dw, db     sums of dz_t · x_{t - width + 1 + j} and of dz over all tokens
  number     of the sequence of a token in its row of the batch; -1 for padding (``sequences.sequence_ids``)
  states     the last inputs before each sequence, [sequences, width - 1, channels]; each row of the batch has
             ``row_states`` of them, that of a token is the one of its number

A program walks over the tokens of a block of channels, ``block_tokens`` at a time, each a vector in registers, and
keeps the last ones: every token is read once, but for the few at either end that neighbouring programs read, too.
Numbers are compared in scalar registers, and without packing (``has_ids`` is false) not at all. Sums are float32, in
one order.
"""

import numpy as np
import triton
import triton.language as tl

EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
"""Each one instruction, off by two units in the last place at most; with denormal numbers they would be a dozen."""

MEANINGS = {EXP2.value: np.exp2, RECIPROCAL.value: np.reciprocal}
"""Python equivalents of the inline assembly, for the interpreter."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _approximate(x, instruction: tl.constexpr):
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _activated(z, silu: tl.constexpr):
    y = z
    if silu:
        # Where the power overflows, z · 0 is the −0 that silu tends to.
        y = z * _approximate(1.0 + _approximate(z * -LOG2_E, EXP2), RECIPROCAL)
    return y


@triton.jit
def _slope(z):
    """The derivative of silu, with one power, which cannot overflow."""
    e = _approximate(tl.minimum(z * -LOG2_E, 120.0), EXP2)
    p = _approximate(1.0 + e, RECIPROCAL)
    return p * (1.0 + z * (e * p))


@triton.jit
def _load_row(pointer, start, t, length, channel, inside, channels: tl.constexpr):
    """A token in the dtype of the array; zeros out of range."""
    return tl.load(pointer + (start + t) * channels + channel, mask=inside & (t >= 0) & (t < length), other=0.0)


@triton.jit
def _load_number(ids, start, t, length, has_ids: tl.constexpr):
    """The number of a token's sequence; -1 out of range."""
    number = t * 0
    if has_ids:
        number = tl.load(ids + start + t, mask=(t >= 0) & (t < length), other=-1)
    return number


@triton.jit
def _load_weights(weight, bias, channel, inside, channels: tl.constexpr, width: tl.constexpr, has_bias: tl.constexpr):
    """w and b of a block of channels in float32."""
    w = ()
    for j in tl.static_range(width):
        w += (tl.load(weight + j * channels + channel, mask=inside, other=0.0).to(tl.float32),)
    b = tl.zeros([channel.shape[0]], tl.float32)
    if has_bias:
        b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _window(
    rows, numbers, at: tl.constexpr, states, channel, inside,
    channels: tl.constexpr, width: tl.constexpr, has_ids: tl.constexpr, has_state: tl.constexpr,
):  # fmt: skip
    """The inputs that a token's window covers, the oldest first, in float32.

    Args:
      rows: tokens, of which the one in question is at ``width - 1 + at``.
      numbers: those of their sequences, from one token earlier on.
      states: of the token's row of the batch.
    """
    number = numbers[width + at]
    position = number * 0
    if has_state:
        # The tokens of the sequence before this one, up to width - 1: the tokens of a sequence are together.
        for by in tl.static_range(1, width):
            position += (numbers[width + at - by] == number).to(tl.int32)
    window = ()
    for j in tl.static_range(width):
        value = rows[at + j].to(tl.float32)
        if has_ids:
            value = tl.where((numbers[at + j + 1] == number) & (number >= 0), value, 0.0)
        if has_state and j < width - 1:
            reads = (position + j < width - 1) & (number >= 0)
            offset = (number.to(tl.int64) * (width - 1) + position + j) * channels
            value += tl.load(states + offset + channel, mask=inside & reads, other=0.0).to(tl.float32)
        window += (value,)
    return window


@triton.jit
def _place(program, tiles, channels: tl.constexpr, block_channels: tl.constexpr):
    """Row of the batch, tile and first channel of a program: programs that run together share their tokens' rows."""
    blocks: tl.constexpr = (channels + block_channels - 1) // block_channels
    return program // blocks // tiles, program // blocks % tiles, program % blocks * block_channels


@triton.jit
def forward(
    x, weight, bias, states, ids, length, tiles, batch, row_states, out,
    channels: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr, block_channels: tl.constexpr,
    steps: tl.constexpr, silu: tl.constexpr, has_bias: tl.constexpr, has_ids: tl.constexpr,
    has_state: tl.constexpr, weight_stride: tl.constexpr, bias_stride: tl.constexpr,
):  # fmt: skip
    """Computes y of ``steps · block_tokens`` tokens."""
    row, tile, first_channel = _place(tl.program_id(0), tiles, channels, block_channels)
    channel = first_channel + tl.arange(0, block_channels)
    inside = channel < channels
    group = (row // batch).to(tl.int64)
    w, b = _load_weights(
        weight + group * weight_stride, bias + group * bias_stride, channel, inside, channels, width, has_bias
    )
    start = row.to(tl.int64) * length
    own_states = states + row.to(tl.int64) * row_states * ((width - 1) * channels)
    t = tile * (steps * block_tokens)
    rows, numbers = (), ()
    for k in tl.static_range(width - 1):
        rows += (_load_row(x, start, t - width + 1 + k, length, channel, inside, channels),)
    for k in tl.static_range(width):
        numbers += (_load_number(ids, start, t - width + k, length, has_ids),)
    for _ in tl.range(steps):
        all_rows, all_numbers = rows, numbers
        # All loads before the first store, which the compiler would not move them across.
        for k in tl.static_range(block_tokens):
            all_rows += (_load_row(x, start, t + k, length, channel, inside, channels),)
            all_numbers += (_load_number(ids, start, t + k, length, has_ids),)
        for k in tl.static_range(block_tokens):
            window = _window(all_rows, all_numbers, k, own_states, channel, inside, channels, width, has_ids, has_state)
            z = b
            for j in tl.static_range(width):
                z += w[j] * window[j]
            y = _activated(z, silu)
            if has_ids:
                y = tl.where(all_numbers[width + k] >= 0, y, 0.0)
            pointers = out + (start + t + k) * channels + channel
            tl.store(pointers, y.to(out.dtype.element_ty), mask=inside & (t + k < length))
        rows, numbers = (), ()
        for k in tl.static_range(width - 1):
            rows += (all_rows[block_tokens + k],)
        for k in tl.static_range(width):
            numbers += (all_numbers[block_tokens + k],)
        t += block_tokens


@triton.jit
def backward(
    x, weight, bias, d_out, states, d_states, ids, length, tiles, batch, row_states, d_x, d_weight, d_bias, d_initial,
    channels: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr, block_channels: tl.constexpr,
    steps: tl.constexpr, silu: tl.constexpr, has_bias: tl.constexpr, has_ids: tl.constexpr,
    has_state: tl.constexpr, has_d_state: tl.constexpr, weight_stride: tl.constexpr, bias_stride: tl.constexpr,
):  # fmt: skip
    """Computes dx of ``steps · block_tokens - (width - 1)`` tokens, with their shares of dw and db.

    dx of a token needs dz of the next ones, so it is written ``width - 1`` tokens late. dz of the last tokens that a
    program loads is computed by the next program as well, which counts it in dw and db.
    """
    row, tile, first_channel = _place(tl.program_id(0), tiles, channels, block_channels)
    channel = first_channel + tl.arange(0, block_channels)
    inside = channel < channels
    group = (row // batch).to(tl.int64)
    w, b = _load_weights(
        weight + group * weight_stride, bias + group * bias_stride, channel, inside, channels, width, has_bias
    )
    start = row.to(tl.int64) * length
    first_state = row.to(tl.int64) * row_states
    own_states = states + first_state * ((width - 1) * channels)
    first = tile * (steps * block_tokens - (width - 1))
    end = tl.minimum(first + (steps * block_tokens - (width - 1)), length)
    rows, numbers, dzs, dw = (), (), (), ()
    db = tl.zeros([block_channels], tl.float32)
    for k in tl.static_range(width - 1):
        rows += (_load_row(x, start, first - width + 1 + k, length, channel, inside, channels),)
        dzs += (tl.zeros([block_channels], tl.float32),)
    for k in tl.static_range(width):
        numbers += (_load_number(ids, start, first - width + k, length, has_ids),)
        dw += (tl.zeros([block_channels], tl.float32),)
    t = first
    for _ in tl.range(steps):
        all_rows, all_numbers, all_dzs, gs = rows, numbers, dzs, ()
        for k in tl.static_range(block_tokens):
            all_rows += (_load_row(x, start, t + k, length, channel, inside, channels),)
            gs += (_load_row(d_out, start, t + k, length, channel, inside, channels),)
            all_numbers += (_load_number(ids, start, t + k, length, has_ids),)
        for k in tl.static_range(block_tokens):
            window = _window(all_rows, all_numbers, k, own_states, channel, inside, channels, width, has_ids, has_state)
            dz: tl.tensor = gs[k].to(tl.float32)
            if silu:
                z = b
                for j in tl.static_range(width):
                    z += w[j] * window[j]
                dz = dz * _slope(z)
            if has_ids:
                dz = tl.where(all_numbers[width + k] >= 0, dz, 0.0)
            own = tl.where(t + k < end, dz, 0.0)
            new_dw = ()
            for j in tl.static_range(width):
                new_dw += (dw[j] + own * window[j],)
            dw = new_dw
            db += own
            all_dzs += (dz,)
            # The token whose dx is complete.
            done = t + k - (width - 1)
            number = all_numbers[k + 1]
            writes = (done >= first) & (done < end)
            dx = w[width - 1] * all_dzs[k]
            following = number * 0
            for i in tl.static_range(1, width):
                value = all_dzs[k + i]
                if has_ids:
                    value = tl.where(all_numbers[k + 1 + i] == number, value, 0.0)
                    following += (all_numbers[k + 1 + i] == number).to(tl.int32)
                dx += w[width - 1 - i] * value
            if has_d_state:
                reads = writes & (following < width - 1) & (number >= 0)
                offset = ((first_state + number) * (width - 1) + width - 2 - following) * channels
                dx += tl.load(d_states + offset + channel, mask=inside & reads, other=0.0).to(tl.float32)
            tl.store(d_x + (start + done) * channels + channel, dx.to(d_x.dtype.element_ty), mask=inside & writes)
            if has_state:  # noqa: SIM102 - decided when the kernel is compiled
                if writes & (number >= 0) & (all_numbers[k] != number):
                    # A first token: the window of the p-th token reaches column c of the state by its tap c - p.
                    for c in tl.static_range(width - 1):
                        d_column = tl.zeros([block_channels], tl.float32)
                        for p in tl.static_range(c + 1):
                            d_column += tl.where(all_numbers[k + 1 + p] == number, w[c - p] * all_dzs[k + p], 0.0)
                        offset = ((first_state + number) * (width - 1) + c) * channels
                        tl.store(d_initial + offset + channel, d_column, mask=inside)
        rows, numbers, dzs = (), (), ()
        for k in tl.static_range(width - 1):
            rows += (all_rows[block_tokens + k],)
            dzs += (all_dzs[block_tokens + k],)
        for k in tl.static_range(width):
            numbers += (all_numbers[block_tokens + k],)
        t += block_tokens
    # Partial sums are [groups, batch · tiles, width, channels].
    partial = (row.to(tl.int64) * tiles + tile) * channels
    for j in tl.static_range(width):
        tl.store(d_weight + partial * width + j * channels + channel, dw[j], mask=inside)
    if has_bias:
        tl.store(d_bias + partial + channel, db, mask=inside)


@triton.jit
def step(
    x, weight, bias, pool, read, write, slots, y,
    channels: tl.constexpr, width: tl.constexpr, tokens: tl.constexpr, block_channels: tl.constexpr,
    silu: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Computes y of a row's tokens, and writes the state that they leave in place of the one before.

    Args:
      x, y: [batch, tokens, channels].
      weight: [channels, width], as callers have it: to transpose it would take longer than this.
      pool: [slots, channels, width - 1].
      read, write: [batch].
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    slot = tl.load(read + row)
    target = tl.load(write + row)
    exists = (slot >= 0) & (slot < slots)
    source = pool + (slot.to(tl.int64) * channels + channel) * (width - 1)
    window = ()
    for k in tl.static_range(width - 1):
        window += (tl.load(source + k, mask=inside & exists, other=0.0).to(tl.float32),)
    for t in tl.static_range(tokens):
        window += (
            tl.load(x + (row * tokens + t) * channels + channel, mask=inside & exists, other=0.0).to(tl.float32),
        )
    for t in tl.static_range(tokens):
        z = tl.zeros([block_channels], tl.float32)
        if has_bias:
            z = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(width):
            z += tl.load(weight + channel * width + j, mask=inside, other=0.0).to(tl.float32) * window[t + j]
        result = tl.where(exists, _activated(z, silu), 0.0)
        tl.store(y + (row * tokens + t) * channels + channel, result.to(y.dtype.element_ty), mask=inside)
    into = pool + (target.to(tl.int64) * channels + channel) * (width - 1)
    written = inside & exists & (target >= 0) & (target < slots)
    for k in tl.static_range(width - 1):
        tl.store(into + k, window[tokens + k].to(pool.dtype.element_ty), mask=written)
