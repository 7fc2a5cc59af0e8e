# mypy: disable-error-code="assignment"
"""Sums of the decays of a chunk in Triton, as all kernels for GPUs take them, and matmuls of what is not finite."""

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


@triton.jit
def finite(x):
    """A tile with 0 for what is NaN or infinite: 0 times these, in a matmul, is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def first_broken(x, axis: tl.constexpr):
    """The first row of a tile of 64 rows with a number that is NaN or infinite, in each column or in all; else 64."""
    row = tl.arange(0, x.shape[0])[:, None]
    return tl.min(tl.where(tl.abs(x) < float("inf"), x.shape[0], row), axis)


@triton.jit
def broken_from(x, row):
    """A tile that is NaN from a row on."""
    return tl.where(tl.arange(0, x.shape[0])[:, None] < row, x, float("nan"))
