# mypy: disable-error-code="assignment"
"""Sums of the decays of a chunk in Triton, as all kernels for GPUs take them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-200.0)
"""The least log2 of a decay: 2^-200 is 0 in float32, and lower ones would take digits from the sums."""


@triton.jit
def sums_of_decays(log_decay):
    """Sums of log2 of the decays up to each token, the first dimension, in float32; of natural logarithms."""
    decay = log_decay.to(tl.float32) * LOG2E
    # Not tl.maximum, which drops NaN.
    return tl.cumsum(tl.where(decay < LOWEST, LOWEST, decay), 0)
