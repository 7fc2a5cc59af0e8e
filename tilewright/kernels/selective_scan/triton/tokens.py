"""Parts of the Triton kernels of a selective scan that concern one token: loads, softplus and gate, in float32."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# Marks of tokens: 1 does not see the state before it, 2 belongs to no sequence; others have 0. Written as numbers: the
# interpreter does not compare tensors with constants of a module.


@triton.jit
def softplus(x):
    # log1p(w) by its quotient with the rounded argument: log(1 + w) alone loses small w.
    w = tl.exp(-tl.abs(x))
    whole = 1.0 + w
    rest = whole - 1.0
    log1p = tl.where(rest == 0.0, w, tl.log(whole) * (w / tl.where(rest == 0.0, 1.0, rest)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def step_of(raw, is_token, delta_softplus: tl.constexpr):
    """Delta as the recurrence uses it, from its sum with the bias; 0 where there is no token."""
    step = softplus(raw) if delta_softplus else raw
    return tl.where(is_token, step, 0.0)


@triton.jit
def elements(d, state: tl.constexpr, block_n: tl.constexpr):
    """Places of the states of channels, [block_n, block_d].

    Of contiguous elements Triton would make vectors of a thread, to load and store states, which happens rarely. All
    computation would follow, and exchange steps and sums between threads for every token. Here it sees none.
    """
    n = tl.max_contiguous(tl.arange(0, block_n), 1)
    return d[None, :] * state + n[:, None]


@triton.jit
def up_to(index, size: tl.constexpr, condition):
    """The mask of a block of indices below ``size``; of none unless a condition, a scalar, holds."""
    return index < tl.where(condition, size, 0)


@triton.jit
def channel(pointer, token, d, r, is_token, channels: tl.constexpr, width: tl.constexpr):
    """A token's values of a block of channels, [block_d]; 0 where there is none."""
    return tl.load(pointer + token * channels + d, mask=up_to(r, width, is_token), other=0.0).to(tl.float32)


@triton.jit
def by_state(pointer, token, group, n, is_token, groups: tl.constexpr, state: tl.constexpr):
    """A token's B or C, [block_n, 1]; 0 where there is no token."""
    row = pointer + (token * groups + group) * state
    return tl.load(row + n, mask=up_to(n, state, is_token), other=0.0).to(tl.float32)[:, None]


@triton.jit
def mark_of(marks, token, is_inside, has_marks: tl.constexpr):
    """The mark of a token; that of padding behind the tokens of a piece."""
    if has_marks:
        found = tl.load(marks + token, mask=is_inside, other=2).to(tl.int32)
    else:
        found = tl.where(is_inside, 0, 2)
    return found


@triton.jit
def unless_reset(mark, states, has_marks: tl.constexpr):
    """Zeros where a token does not see the state before it; no product with 0, which would keep NaN."""
    return tl.where(mark == 1, 0.0, states) if has_marks else states
