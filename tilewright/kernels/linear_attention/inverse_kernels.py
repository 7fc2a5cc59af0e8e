# mypy: disable-error-code="assignment"
"""The triangular inverse of the delta rule in Triton, one chunk of one key head per program.

  L     ``tril(β_i k_i · k_j, -1)`` of the tokens of a chunk, [64, 64]; the rows of what is not a token are 0
  T0    ``(I + L)⁻¹``, lower triangular with ones on the diagonal: no gate is in it, since ``T = Γ ⊙ T0``

The blocks of 16 on the diagonal are inverted by forward substitution in float32, all four at once. Two merges follow,
of blocks of 16 and then of 32: with X the inverse of the blocks and M the blocks of L below them, ``X - X M X`` is the
inverse of the pairs. The other blocks of M are zeros, so this is the product X22 L21 X11 for each pair. Powers of L
would need none of it, but lose all digits where keys are alike.
"""

import triton
import triton.language as tl

SIZE = tl.constexpr(64)
BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def invert_blocks(lower):
    """The inverses of I plus the blocks of 16 on the diagonal of a strictly lower triangular matrix, [64, 64]."""
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    # The sum has one term that is not 0.
    on_diagonal = tl.sum(tl.where(same, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32) + tl.where(i == j, 1.0, 0.0)
    for step in tl.static_range(BLOCK - 1):
        column = tl.sum(tl.where(j == step, on_diagonal, 0.0), 2)
        row = tl.sum(tl.where(i == step, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (SIZE, SIZE))


@triton.jit
def merge_blocks(inverse, lower, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I plus the blocks of 2 · HALF on the diagonal, from that of the blocks of HALF."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    below = tl.where((i // (2 * HALF) == j // (2 * HALF)) & (i // HALF != j // HALF), lower, 0.0)
    blocks = inverse.to(OPERAND)
    left = tl.dot(blocks, below.to(OPERAND), input_precision=PRECISION)
    return inverse - tl.dot(left.to(OPERAND), blocks, input_precision=PRECISION)


@triton.jit
def chunk_inverse(
    key, beta, chunks, out,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, KEY_PRECISION: tl.constexpr,
    PRECISION: tl.constexpr,
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
        for step in tl.static_range(0, K, BLOCK_K):
            # Rows of padding may hold NaN, so they are masked rather than multiplied by 0.
            mask = inside[:, None] & (step + k < K)[None, :]
            block = tl.load(rows + step, mask=mask, other=0.0)
            products = tl.dot(block, tl.trans(block), products, input_precision=KEY_PRECISION)
        below = i[:, None] > i[None, :]
        place = i[:, None] * SIZE + i[None, :]
        group: tl.constexpr = HV // H
        for member in tl.range(group):
            value_head = head * group + member
            strength = tl.load(beta + first * HV + value_head + i * HV, mask=inside, other=0.0).to(tl.float32)
            lower = tl.where(below, strength[:, None] * products, 0.0)
            inverse = invert_blocks(lower)
            inverse = merge_blocks(inverse, lower, 16, out.dtype.element_ty, PRECISION)
            inverse = merge_blocks(inverse, lower, 32, out.dtype.element_ty, PRECISION)
            target = out + (chunk.to(tl.int64) * HV + value_head) * (SIZE * SIZE)
            tl.store(target + place, inverse.to(out.dtype.element_ty))
