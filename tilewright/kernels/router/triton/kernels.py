# mypy: disable-error-code="assignment"
"""The router in Triton: a pass over the logits forward, one backward, with all experts of a token in registers.

  x         the logits in float32, −inf in place of NaN and beyond the experts
  keys      what the choice compares, as integers in the order of floats: equal bits are equal, −0 is 0, and the maximum
            of integers over the lanes of a warp is one instruction
  place     the position in a tile, ``block_groups`` groups of ``block_size`` experts, both powers of two
  column    the expert of a place; places without one have the key TAKEN, as has an expert once it is chosen
  slope     the cotangent of the weights times ``scale``, at the places of the chosen experts

Grids: a program for each ``block_rows`` rows, in both directions. A call that may choose from all groups has one group.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**31))
"""Below the key of every float."""

LEAST = tl.constexpr(-(2**31) + 0x7FFFFF)
"""The key of −inf."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32, whose key is next to that of −inf."""

FAR = tl.constexpr(1 << 30)
"""Above every index."""


@triton.jit
def _ordered(x):
    """Integers in the order of floats that are no NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The floats of ``_ordered``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, index, axis: tl.constexpr):
    """The greatest key along an axis, and the lowest index that has it."""
    greatest = tl.max(keys, axis, keep_dims=True)
    return greatest, tl.min(tl.where(keys == greatest, index, FAR), axis, keep_dims=True)


@triton.jit
def _logits(pointers, mask):
    """Logits in float32, −inf outside of the mask and in place of NaN."""
    x = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def _softmax(x, of):
    """The softmax over the rows of ``of`` at ``x``, of which those are elements; zeros where all of a row is −inf."""
    greatest = tl.max(of, 1, keep_dims=True)
    pivot = tl.where(greatest == float("-inf"), 0.0, greatest)
    total = tl.sum(tl.exp(of - pivot), 1, keep_dims=True)
    return tl.exp(x - pivot) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _in_best_groups(
    keys,
    size: tl.constexpr,
    groups: tl.constexpr,
    top_groups: tl.constexpr,
    block_rows: tl.constexpr,
    block_size: tl.constexpr,
    block_groups: tl.constexpr,
):
    """Keys, with those outside of the best groups below all others but −inf."""
    grouped = tl.reshape(keys, (block_rows, block_groups, block_size))
    member = tl.arange(0, block_size)[None, None, :]
    greatest, best = _best(grouped, member, 2)
    # A group with fewer −inf is better: a sum with −inf itself would not tell.
    totals = tl.maximum(_value(greatest), LOWEST)
    if size > 1:
        second = tl.max(tl.where(member == best, TAKEN, grouped), 2, keep_dims=True)
        totals += tl.maximum(_value(second), LOWEST)
    group = tl.arange(0, block_groups)[None, :, None]
    totals = tl.where(group < groups, _ordered(totals), TAKEN)
    for _ in range(top_groups):
        _, kept = _best(totals, group, 1)
        totals = tl.where(group == kept, TAKEN, totals)
    keys = tl.where((totals == TAKEN) | (grouped <= LEAST), grouped, LEAST + 1)
    return tl.reshape(keys, (block_rows, block_groups * block_size))


@triton.jit
def forward(
    logits,
    bias,
    rows,
    batch_rows,
    weights,
    chosen,
    size: tl.constexpr,
    groups: tl.constexpr,
    top_groups: tl.constexpr,
    k: tl.constexpr,
    block_rows: tl.constexpr,
    block_size: tl.constexpr,
    block_groups: tl.constexpr,
    block_k: tl.constexpr,
    scoring: tl.constexpr,
    normalize: tl.constexpr,
    has_bias: tl.constexpr,
    bias_stride: tl.constexpr,
    scale: tl.constexpr,
    epsilon: tl.constexpr,
):
    """Computes the choice of ``block_rows`` rows in k rounds, and the weights from the chosen logits, read again."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]
    place = tl.arange(0, block_groups * block_size)[None, :]
    column = place // block_size * size + place % block_size
    is_expert = (place // block_size < groups) & (place % block_size < size)
    start = row.to(tl.int64) * (groups * size)
    x = _logits(logits + start + column, (row < rows) & is_expert)
    scores = x
    if has_bias or groups > 1:
        if scoring == "softmax":
            infinite = (x == float("inf")).to(tl.float32)
            scores = tl.where(tl.max(infinite, 1, keep_dims=True) > 0.0, infinite, _softmax(x, x))
        elif scoring == "sigmoid":
            scores = tl.sigmoid(x)
        if has_bias:
            # Of each element of a batch its own, or one for all with a stride of 0.
            scores += tl.load(bias + row // batch_rows * bias_stride + column, mask=(row < rows) & is_expert, other=0.0)
        scores = tl.where((x == float("-inf")) | (scores != scores), float("-inf"), scores)
    keys = tl.where(is_expert, _ordered(scores), TAKEN)
    if groups > 1:
        keys = _in_best_groups(keys, size, groups, top_groups, block_rows, block_size, block_groups)
    slot = tl.arange(0, block_k)[None, :]
    experts = tl.zeros((block_rows, block_k), tl.int32)
    for i in range(k):
        _, best = _best(keys, column, 1)
        keys = tl.where(column == best, TAKEN, keys)
        experts = tl.where(slot == i, best, experts)
    is_slot = (row < rows) & (slot < k)
    of_chosen = _logits(logits + start + experts, is_slot)
    if scoring == "sigmoid":
        result = tl.sigmoid(of_chosen)
        if normalize:
            result = result / (tl.sum(result, 1, keep_dims=True) + epsilon)
    else:
        result = _softmax(of_chosen, of_chosen if normalize else x)
    at = row.to(tl.int64) * k + slot
    tl.store(weights + at, scale * result, mask=is_slot)
    tl.store(chosen + at, experts, mask=is_slot)


@triton.jit
def backward(
    logits,
    chosen,
    d_weights,
    rows,
    d_logits,
    count: tl.constexpr,
    k: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    scoring: tl.constexpr,
    normalize: tl.constexpr,
    scale: tl.constexpr,
    epsilon: tl.constexpr,
):
    """Writes the gradient of the logits of ``block_rows`` rows, zeros included."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]
    column = tl.arange(0, block_columns)[None, :]
    inside = (row < rows) & (column < count)
    at = row.to(tl.int64) * count + column
    x = _logits(logits + at, inside)
    slope = tl.zeros((block_rows, block_columns), tl.float32)
    has_part = slope != 0.0
    for i in tl.static_range(k):
        slot = row.to(tl.int64) * k + i
        is_here = column == tl.load(chosen + slot, mask=row < rows, other=-1)
        slope = tl.where(is_here, scale * tl.load(d_weights + slot, mask=row < rows, other=0.0), slope)
        has_part |= is_here
    if scoring == "sigmoid":
        scores = tl.sigmoid(x)
        if normalize:
            total = tl.sum(tl.where(has_part, scores, 0.0), 1, keep_dims=True) + epsilon
            slope = (slope - tl.sum(slope * scores / total, 1, keep_dims=True)) / total
        gradient = slope * scores * tl.sigmoid(-x)  # 1 − score would cancel
    else:
        of = tl.where(has_part, x, float("-inf")) if normalize else x
        scores = _softmax(of, of)
        gradient = scores * (slope - tl.sum(scores * slope, 1, keep_dims=True))
    if normalize or scoring == "sigmoid":
        gradient = tl.where(has_part, gradient, 0.0)
    tl.store(d_logits + at, gradient.to(d_logits.dtype.element_ty), mask=inside)
