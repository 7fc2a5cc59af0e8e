"""Elements of keys and values as they are stored, and their conversion to what tensor cores multiply.

Elements of one byte are converted to float16, in which int8 and both kinds of float8 are exact, and two at a time: a
pair of neighbours is loaded as 16 bits, and two rows of pairs fill a register. An instruction or two turn it
into a pair of float16, one of each row, of all first or all second neighbours: the layout that an MMA takes. So Q, K
and V are split by the parity of the columns, and an MMA over d is one over even columns plus one over odd columns.
"""

import functools

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from tilewright.kernels.paged_attention import latent_rows

GROUP, RANK, ROPE_DIM, ROW_BYTES, FIRST_SCALE, FIRST_ROPE = (
    tl.constexpr(size)
    for size in (
        latent_rows.GROUP, latent_rows.RANK, latent_rows.ROPE_DIM, latent_rows.ROW_BYTES, latent_rows.FIRST_SCALE,
        latent_rows.FIRST_ROPE,
    )
)  # fmt: skip

# Byte b of int8: b xor 0x80 is b + 128 without a sign, below the byte 0x64 it is the float16 1024 + b + 128, and
# 0x6480, which is 1152, is subtracted. All of these numbers are exact in float16.
_INT8 = """{
    .reg .b32 bytes, offset;
    xor.b32 bytes, $1, 0x80808080;
    prmt.b32 bytes, bytes, 0x64646464, %s;
    mov.b32 offset, 0x64806480;
    sub.f16x2 $0, bytes, offset;
}"""
# The conversion takes two neighbouring bytes: prmt brings those of both rows together, the rest is dropped.
_E4M3 = """{
    .reg .b32 bytes;
    .reg .b16 pair, other;
    prmt.b32 bytes, $1, 0, %s;
    mov.b32 {pair, other}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, pair;
}"""
INT8_FIRST, INT8_SECOND = tl.constexpr(_INT8 % "0x4240"), tl.constexpr(_INT8 % "0x4341")
E4M3_FIRST, E4M3_SECOND = tl.constexpr(_E4M3 % "0x0020"), tl.constexpr(_E4M3 % "0x0031")
# float8_e5m2 is the upper byte of a float16: a zero byte goes below it.
E5M2_FIRST, E5M2_SECOND = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;"), tl.constexpr("prmt.b32 $0, $1, 0, 0x3414;")


def _neighbour(dtype: type, which: int, pairs: np.ndarray) -> np.ndarray:
    return pairs.view(dtype).reshape(*pairs.shape, 2)[..., which].astype(np.float16)


MEANINGS = {
    assembly.value: functools.partial(_neighbour, dtype, which)
    for dtype, both in (
        (np.int8, (INT8_FIRST, INT8_SECOND)),
        (ml_dtypes.float8_e4m3fn, (E4M3_FIRST, E4M3_SECOND)),
        (ml_dtypes.float8_e5m2, (E5M2_FIRST, E5M2_SECOND)),
    )
    for which, assembly in enumerate(both)
}
"""NumPy functions that the interpreter calls in place of the assembly."""


@triton.jit
def converted(stored, dtype: tl.constexpr):
    """Stored elements in the query's dtype, in which all of theirs are exact."""
    if stored.dtype.is_fp8() and dtype == tl.bfloat16:
        return stored.to(tl.float32).to(dtype)
    return stored.to(dtype)


@triton.jit
def _of_pairs(pairs, assembly: tl.constexpr):
    """One neighbour of each pair, in float16."""
    return tl.inline_asm_elementwise(assembly, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def neighbours(pairs, dtype: tl.constexpr):
    """The first and the second element of each pair of one-byte elements, in float16.

    Args:
      pairs: int16, each two neighbours along d.
      dtype: of the elements.
    """
    if dtype == tl.int8:
        both = _of_pairs(pairs, INT8_FIRST), _of_pairs(pairs, INT8_SECOND)
    elif dtype == tl.float8e4nv:
        both = _of_pairs(pairs, E4M3_FIRST), _of_pairs(pairs, E4M3_SECOND)
    else:
        both = _of_pairs(pairs, E5M2_FIRST), _of_pairs(pairs, E5M2_SECOND)
    return both


@triton.jit
def latents_of_rows(key, token_row, valid, dtype: tl.constexpr):
    """Latents of uint8 rows in ``dtype``: ``(k, k_rest)``, [512, block_n] and the rotary part, [64, block_n].

    Args:
      token_row: [block_n], page · page_size + row of the tokens of the step.
    """
    d, group, r = tl.arange(0, RANK), tl.arange(0, RANK // GROUP), tl.arange(0, ROPE_DIM)
    elements = key.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + token_row * ROW_BYTES
    scales = key.to(tl.pointer_type(tl.float32), bitcast=True) + token_row * (ROW_BYTES // 4) + FIRST_SCALE // 4
    rotary = key.to(tl.pointer_type(tl.bfloat16), bitcast=True) + token_row * (ROW_BYTES // 2) + FIRST_ROPE // 2
    k = tl.load(elements[None, :] + d[:, None], mask=valid[None, :], other=0.0)
    scale = tl.load(scales[None, :] + group[:, None], mask=valid[None, :], other=0.0)
    k_rest = tl.load(rotary[None, :] + r[:, None], mask=valid[None, :], other=0.0)
    block_n: tl.constexpr = k.shape[1]
    groups = tl.reshape(k.to(tl.float32), [RANK // GROUP, GROUP, block_n]) * scale[:, None, :]
    return tl.reshape(groups, [RANK, block_n]).to(dtype), k_rest.to(dtype)
