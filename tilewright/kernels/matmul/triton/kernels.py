# mypy: disable-error-code="assignment"
"""Grouped matmuls in Triton: rows times their group's matrix, and for each group the sum of outer products of its rows.

  rows, matrices  [rows, K] and [matrices, ...]; an element (k, n) of a matrix is at k · K_STRIDE + n · N_STRIDE
  tile            up to BLOCK_ROWS rows of one group, from ``tile_first`` on and before ``tile_end``; rows without a
                  matrix are in tiles of their own, whose matrix is -1, and get zeros
  left, right     [rows, LEFT] and [rows, RIGHT], whose outer products are summed over the rows of a group

Sums are float32 and have one order. Rows of others are masked where they are loaded, so they may hold anything.

Grids have one axis:
  rows_by_matrices  a program for each tile and each BLOCK_N columns of the result, GROUP tiles of rows beside each
                    other, which share the columns of a matrix in the L2 cache
  outer_products    a program for each tile of each matrix
"""

import triton
import triton.language as tl


@triton.jit
def rows_by_matrices(
    rows, matrices, tile_matrix, tile_first, tile_end, tiles, out,
    K: tl.constexpr, N: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_N columns of the result of one tile of rows."""
    per_group: tl.constexpr = GROUP * ((N + BLOCK_N - 1) // BLOCK_N)
    program = tl.program_id(0)
    # GROUP tiles of rows take the same columns one after another, which the L2 cache then holds; the last group may
    # have fewer tiles.
    first_tile = program // per_group * GROUP
    count = tl.minimum(tiles - first_tile, GROUP)
    tile = first_tile + program % per_group % count
    column = program % per_group // count
    matrix, first, end = tl.load(tile_matrix + tile), tl.load(tile_first + tile), tl.load(tile_end + tile)
    # The grid has a program for each tile that there may be: sizes of groups are known on the device only.
    if first < end:
        row = first + tl.arange(0, BLOCK_ROWS)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        inside = (row < end)[:, None]
        # Stays zeros where rows have no matrix.
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
        if matrix >= 0:
            # In 64 bits: an array may have more than 2³¹ elements. Steps of K are added to the pointers, which takes no
            # multiplication in the loop.
            left = rows + row.to(tl.int64)[:, None] * K + k[None, :]
            right = matrices + matrix.to(tl.int64) * (K * N) + k[:, None] * K_STRIDE + n[None, :] * N_STRIDE
            for step in tl.range(0, K, BLOCK_K):
                # K is static: where a step divides it, no mask along K is made.
                if K % BLOCK_K == 0:
                    a = tl.load(left, mask=inside, other=0.0)
                    b = tl.load(right, mask=n[None, :] < N, other=0.0)
                else:
                    a = tl.load(left, mask=inside & (step + k[None, :] < K), other=0.0)
                    b = tl.load(right, mask=(n[None, :] < N) & (step + k[:, None] < K), other=0.0)
                accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
                left += BLOCK_K
                right += BLOCK_K * K_STRIDE
        pointers = out + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(pointers, accumulator.to(out.dtype.element_ty), mask=inside & (n[None, :] < N))


@triton.jit
def outer_products(
    left, right, starts, ends, out,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of ``leftᵀ · right`` over the rows of one group; zeros if it has none."""
    # The tiles of one matrix are neighbours: they read the same rows of both sides.
    across: tl.constexpr = (RIGHT + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    per_matrix: tl.constexpr = across * ((LEFT + BLOCK_LEFT - 1) // BLOCK_LEFT)
    program = tl.program_id(0)
    matrix, tile = program // per_matrix, program % per_matrix
    i = tile // across * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    j = tile % across * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    start, end = tl.load(starts + matrix), tl.load(ends + matrix)
    accumulator = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
    # A matrix without rows has no iteration, and gets zeros.
    for first in tl.range(start, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside, row = row < end, row.to(tl.int64)
        # Rows of others are zeros on both sides: a zero on one side times their NaN would be NaN.
        a = tl.load(left + row[None, :] * LEFT + i[:, None], mask=inside[None, :] & (i[:, None] < LEFT), other=0.0)
        b = tl.load(right + row[:, None] * RIGHT + j[None, :], mask=inside[:, None] & (j[None, :] < RIGHT), other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    pointers = out + matrix.to(tl.int64) * (LEFT * RIGHT) + i[:, None] * RIGHT + j[None, :]
    tl.store(pointers, accumulator.to(out.dtype.element_ty), mask=(i[:, None] < LEFT) & (j[None, :] < RIGHT))
