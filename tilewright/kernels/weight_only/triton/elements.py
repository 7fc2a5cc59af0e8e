"""Codes of four and eight bits in the dtype of x, by a few instructions for two elements.

A register has two words of 16 bits, of neighbouring rows in a plane. A code below the leading bit of the right power of
two is that power plus the code: 128 in bfloat16 (which has 7 bits of significand) and 1024 in float16. One exact
subtraction of that power, of the code of zero and of the zero point, all in one number, leaves ``code − zero``.
"""

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

# Of x in float16 or bfloat16: the type in PTX, the pair of powers of two that codes are added to, one, −0.
_TYPES = {"float16": ("f16x2", "0x64006400", "0x3C003C00"), "bfloat16": ("bf16x2", "0x43004300", "0x3F803F80")}

# Four bits of both words, from bit %(shift)s on; bfloat16 has no addition before Hopper, so it is a fused product by 1.
_INT4 = """{
    .reg .b32 codes, one;
    shr.u32 codes, $1, %(shift)s;
    lop3.b32 codes, codes, 0x000F000F, %(power)s, 0xEA;
    mov.b32 one, %(one)s;
    fma.rn.%(type)s $0, codes, one, $2;
}"""
# Two's complement: xor 0x80 adds 128, and a float16 has room for all eight bits below its leading one.
_INT8_FLOAT16 = """{
    .reg .b32 codes, one;
    xor.b32 codes, $1, 0x80808080;
    prmt.b32 codes, codes, 0, %(selector)s;
    or.b32 codes, codes, %(power)s;
    mov.b32 one, %(one)s;
    fma.rn.%(type)s $0, codes, one, $2;
}"""
# bfloat16 has not: the lower seven bits give 128 + bits, the sign 128 or 256, and their difference is the number.
_INT8_BFLOAT16 = """{
    .reg .b32 codes, low, sign, one, minus;
    prmt.b32 codes, $1, 0, %(selector)s;
    lop3.b32 low, codes, 0x007F007F, %(power)s, 0xEA;
    lop3.b32 sign, codes, 0x00800080, %(power)s, 0xEA;
    mov.b32 one, %(one)s;
    mov.b32 minus, 0xBF80BF80;
    fma.rn.%(type)s low, sign, minus, low;
    fma.rn.%(type)s $0, low, one, $2;
}"""
# The exponent and mantissa of e2m1 in the lowest bits of the exponent and the highest of the mantissa, where they are
# a number too small by a power of two: subnormal, if e2m1's own is.
_MXFP4 = """{
    .reg .b32 sign, rest, power, zero;
    %(to_sign)s
    %(to_rest)s
    and.b32 rest, rest, %(rest_mask)s;
    lop3.b32 rest, sign, 0x80008000, rest, 0xEA;
    mov.b32 power, %(rebase)s;
    mov.b32 zero, 0x80008000;
    fma.rn.%(type)s $0, rest, power, zero;
}"""
_REST = {"float16": (9, "0x0E000E00", "0x74007400"), "bfloat16": (6, "0x01C001C0", "0x7E807E80")}


def _shifted(name: str, left: int) -> str:
    direction, amount = ("shl.b32", left) if left >= 0 else ("shr.u32", -left)
    return f"{direction} {name}, $1, {amount};"


def assembly(format: str, dtype: str, plane: int) -> str:
    """The instructions that make a register of two elements of a plane from one of two words, and from the offset."""
    kind, power, one = _TYPES[dtype]
    values = {"type": kind, "power": power, "one": one, "shift": 4 * plane}
    if format == "int4":
        return _INT4 % values
    if format == "int8":
        # The byte of the plane of either word, and zeros above it.
        selector = "0x4240" if plane == 0 else "0x4341"
        return (_INT8_FLOAT16 if dtype == "float16" else _INT8_BFLOAT16) % (values | {"selector": selector})
    lowest, mask, rebase = _REST[dtype]
    return _MXFP4 % (
        values
        | {
            "to_sign": _shifted("sign", 12 - 4 * plane),
            "to_rest": _shifted("rest", lowest - 4 * plane),
            "rest_mask": mask,
            "rebase": rebase,
        }
    )


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _meaning(format: str, dtype: str, plane: int, words: np.ndarray, offset: np.ndarray | None = None) -> np.ndarray:
    """The same by numbers: a code's value, less what the offset has beside the code's power of two."""
    words = words.astype(np.int32)
    if format == "int8":
        codes = (words >> (8 * plane)) & 255
        values = (codes ^ 128).astype(np.float32) + 1024 if dtype == "float16" else (codes ^ 128) - np.float32(128)
    elif format == "int4":
        values = ((words >> (4 * plane)) & 15).astype(np.float32) + (1024 if dtype == "float16" else 128)
    else:
        codes = (words >> (4 * plane)) & 15
        values = _E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    if dtype == "float16":
        return (values if offset is None else values + offset.astype(np.float32)).astype(np.float16)
    if offset is not None:
        values = values + (offset.astype(np.uint32) << 16).view(np.float32)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def _meanings() -> dict[str, Callable[..., Any]]:
    return {
        assembly(format, dtype, plane): functools.partial(_meaning, format, dtype, plane)
        for format, planes in (("int4", 4), ("int8", 2), ("mxfp4", 4))
        for dtype in _TYPES
        for plane in range(planes)
    }


MEANINGS = _meanings()
"""NumPy functions that the interpreter calls in place of the assembly."""


def zero_offset(format: str, dtype: str) -> float:
    """The number that, added to a code below its power of two, leaves the code's value."""
    if format == "int4":
        return -1032.0 if dtype == "float16" else -136.0
    return -1152.0 if format == "int8" and dtype == "float16" else 0.0


@triton.jit
def values_of(words, offset, ASSEMBLY: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """The values of one plane in the dtype of the offset, less zero points; exact.

    Args:
      words: int16, of which two neighbours are in a register.
      offset: `zero_offset` less zero points, of the shape of words; without HAS_OFFSET only its dtype counts.
    """
    # The dtype must be a literal here.
    if HAS_OFFSET:
        if offset.dtype == tl.float16:
            found = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, offset], tl.float16, is_pure=True, pack=2)
        else:
            found = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, offset], tl.bfloat16, is_pure=True, pack=2)
    elif offset.dtype == tl.float16:
        found = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], tl.float16, is_pure=True, pack=2)
    else:
        found = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    return found
