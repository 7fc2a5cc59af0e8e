# mypy: disable-error-code="assignment"
"""Gated grouped matmuls in Triton: two products of the same rows and an activation, and the gradient of the rows.

  rows                        [rows, K]
  gates, ups                  [matrices, ...]; an element (k, n) is at k · K_STRIDE + n · N_STRIDE
  tile_matrix, tile_first,
  tile_end                    as in ``kernels``

The grid is that of ``kernels.rows_by_matrices``. Sums and the activation are in float32.
"""

import triton
import triton.language as tl

from tilewright.kernels.triton.activations import activated


@triton.jit
def tile_of(tile_matrix, tile_first, tile_end, tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The program's matrix, first row, the row behind its segment, and its block of columns, of COLUMNS."""
    program = tl.program_id(0)
    # GROUP tiles of rows take the same columns one after another, which the L2 cache then holds; the last group may
    # have fewer tiles.
    first_tile = program // (GROUP * COLUMNS) * GROUP
    count = tl.minimum(tiles - first_tile, GROUP)
    tile = first_tile + program % (GROUP * COLUMNS) % count
    column = program % (GROUP * COLUMNS) // count
    return tl.load(tile_matrix + tile), tl.load(tile_first + tile), tl.load(tile_end + tile), column


@triton.jit
def gated_rows_by_matrices(
    rows, gates, ups, tile_matrix, tile_first, tile_end, tiles, out, of_gate, of_up,
    K: tl.constexpr, N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_N columns of ``act(rows · gate) * (rows · up)`` of one tile of rows.

    With KEEP it stores both pre-activations, too.
    """
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    matrix, first, end, column = tile_of(tile_matrix, tile_first, tile_end, tiles, COLUMNS, GROUP)
    if first < end:
        row = first + tl.arange(0, BLOCK_ROWS)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        inside = (row < end)[:, None]
        # Two accumulators over one loop: a tile of rows is loaded once for both matrices.
        gate = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
        if matrix >= 0:
            # In 64 bits: an array may have more than 2³¹ elements.
            left = rows + row.to(tl.int64)[:, None] * K + k[None, :]
            of_matrix = matrix.to(tl.int64) * (K * N) + k[:, None] * K_STRIDE + n[None, :] * N_STRIDE
            gate_pointers, up_pointers = gates + of_matrix, ups + of_matrix
            for step in tl.range(0, K, BLOCK_K):
                # K is static: where a step divides it, no mask along K is made.
                if K % BLOCK_K == 0:
                    a = tl.load(left, mask=inside, other=0.0)
                    b = tl.load(gate_pointers, mask=n[None, :] < N, other=0.0)
                    c = tl.load(up_pointers, mask=n[None, :] < N, other=0.0)
                else:
                    a = tl.load(left, mask=inside & (step + k[None, :] < K), other=0.0)
                    b = tl.load(gate_pointers, mask=(n[None, :] < N) & (step + k[:, None] < K), other=0.0)
                    c = tl.load(up_pointers, mask=(n[None, :] < N) & (step + k[:, None] < K), other=0.0)
                gate = tl.dot(a, b, gate, input_precision=PRECISION)
                up = tl.dot(a, c, up, input_precision=PRECISION)
                left += BLOCK_K
                gate_pointers += BLOCK_K * K_STRIDE
                up_pointers += BLOCK_K * K_STRIDE
        at = row.to(tl.int64)[:, None] * N + n[None, :]
        mask = inside & (n[None, :] < N)
        # The output is of what the sums were before they are rounded to be kept, as in XLA's backend.
        if KEEP:
            tl.store(of_gate + at, gate.to(of_gate.dtype.element_ty), mask=mask)
            tl.store(of_up + at, up.to(of_up.dtype.element_ty), mask=mask)
        tl.store(out + at, (activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def added_product(
    accumulator, left, right, row, inside, column, matrix,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, DEPTH_STRIDE: tl.constexpr, WIDTH_STRIDE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds rows of ``left`` times a matrix of ``right``, of DEPTH times WIDTH elements in the layout of the strides."""
    depth = tl.arange(0, BLOCK_DEPTH)
    a_pointers = left + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    of_matrix = depth[:, None] * DEPTH_STRIDE + column[None, :] * WIDTH_STRIDE
    b_pointers = right + matrix.to(tl.int64) * (DEPTH * WIDTH) + of_matrix
    for step in tl.range(0, DEPTH, BLOCK_DEPTH):
        if DEPTH % BLOCK_DEPTH == 0:
            a = tl.load(a_pointers, mask=inside, other=0.0)
            b = tl.load(b_pointers, mask=column[None, :] < WIDTH, other=0.0)
        else:
            a = tl.load(a_pointers, mask=inside & (step + depth[None, :] < DEPTH), other=0.0)
            b = tl.load(b_pointers, mask=(column[None, :] < WIDTH) & (step + depth[:, None] < DEPTH), other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_pointers += BLOCK_DEPTH
        b_pointers += BLOCK_DEPTH * DEPTH_STRIDE
    return accumulator


@triton.jit
def gradient_of_rows(
    d_gate, d_up, gates, ups, tile_matrix, tile_first, tile_end, tiles, out,
    K: tl.constexpr, N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_K columns of ``d_gate · gateᵀ + d_up · upᵀ`` of one tile of rows, rounded once."""
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    matrix, first, end, column = tile_of(tile_matrix, tile_first, tile_end, tiles, COLUMNS, GROUP)
    if first < end:
        row = first + tl.arange(0, BLOCK_ROWS)
        k = column * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (row < end)[:, None]
        total = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
        if matrix >= 0:
            # One sum for both products, one after another: side by side their operands would take twice the memory.
            total = added_product(
                total, d_gate, gates, row, inside, k, matrix, N, K, N_STRIDE, K_STRIDE, BLOCK_N, PRECISION
            )
            total = added_product(
                total, d_up, ups, row, inside, k, matrix, N, K, N_STRIDE, K_STRIDE, BLOCK_N, PRECISION
            )
        at = row.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside & (k[None, :] < K))
