# mypy: disable-error-code="assignment"
"""The parts of a draw in Triton that all its kernels share: ordered integers, noise, and the best token of a group.

x        logits in float32, −∞ in place of NaN, of tokens that are ruled out, and beyond the vocabulary
order    the same as uint32 in their order: −0 is 0, and 0 is below all
slope    1 / temperature, or 1 where the temperature is 0
masses   sums of weights ``exp((x - largest) · slope)`` as integers, which no order of summation changes
"""

import numpy as np
import triton
import triton.language as tl

GROUP = tl.constexpr(128)
"""``GROUP`` of ``inputs``."""

EMPTY = tl.constexpr(0x007FFFFF)
"""The order of −∞."""

FAR = tl.constexpr(1 << 30)
"""Above every token."""

LN2 = tl.constexpr(0.6931471805599453)
PHILOX_MULTIPLIER = tl.constexpr(0xD256D193)
PHILOX_KEY_STEP = tl.constexpr(0x9E3779B9)

LOG2 = tl.constexpr("lg2.approx.f32 $0, $1;")
MEANINGS = {LOG2.value: np.log2}
"""Python equivalents of the inline assembly, for the interpreter."""

GROUP_UNIT = tl.constexpr(8388608.0)
"""Masses of a group are in 2⁻²³ of its largest weight: the sum of 128 fits 32 bits."""

UNIT = tl.constexpr(1099511627776.0)
"""Masses of a row are in 2⁻⁴⁰ of its largest weight."""

GROUP_UNITS = tl.constexpr(131072.0)
"""Units of a row in one of a group: 2¹⁷."""


@triton.jit
def ordered(x):
    """Integers in the order of floats that are no NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(order):
    """The floats of ``ordered``."""
    bits = tl.where((order >> 31) == 1, order & 0x7FFFFFFF, order ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def has_order(x, order):
    """True where ``ordered(x)`` is that, without registers for it, and whatever becomes of subnormal numbers."""
    bits = value_of(order).to(tl.uint32, bitcast=True)
    return ((x.to(tl.uint32, bitcast=True) ^ bits) & tl.where(bits == 0, 0x7FFFFFFF, 0xFFFFFFFF)) == 0


@triton.jit
def slope_of(temperature, row, HAS_TEMPERATURE: tl.constexpr):
    """The slope of rows, and True where the draw is greedy."""
    if HAS_TEMPERATURE:
        given = tl.load(temperature + row)
        is_greedy = (given > 0.0) == 0
        # As in XLA: beyond this range a product with 0, or with −∞, would not be that.
        slope = tl.minimum(tl.maximum(1.0 / tl.where(is_greedy, 1.0, given), 1e-37), 1e37)
    else:
        slope = row.to(tl.float32) * 0.0 + 1.0
        is_greedy = slope == 0.0
    return slope, is_greedy


@triton.jit
def words_of(pair, first, second):
    """Both words of Philox-2x32 with 10 rounds, of the tokens ``2 · pair`` and ``2 · pair + 1``; all are uint32."""
    left, right, key = pair, second, first
    for _ in tl.static_range(10):
        left, right = tl.umulhi(left, PHILOX_MULTIPLIER) ^ key ^ right, left * PHILOX_MULTIPLIER
        key += PHILOX_KEY_STEP
    return left, right


@triton.jit
def _log2(x):
    """The logarithm of the hardware, with errors of 2⁻²²: that of the library takes 12 multiplications."""
    return tl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gumbel(word):
    """The noise of random words: ``-log(-log(1 - u))``."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # Large noise is that of small u, where the logarithm cancels: its series in u / (2 - u), which is below 1/7.
    z = u / (2.0 - u)
    square = z * z
    series = 2.0 * z * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return -LN2 * _log2(tl.where(u < 0.25, series, -LN2 * _log2(1.0 - u)))


@triton.jit
def token_noise(token, first, second):
    """The noise of tokens, each with a call of its own."""
    token = token.to(tl.uint32)
    left, right = words_of(token >> 1, first, second)
    return gumbel(tl.where((token & 1) == 0, left, right))


@triton.jit
def best_of_groups(x, tokens, noise, slope, is_greedy):
    """``(order of the largest logit, score, token, logit)`` of the best token of each row of ``[groups, GROUP]``.

    Scores are relative to the largest logit. All results are ``[groups, 1]``.
    """
    top = tl.max(ordered(x), 1, keep_dims=True)
    is_largest = has_order(x, top)
    distance = tl.where(is_largest, 0.0, x - value_of(top))
    # One rounding, whatever else the distance is used for: a token must not depend on what is returned beside it.
    noisy = tl.fma(distance, slope, noise)
    score = tl.where(is_greedy, tl.where(is_largest, 0.0, float("-inf")), noisy)
    best = tl.max(score, 1, keep_dims=True)
    token = tl.min(tl.where(score == best, tokens, FAR), 1, keep_dims=True)
    return top, best, token, tl.max(tl.where(tokens == token, x, float("-inf")), 1, keep_dims=True)


@triton.jit
def group_masses(x, top, slope):
    """The mass of each group, ``int32[groups, 1]`` in units of 1 / GROUP_UNIT."""
    distance = tl.where(has_order(x, top), 0.0, x - value_of(top))
    weight = tl.where(x == float("-inf"), 0.0, tl.exp(distance * slope))
    return tl.sum((weight * GROUP_UNIT + 0.5).to(tl.int32), 1, keep_dims=True)


@triton.jit
def weight_of(order, top, slope):
    """The weight of logits relative to the largest one of the row."""
    distance = tl.where(order == top, 0.0, value_of(order) - value_of(top))
    return tl.where(order > EMPTY, tl.exp(distance * slope), 0.0)


@triton.jit
def score_of_groups(order, score, top, slope, is_greedy):
    """The scores of the best tokens of groups, relative to the largest logit of the row."""
    distance = tl.where(order == top, 0.0, value_of(order) - value_of(top))
    noisy = tl.fma(distance, slope, score)
    return tl.where(is_greedy, tl.where(order == top, 0.0, float("-inf")), noisy)
