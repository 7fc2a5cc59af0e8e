"""Weights of few bits by the definitions of their formats, element by element, in NumPy."""

from typing import Any

import ml_dtypes
import numpy as np

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The columns of the eight nibbles of an AWQ word, as AutoAWQ's ``pack`` lists them."""


def code_value(code: int, format: str) -> float:
    """The number of a code without a sign."""
    if format == "int4":
        return float(code - 8)
    if format == "int8":
        return float(np.uint8(code).view(np.int8))
    return float(np.uint8(code).view(ml_dtypes.float4_e2m1fn))


def code_at(storage: np.ndarray, format: str, k: int, n: int) -> int:
    """The code of row k and column n of storage, by the order that ``packing`` describes."""
    bits = 8 if format == "int8" else 4
    unit = 256 // bits
    plane, word = k % unit // 16, k % 16
    low, high = storage[k // unit, n, 2 * word], storage[k // unit, n, 2 * word + 1]
    return ((int(low) | int(high) << 8) >> (bits * plane)) & ((1 << bits) - 1)


def weight_of(
    storage: Any, scales: Any, zeros: Any, format: str, group: int | None, k: int, dtype: Any = np.float64
) -> np.ndarray:
    """``[k, n]``: ``(value − zero) · scale``."""
    storage, scales = np.asarray(storage), np.asarray(scales)
    scales = (scales.view(ml_dtypes.float8_e8m0fnu) if format == "mxfp4" else scales).astype(dtype)
    zeros = np.zeros_like(scales) if zeros is None else np.asarray(zeros).astype(dtype)
    found = np.empty((k, storage.shape[1]), dtype)
    for row, column in np.ndindex(found.shape):
        at = 0 if group is None else row // group, column
        value = dtype(code_value(code_at(storage, format, row, column), format))
        found[row, column] = (value - zeros[at]) * scales[at]
    return found


def gptq_weight(qweight: Any, qzeros: Any, scales: Any, g_idx: Any, bits: int, added: int) -> np.ndarray:
    """``[k, n]`` of a GPTQ layer, whose zero points have ``added`` added to them."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    k, n = qweight.shape[0] * per_word, qweight.shape[1]
    found = np.empty((k, n), np.float32)
    for row, column in np.ndindex(k, n):
        code = (int(qweight[row // per_word, column]) >> (bits * (row % per_word))) & mask
        group = int(g_idx[row])
        zero = ((int(qzeros[group, column // per_word]) >> (bits * (column % per_word))) & mask) + added
        found[row, column] = np.float32(code - zero) * np.float32(scales[group, column])
    return found


def awq_weight(qweight: Any, qzeros: Any, scales: Any, group: int) -> np.ndarray:
    """``[k, n]`` of an AWQ layer."""
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    found = np.empty((k, n), np.float32)
    for row in range(k):
        for word in range(n // 8):
            for nibble, column in enumerate(AWQ_COLUMNS):
                code, zero = (
                    (int(array[at, word]) >> (4 * nibble)) & 15
                    for array, at in ((qweight, row), (qzeros, row // group))
                )
                at = 8 * word + column
                found[row, at] = np.float32(code - zero) * np.float32(scales[row // group, at])
    return found


def mxfp4_weight(blocks: Any, scales: Any) -> np.ndarray:
    """``[k, n]`` of blocks ``[n, k / 32, 16]``: low nibbles are the even elements."""
    n, groups, _ = blocks.shape
    found = np.empty((groups * 32, n), np.float32)
    for column, group, byte in np.ndindex(blocks.shape):
        for half in range(2):
            value = code_value((int(blocks[column, group, byte]) >> (4 * half)) & 15, "mxfp4")
            exponent = int(scales[column, group])
            scale = np.float32(np.nan) if exponent == 255 else np.ldexp(np.float32(1), exponent - 127)
            found[32 * group + 2 * byte + half, column] = np.float32(value) * scale
    return found
