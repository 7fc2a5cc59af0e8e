# mypy: disable-error-code="assignment"
"""Statistics and gradients of logits in Triton, a tile of tokens and classes per program.

  x, weight, bias, logits   as in ``linear_logits``; of WIDTH classes those from VOCAB on are padding, so that loads of
              several classes are not cut
  labels      [rows]; one that is not a class, such as that of a token to ignore, matches no class

Rows and classes that a tile has beyond the arrays are masked where they are loaded and where they count. Every sum has
one order. Grids have one axis; GROUP tiles of rows take the same classes one after another, which the L2 cache holds.
"""

import triton
import triton.language as tl

from tilewright.kernels.triton.linear_logits import decode_tile, linear_logits

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_statistics(
    x, weight, bias, labels, rows, tiles, tile_lse, label_logit, logit_sum, kept,
    D: tl.constexpr, VOCAB: tl.constexpr, D_STRIDE: tl.constexpr, VOCAB_STRIDE: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Reduces the logits of a tile by row.

    tile_lse, logit_sum  [tiles of classes, rows]: log Σ exp(logits), and with SUM their sum
    label_logit          [rows], written by the program whose classes have the label
    kept                 [rows, WIDTH]: with KEEP ``exp(logit - tile_lse) ·`` the derivative of the soft cap
    """
    row_tile, column = decode_tile(tl.program_id(0), tiles, VOCAB, BLOCK_V, GROUP)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    classes = column * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = linear_logits(
        x, weight, bias, row, classes, rows, D, WIDTH, D_STRIDE, VOCAB_STRIDE, BIAS, CAP, BLOCK_ROWS, BLOCK_V,
        BLOCK_K, PRECISION,
    )  # fmt: skip
    inside, class_inside = row < rows, (classes < VOCAB)[None, :]
    label = tl.load(labels + row, mask=inside, other=-1)
    begin, partial = column * BLOCK_V, column.to(tl.int64) * rows + row
    # What needs the logits comes first: with the exponentials they would not fit into registers.
    own = tl.sum(tl.where(classes[None, :] == label[:, None], logits, 0.0), 1)
    is_here = (label >= begin) & (label < tl.minimum(begin + BLOCK_V, VOCAB))
    # One program has a row's label, so plain stores suffice; for a label that is not a class none is written.
    tl.store(label_logit + row, own, mask=inside & is_here)
    if SUM:
        tl.store(logit_sum + partial, tl.sum(tl.where(class_inside, logits, 0.0), 1), mask=inside)
    # Masked only for the maximum and the exponentials: −∞ must not reach the sum of logits above.
    if VOCAB % BLOCK_V != 0:
        logits = tl.where(class_inside, logits, float("-inf"))
    highest = tl.max(logits, 1)
    # A bias may rule out all classes of a tile with -inf, and -inf - -inf would be NaN.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2((logits - highest[:, None]) * LOG2E)
    total = tl.sum(shares, 1)
    lse = highest + tl.log(total)
    tl.store(tile_lse + partial, lse, mask=inside)
    if KEEP:
        if CAP > 0.0:
            # Not the same exponentials, which would be beside the logits.
            shares = tl.exp2((logits - tl.where(total == 0.0, 0.0, lse)[:, None]) * LOG2E)
            ratio = logits * (1.0 / CAP)
            shares *= 1.0 - ratio * ratio
        else:
            shares *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        # An element of the tile is counted by 32 bits, the tile by 64.
        pointers = kept + (row_tile.to(tl.int64) * BLOCK_ROWS * WIDTH + begin)
        pointers += tl.arange(0, BLOCK_ROWS)[:, None] * WIDTH + tl.arange(0, BLOCK_V)[None, :]
        tl.store(pointers, shares.to(kept.dtype.element_ty), mask=inside[:, None] & (classes < WIDTH)[None, :])


@triton.jit
def tile_gradient(
    x, weight, bias, labels, lse, of_lse, of_label, of_sum, bounds, rows, tiles, out,
    D: tl.constexpr, VOCAB: tl.constexpr, WIDTH: tl.constexpr, D_STRIDE: tl.constexpr, VOCAB_STRIDE: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, SUM: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of the gradient of ``x · weight + bias`` of SIZE classes, [rows, SIZE].

    The first class is ALIGN times the first of the ``bounds``; the second is the first class that does not get zeros.
    """
    row_tile, column = decode_tile(tl.program_id(0), tiles, SIZE, BLOCK_V, GROUP)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = column * BLOCK_V + tl.arange(0, BLOCK_V)
    # The product tells Triton that the first class is a multiple of ALIGN, so that several classes are one load.
    begin, first = tl.load(bounds) * ALIGN, tl.load(bounds + 1)
    classes = begin + place
    logits = linear_logits(
        x, weight, bias, row, classes, rows, D, WIDTH, D_STRIDE, VOCAB_STRIDE, BIAS, CAP, BLOCK_ROWS, BLOCK_V,
        BLOCK_K, PRECISION,
    )  # fmt: skip
    inside = row < rows
    label = tl.load(labels + row, mask=inside, other=-1)
    # Rows to ignore have lse = +inf, and so no probabilities.
    probabilities = tl.exp2((logits - tl.load(lse + row, mask=inside, other=0.0)[:, None]) * LOG2E)
    if EPSILON > 0.0:
        probabilities = tl.where(probabilities < EPSILON, 0.0, probabilities)
    # In float32 until it is stored: where a probability is near 1 it and the label's −1 cancel.
    gradient = tl.load(of_lse + row, mask=inside, other=0.0)[:, None] * probabilities
    own = classes[None, :] == label[:, None]
    gradient += tl.where(own, tl.load(of_label + row, mask=inside, other=0.0)[:, None], 0.0)
    if SUM:
        gradient += tl.load(of_sum + row, mask=inside, other=0.0)[:, None]
    if CAP > 0.0:
        ratio = logits * (1.0 / CAP)
        gradient *= 1.0 - ratio * ratio
    # Blocks may overlap so that all have one size: classes that an earlier block has done get zeros. So does padding.
    gradient = tl.where(((classes >= first) & (classes < VOCAB))[None, :], gradient, 0.0)
    pointers = out + (row_tile.to(tl.int64) * BLOCK_ROWS * SIZE + column * BLOCK_V)
    pointers += tl.arange(0, BLOCK_ROWS)[:, None] * SIZE + tl.arange(0, BLOCK_V)[None, :]
    tl.store(pointers, gradient.to(out.dtype.element_ty), mask=inside[:, None] & (place < SIZE)[None, :])
