"""Quantising by its definition in NumPy and ml_dtypes: a loop over the blocks."""

import itertools
import math

import ml_dtypes
import numpy as np

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
TINY = np.float32(2.0**-126)


def scale_and_inverse(amax, largest, power_of_two):
    """The scale of a block with this finite maximum, and what its elements are multiplied by."""
    if amax == 0:
        return np.float32(1), np.float32(1)
    if power_of_two:
        # Exact: the least integer p with amax ≤ largest · 2^p.
        p = next(p for p in range(-126, 128) if float(amax) <= math.ldexp(largest, p))
        return np.float32(math.ldexp(1.0, p)), np.float32(math.ldexp(1.0, -p))
    scale = max(np.float32(amax) * np.float32(1 / largest), TINY)
    return scale, np.float32(1) / scale


def block_codes(block, format, power_of_two):
    """Codes and scale of elements that share one."""
    largest, dtype = LARGEST[format], DTYPES[format]
    block = block.astype(np.float32)
    block = np.where(np.abs(block) < TINY, np.copysign(np.float32(0), block), block)
    finite = block[np.isfinite(block)]
    scale, inverse = scale_and_inverse(np.abs(finite).max(initial=0), largest, power_of_two)
    if format == "int8" and np.isnan(block).any():
        return np.zeros(block.shape, dtype), np.float32(np.nan)
    with np.errstate(over="ignore"):
        y = np.clip(block * inverse, np.float32(-largest), np.float32(largest))
    return (np.rint(y) if format == "int8" else y).astype(dtype), scale


def quantized(x, format, extents, power_of_two=False):
    """Codes and scales of an array whose axes are in blocks of these extents (``None``: the whole axis)."""
    x = np.asarray(x)
    extents = (1,) * (x.ndim - len(extents)) + tuple(extents)
    sizes = [max(n, 1) if each is None else each for each, n in zip(extents, x.shape, strict=True)]
    counts = [1 if e is None else -(-n // e) for e, n in zip(extents, x.shape, strict=True)]
    codes, scales = np.zeros(x.shape, DTYPES[format]), np.ones(counts, np.float32)
    for index in itertools.product(*map(range, counts)):
        at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        codes[at], scales[index] = block_codes(x[at], format, power_of_two)
    return codes, scales


def same_bits(got, codes, scales):
    """Raises unless a ``Quantized`` has these codes and scales bit for bit; NaN codes may have either sign."""
    values = np.asarray(got.values)
    assert values.dtype == codes.dtype
    assert values.shape == codes.shape
    is_nan = np.isnan(codes.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(values.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(values.view(np.uint8)[~is_nan], codes.view(np.uint8)[~is_nan])
    assert got.scales.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(got.scales), scales)
