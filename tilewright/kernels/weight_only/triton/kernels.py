# mypy: disable-error-code="assignment"
"""Rows of x times a weight of few bits, in Triton: out = x · wᵀ with w [N, K].

  x       [BATCH, M, K]
  codes   [BATCH or 1, units, N, 16] words of 16 bits, in the order of ``packing``
  scales  [BATCH or 1, groups, N], or bytes of E8M0
  zeros   as scales, or no elements
  out     [BATCH, SPLITS, M, N]: sums of parts of K in float32, which the caller adds up in their order; with one part
          the result

The weight is the left operand of the MMAs and stays in registers, of which x is the right one: W · xᵀ. A span of SPAN
rows of the weight is one tile of words and the sum of one MMA for each of its planes.

Scales multiply either the sums of a group, in float32 (few rows: sums are fewer than elements of the weight), or
(OPERAND_SCALES, many rows) the elements, which are rounded to x's dtype, as XLA's are.

Grids: programs of BLOCK_N columns and BLOCK_M rows, GROUP_M tiles of rows beside each other; parts of K; the batch.
"""

import triton
import triton.language as tl

from tilewright.kernels.weight_only.triton.elements import (
    MEANINGS,  # noqa: F401 - the interpreter looks for it in the module of a kernel
    values_of,
)


@triton.jit
def loaded_scales(scales, at, inside, EVEN: tl.constexpr, E8M0: tl.constexpr):
    """Scales in float32, of columns that are inside."""
    if EVEN:
        found = tl.load(scales + at)
    else:
        found = tl.load(scales + at, mask=inside, other=0)
    if E8M0:
        # A power of two is its exponent; that of 0 is the subnormal 2^-127, and 255 is NaN.
        biased = found.to(tl.int32)
        bits = tl.where(biased == 0, 0x00400000, tl.where(biased == 255, 0x7FC00000, biased << 23))
        found = bits.to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def plane_values(
    words, offset, PLANE: tl.constexpr, HAS_OFFSET: tl.constexpr, ASM_0: tl.constexpr, ASM_1: tl.constexpr,
    ASM_2: tl.constexpr, ASM_3: tl.constexpr,
):  # fmt: skip
    """The values of a plane of words, less zero points."""
    offset = tl.broadcast_to(offset, words.shape)
    if PLANE == 0:
        found = values_of(words, offset, ASM_0, HAS_OFFSET)
    elif PLANE == 1:
        found = values_of(words, offset, ASM_1, HAS_OFFSET)
    elif PLANE == 2:
        found = values_of(words, offset, ASM_2, HAS_OFFSET)
    else:
        found = values_of(words, offset, ASM_3, HAS_OFFSET)
    return found


@triton.jit
def rows_by_packed(
    x, codes, scales, zeros, M, out,
    K: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E8M0: tl.constexpr, SHARED: tl.constexpr, ASM_0: tl.constexpr, ASM_1: tl.constexpr,
    ASM_2: tl.constexpr, ASM_3: tl.constexpr, OPERAND_SCALES: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes a tile of BLOCK_M rows and BLOCK_N columns over one of SPLITS parts of K.

    GROUP is a multiple of SPAN, or half of it where SPAN is one unit of four planes; 0 for one scale of a column.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    PLANES: tl.constexpr = UNIT // 16
    WORDS: tl.constexpr = SPAN // PLANES
    UNITS: tl.constexpr = (K + UNIT - 1) // UNIT
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    STEP: tl.constexpr = SPAN * SPANS
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    # Of a span's planes the sums are scaled together, unless it has two groups.
    PARTS: tl.constexpr = SPAN // GROUP if (GROUP > 0 and GROUP < SPAN) else 1
    SCALED_SUMS: tl.constexpr = GROUP > 0 and not OPERAND_SCALES
    EVEN_K: tl.constexpr = K % STEP == 0 and STEPS % SPLITS == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N

    program = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    # Tiles of the same columns are neighbours: the L2 cache then has their codes.
    first_tile = program // (GROUP_M * COLUMNS) * GROUP_M
    count = tl.minimum(tl.cdiv(M, BLOCK_M) - first_tile, GROUP_M)
    tile = first_tile + program % (GROUP_M * COLUMNS) % count
    column = program % (GROUP_M * COLUMNS) // count

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, WORDS)
    inside = n < N
    if not SHARED:
        codes += batch * (UNITS * N * 32)
        scales += batch * (GROUPS * N)
        zeros += batch * (GROUPS * N)
    words_of = codes.to(tl.pointer_type(tl.int16), bitcast=True) + (n * 16)[:, None]
    rows_of = x + batch * M * K + (row.to(tl.int64) * K)[None, :]
    # Words of a unit follow one another; units are N columns apart.
    word_at = (word // 16 * (N * 16) + word % 16)[None, :]
    k_at = (word // 16 * UNIT + word % 16)[:, None]
    valid_rows = (row < M)[None, :]

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale = tl.full((BLOCK_N,), 1.0, tl.float32)
    offset = tl.full((BLOCK_N, 1), ZERO, dtype)
    if GROUP == 0:
        scale = loaded_scales(scales, n, inside, EVEN_N, E8M0)
        if HAS_ZEROS:
            offset = (ZERO - loaded_scales(zeros, n, inside, EVEN_N, False)).to(dtype)[:, None]
    # With constant bounds the loop is known to run; ptxas serialises wgmmas whose sums may be the zeros before it.
    first = split * PER_SPLIT if SPLITS > 1 else 0
    last = tl.minimum(first + PER_SPLIT, STEPS) if SPLITS > 1 else STEPS
    for step in tl.range(first, last, num_stages=STAGES):
        for nth_span in tl.static_range(SPANS):
            span = step * SPANS + nth_span
            word_pointers = words_of + word_at + span * (WORDS // 16 * N * 16)
            if EVEN_K and EVEN_N:
                words = tl.load(word_pointers)
            else:
                unit = span * (WORDS // 16) + word // 16
                words = tl.load(word_pointers, mask=inside[:, None] & (unit < UNITS)[None, :], other=0)
            for part in tl.static_range(PARTS):
                if GROUP > 0:
                    # Behind the last row codes meet zeros, but what is read must be a scale.
                    group = tl.minimum((span * SPAN + part * GROUP) // GROUP, GROUPS - 1)
                    scale = loaded_scales(scales, group * N + n, inside, EVEN_N, E8M0)
                    if HAS_ZEROS:
                        offset = (ZERO - loaded_scales(zeros, group * N + n, inside, EVEN_N, False)).to(dtype)[:, None]
                sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SCALED_SUMS else total
                for plane in tl.static_range(part * (PLANES // PARTS), (part + 1) * (PLANES // PARTS)):
                    k = k_at + (span * SPAN + 16 * plane)
                    right = tl.load(rows_of + k, mask=valid_rows if EVEN_K else valid_rows & (k < K), other=0.0)
                    left = plane_values(words, offset, plane, not E8M0, ASM_0, ASM_1, ASM_2, ASM_3)
                    if OPERAND_SCALES:
                        left = (left.to(tl.float32) * scale[:, None]).to(dtype)
                    sums = tl.dot(left, right, sums)
                total = total + sums * scale[:, None] if SCALED_SUMS else sums
    if GROUP == 0 and not OPERAND_SCALES:
        total *= scale[:, None]
    pointers = out + ((batch * SPLITS + split) * M + row.to(tl.int64))[None, :] * N + n[:, None]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=valid_rows & inside[:, None])
