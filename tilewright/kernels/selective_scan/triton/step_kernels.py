"""The Triton kernel of a step of the selective scan: a program has a block of the channels of one row."""

import triton
import triton.language as tl

from tilewright.kernels.selective_scan.triton.forward_kernels import block_of
from tilewright.kernels.selective_scan.triton.tokens import LOG2E, sigmoid, softplus


@triton.jit
def step(
    u, delta, decay, b, c, skip, z, bias, reads, writes, pool, slots, out,
    channels: tl.constexpr, groups: tl.constexpr, state: tl.constexpr, block_d: tl.constexpr, block_n: tl.constexpr,
    has_skip: tl.constexpr, has_gate: tl.constexpr, has_bias: tl.constexpr, delta_softplus: tl.constexpr,
    has_reads: tl.constexpr, has_writes: tl.constexpr,
):  # fmt: skip
    """Writes the output of a row, and its state into the pool.

    Args:
      u, delta, z: [rows, channels].
      decay: [channels, state].
      b, c: [rows, groups, state].
      reads, writes: [rows]; a row whose slot to read does not exist is padding.
      pool: [slots, channels, state], updated in place.
    """
    number, _, group, d, r = block_of(channels, groups, block_d)
    width: tl.constexpr = channels // groups
    row = number.to(tl.int64)
    inside = r < width
    n = tl.arange(0, block_n)
    at = d[:, None] * state + n[None, :]
    slot = tl.load(reads + row) if has_reads else number
    is_row = (slot >= 0) & (slot < slots)
    target = tl.load(writes + row) if has_writes else slot
    is_written = is_row & (target >= 0) & (target < slots)
    mask = inside[:, None] & (n < state)[None, :]
    held = (r < tl.where(is_row, width, 0))[:, None] & (n < state)[None, :]
    h = tl.load(pool + slot.to(tl.int64) * (channels * state) + at, mask=held, other=0.0).to(tl.float32)
    a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32) * LOG2E
    x = tl.load(u + row * channels + d, mask=inside, other=0.0).to(tl.float32)
    size = tl.load(delta + row * channels + d, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        size += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if delta_softplus:
        size = softplus(size)
    rows = tl.load(b + (row * groups + group) * state + n, mask=n < state, other=0.0).to(tl.float32)
    columns = tl.load(c + (row * groups + group) * state + n, mask=n < state, other=0.0).to(tl.float32)
    h = tl.exp2(a * size[:, None]) * h + rows[None, :] * (size * x)[:, None]
    y = tl.sum(h * columns[None, :], 1)
    if has_skip:
        y += tl.load(skip + d, mask=inside, other=0.0).to(tl.float32) * x
    if has_gate:
        gate = tl.load(z + row * channels + d, mask=inside, other=0.0).to(tl.float32)
        y *= gate * sigmoid(gate)
    tl.store(out + row * channels + d, tl.where(is_row, y, 0.0).to(out.dtype.element_ty), mask=inside)
    written = (r < tl.where(is_written, width, 0))[:, None] & (n < state)[None, :]
    tl.store(pool + target.to(tl.int64) * (channels * state) + at, h.to(pool.dtype.element_ty), mask=written)
