# mypy: disable-error-code="assignment"
"""The triangular inverse of the delta rule in Triton, one chunk of one key head per program.

  L     ``tril(β_i k_i · k_j, -1)`` of the tokens of a chunk, [64, 64]; the rows of what is not a token are 0
  T0    ``(I + L)⁻¹``, lower triangular with ones on the diagonal: no gate is in it, since ``T = Γ ⊙ T0``; NaN from the
        first row on whose row of L is not finite

With float16 operands the blocks of 16 on the diagonal are inverted by forward substitution in float32, all four at
once. Two merges follow, of blocks of 16 and then of 32: with X the inverse of the blocks and M the blocks of L below
them, ``X - X M X`` is the inverse of the pairs. The other blocks of M are zeros, so this is the product X22 L21 X11 for
each pair, by full tiles. In float32, whose matmuls are three of TensorFloat-32, substitution goes on to blocks of 32,
and the only merge multiplies these. Powers of L would need none of it, but lose all digits where keys are alike.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import broken_from, finite, first_broken

SIZE = tl.constexpr(64)


@triton.jit
def eliminate(on_diagonal, inverse, i, j, step):
    """A step of forward substitution: takes the multiples of a row from those below it."""
    column = tl.sum(tl.where(j == step, on_diagonal, 0.0), 2)
    row = tl.sum(tl.where(i == step, inverse, 0.0), 1)
    return inverse - column[:, :, None] * row[:, None, :]


@triton.jit
def invert_blocks(lower, BLOCK: tl.constexpr):
    """The inverses [blocks, BLOCK, BLOCK] of I plus the diagonal blocks of a strictly lower triangular matrix."""
    BLOCKS: tl.constexpr = SIZE // BLOCK
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    # The sum has one term that is not 0.
    on_diagonal = tl.sum(tl.where(same, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32) + tl.where(i == j, 1.0, 0.0)
    if BLOCK <= 16:
        for step in tl.static_range(BLOCK - 1):
            inverse = eliminate(on_diagonal, inverse, i, j, step)
    else:
        for step in tl.range(BLOCK - 1):
            inverse = eliminate(on_diagonal, inverse, i, j, step)
    return inverse


@triton.jit
def invert_tiles(lower, operand: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I plus a strictly lower triangular matrix, by matmuls of full tiles with operands of a dtype."""
    inverse = invert_blocks(lower, 16)
    block = tl.arange(0, SIZE // 16)
    same = block[:, None, None, None] == block[None, None, :, None]
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (SIZE, SIZE))
    inverse = merge_blocks(inverse, lower, 16, operand, PRECISION)
    return merge_blocks(inverse, lower, 32, operand, PRECISION)


@triton.jit
def invert_narrow(lower):
    """The same with operands of float16."""
    return invert_tiles(lower, tl.float16, "tf32")


@triton.jit
def invert_wide(lower):
    """The same in float32, by blocks of 32."""
    HALF: tl.constexpr = SIZE // 2
    inverse = invert_blocks(lower, HALF)
    half = tl.arange(0, 2)
    first = tl.sum(tl.where(half[:, None, None] == 0, inverse, 0.0), 0)
    second = tl.sum(tl.where(half[:, None, None] == 1, inverse, 0.0), 0)
    a, b = half[:, None, None, None], half[None, None, :, None]
    below = tl.sum(tl.where((a == 1) & (b == 0), tl.reshape(lower, (2, HALF, 2, HALF)), 0.0), 2)
    left = tl.dot(second, tl.sum(below, 0), input_precision="tf32x3")
    product = tl.dot(left, first, input_precision="tf32x3")
    lower_left = tl.where((a == 1) & (b == 0), -product[None, :, None, :], 0.0)
    return tl.reshape(tl.where(a == b, inverse[:, :, None, :], lower_left), (SIZE, SIZE))


@triton.jit
def merge_blocks(inverse, lower, HALF: tl.constexpr, operand: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I plus the blocks of 2 · HALF on the diagonal, from that of the blocks of HALF."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    below = tl.where((i // (2 * HALF) == j // (2 * HALF)) & (i // HALF != j // HALF), lower, 0.0)
    blocks = inverse.to(operand)
    product = tl.dot(blocks, below.to(operand), input_precision=PRECISION).to(operand)
    return inverse - tl.dot(product, blocks, input_precision=PRECISION)


@triton.jit
def chunk_inverse(
    key, beta, chunks, out,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes T0 of a chunk for every value head of a key head; the program's number is ``chunk · H + head``.

    key, beta   [rows, H, K] and [rows, HV]
    chunks      as in ``ChunkTable``
    out         [chunks, HV, 64, 64], in the dtype of the merges' operands; chunks without a token are not written
    """
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 2)
    if tokens > 0:
        i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
        inside = i < tokens
        products = tl.zeros((SIZE, SIZE), tl.float32)
        rows = key + (first * H + head) * K + (i * (H * K))[:, None] + k[None, :]
        for step in tl.range(0, K, BLOCK_K):
            # Rows of padding may hold NaN, so they are masked rather than multiplied by 0.
            mask = inside[:, None] & (step + k < K)[None, :]
            block = tl.load(rows + step, mask=mask, other=0.0)
            products = tl.dot(block, tl.trans(block), products, input_precision=PRECISION)
        below = i[:, None] > i[None, :]
        place = i[:, None] * SIZE + i[None, :]
        group: tl.constexpr = HV // H
        for member in tl.range(group):
            value_head = head * group + member
            strength = tl.load(beta + first * HV + value_head + i * HV, mask=inside, other=0.0).to(tl.float32)
            lower = tl.where(below, strength[:, None] * products, 0.0)
            broken, lower = first_broken(lower, None), finite(lower)
            inverse = invert_narrow(lower) if out.dtype.element_ty == tl.float16 else invert_wide(lower)
            target = out + (chunk.to(tl.int64) * HV + value_head) * (SIZE * SIZE)
            tl.store(target + place, broken_from(inverse, broken).to(out.dtype.element_ty))
