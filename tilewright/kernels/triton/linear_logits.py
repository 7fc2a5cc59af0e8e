# mypy: disable-error-code="assignment"
"""The logits of a linear head in Triton, a tile of rows and classes per program.

x, weight   [rows, D], and the matrix, whose element (k, class) is at k · D_STRIDE + class · VOCAB_STRIDE, of WIDTH
            classes
bias        [WIDTH] in float32, if BIAS
logits      x · weight + bias, with CAP > 0 ``CAP · tanh(of that / CAP)``: float32, only in registers
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_tile(program, tiles, CLASSES: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr):
    """The numbers of a program's tile of rows and of its tile of classes."""
    per_group: tl.constexpr = GROUP * ((CLASSES + BLOCK_V - 1) // BLOCK_V)
    first_tile = program // per_group * GROUP
    # The last group may have fewer tiles.
    count = tl.minimum(tiles - first_tile, GROUP)
    return first_tile + program % per_group % count, program % per_group // count


@triton.jit
def linear_logits(
    x, weight, bias, row, classes, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, D_STRIDE: tl.constexpr, VOCAB_STRIDE: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits of a tile; beyond the arrays x and weight are zeros."""
    k = tl.arange(0, BLOCK_K)
    # In 64 bits: a matrix may have more than 2³¹ elements. Steps of D are added to the pointers, which takes no
    # multiplication in the loop.
    left = x + row.to(tl.int64)[:, None] * D + k[None, :]
    right = weight + k[:, None] * D_STRIDE + classes.to(tl.int64)[None, :] * VOCAB_STRIDE
    row_inside, class_inside = (row < rows)[:, None], (classes < WIDTH)[None, :]
    logits = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    for step in tl.range(0, D, BLOCK_K):
        # D is static: where a step divides it, no mask along it is made.
        if D % BLOCK_K == 0:
            a = tl.load(left, mask=row_inside, other=0.0)
            b = tl.load(right, mask=class_inside, other=0.0)
        else:
            a = tl.load(left, mask=row_inside & (step + k[None, :] < D), other=0.0)
            b = tl.load(right, mask=class_inside & (step + k[:, None] < D), other=0.0)
        logits = tl.dot(a, b, logits, input_precision=PRECISION)
        left += BLOCK_K
        right += BLOCK_K * D_STRIDE
    if BIAS:
        logits += tl.load(bias + classes, mask=classes < WIDTH, other=0.0)[None, :]
    if CAP > 0.0:
        u = logits * (1.0 / CAP)
        # tanh(u) = 1 - 2 / (exp(2 u) + 1) neither overflows nor needs a library; near 0 it cancels, and the series does
        # not.
        square = u * u
        series = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        ratio = tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp2(u * (2.0 * LOG2E)) + 1.0))
        logits = CAP * ratio
    return logits
