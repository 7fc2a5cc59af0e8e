# mypy: disable-error-code="assignment"
"""The activations of gated linear units in Triton, by the names that options have, and their derivatives."""

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of that name."""
    if ACTIVATION == "silu":
        # Where exp overflows, x / ∞ is the −0 that silu tends to.
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh u) / 2 is the sigmoid of 2u; the factor is 2 · sqrt(2 / π).
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # keeps NaN, which tl.maximum drops
    elif ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif ACTIVATION == "tanh":
        size = tl.abs(x)
        t = tl.exp(-2.0 * size)
        # Near 0 the quotient cancels: there the Taylor series, whose first term left out is below 2⁻²⁹ of its sum.
        square = x * x
        series = 1.0 + square * (
            -0.3333333333333333
            + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
        )
        quotient = (1.0 - t) / (1.0 + t)
        y = tl.where(size < 0.2, x * series, tl.where(x < 0.0, -quotient, quotient))
    else:
        y = x
    return y


@triton.jit
def logistic(x):
    """The sigmoid of x and of −x, both without the rounding of a difference from 1."""
    t = tl.exp(-tl.abs(x))
    large, small = 1.0 / (1.0 + t), t / (1.0 + t)
    return tl.where(x < 0.0, small, large), tl.where(x < 0.0, large, small)


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation of that name."""
    if ACTIVATION == "silu":
        p, q = logistic(x)
        y = p * (1.0 + x * q)
    elif ACTIVATION == "gelu":
        # The density of the normal distribution has the factor 1 / sqrt(2π).
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        p, q = logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = p * (1.0 + 1.5957691216057308 * x * q * (1.0 + 0.134145 * x * x))
    elif ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "sigmoid":
        p, q = logistic(x)
        y = p * q
    elif ACTIVATION == "tanh":
        p, q = logistic(2.0 * x)
        y = 4.0 * p * q
    else:
        y = x * 0.0 + 1.0
    return y


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """``act(gate) * up`` or the gate of gpt-oss, and its derivatives by gate and by up."""
    if ACTIVATION == "swiglu_oai":
        kept = tl.where(gate > 7.0, 7.0, gate)
        p, q = logistic(1.702 * kept)
        factor = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        hidden = kept * p * factor
        by_gate = tl.where(gate > 7.0, 0.0, p * (1.0 + 1.702 * kept * q) * factor)
        by_up = tl.where(tl.abs(up) > 7.0, 0.0, kept * p)
    else:
        by_up = activated(gate, ACTIVATION)
        hidden = by_up * up
        by_gate = slope(gate, ACTIVATION) * up
    return hidden, by_gate, by_up
