# mypy: disable-error-code="assignment"
"""The triangular inverse of the delta rule in Triton, by programs of one warp.

  L     ``tril(β_i k_i · k_j, -1)`` of the tokens of a chunk, [64, 64]; the rows of what is not a token are 0
  T0    ``(I + L)⁻¹``, lower triangular with ones on the diagonal: no gate is in it, since ``T = Γ ⊙ T0``; NaN from the
        first row on whose row of L is not finite

With X the inverse of the blocks of a size on the diagonal, and N the blocks of -L below them, ``X + X N X`` is that of
the pairs of blocks. Merges begin at pairs of tokens, ``I - L``; up to 16 the four blocks on the diagonal are taken at
once, then two of 32, then 64. Powers of L would need fewer steps, but lose all digits where keys are alike.

In a warp the accumulator of an MMA is laid out like the first operand of the next, and like the transpose of its
second. So a product ``a bᵀ`` of results needs no exchange between threads: all have this form, for which Xᵀ is kept as
well. With ``Y = Xᵀ Nᵀ``, the merges are ``X + X Yᵀ`` and ``Xᵀ + Y Xᵀ``. Blocks are picked by sums whose other terms are
the constant -0: Triton knows which registers hold them, so that neither these terms nor the sums are computed, nor MMAs
of blocks that nobody picks.

With operands of float16, N in the last two merges is the sum of two: its rounding would be most of the error. In
float32 an operand is the sum of three bfloat16, and of the nine products the six largest are summed.
"""

import triton
import triton.language as tl

from tilewright.kernels.linear_attention.gate_kernels import finite, first_broken

SIZE = tl.constexpr(64)
BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def turned(x):
    """The transpose of a matrix, or of each of a stack."""
    return tl.trans(x) if len(x.shape) == 2 else tl.permute(x, (0, 2, 1))


@triton.jit
def high_part(x):
    """A float32 without its lower half: bfloat16 has it exactly. No instruction converts, and NaN stays NaN."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def three_parts(x):
    """Three bfloat16 whose sum is a float32, to the bit."""
    high = high_part(x)
    middle = high_part(x - high)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (x - high - middle).to(tl.bfloat16)


@triton.jit
def product(a, b, acc, NARROW: tl.constexpr):
    """``a bᵀ`` of what is rounded to float16, or nearly exact for float32, added to acc."""
    if NARROW:
        acc = tl.dot(a.to(tl.float16), turned(b.to(tl.float16)), acc)
    else:
        a0, a1, a2 = three_parts(a)
        b0, b1, b2 = three_parts(b)
        acc = tl.dot(a1, turned(b1), tl.dot(a2, turned(b0), tl.dot(a0, turned(b2), acc)))
        acc = tl.dot(a0, turned(b0), tl.dot(a1, turned(b0), tl.dot(a0, turned(b1), acc)))
    return acc


@triton.jit
def product_of_parts(a, b, acc, NARROW: tl.constexpr):
    """The same with b in two parts of float16."""
    if NARROW:
        high = b.to(tl.float16)
        acc = product(a, b - high.to(tl.float32), acc, NARROW)
        acc = product(a, high, acc, NARROW)
    else:
        acc = product(a, b, acc, NARROW)
    return acc


@triton.jit
def on_diagonal(x, COUNT: tl.constexpr):
    """The blocks on the diagonal of a square matrix, [COUNT, n, n]."""
    N: tl.constexpr = x.shape[0] // COUNT
    b = tl.arange(0, COUNT)
    same = b[:, None, None, None] == b[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, (COUNT, N, COUNT, N)), -0.0), 2)


@triton.jit
def below_diagonal(x, COUNT: tl.constexpr):
    """The lower left quarter of each of these blocks."""
    N: tl.constexpr = x.shape[0] // (2 * COUNT)
    lower = halves(tl.reshape(on_diagonal(x, COUNT), (2 * COUNT, N, 2 * N)))[1]
    left = tl.arange(0, 2)[None, None, :, None] == 0
    return tl.sum(tl.where(left, tl.reshape(lower, (COUNT, N, 2, N)), -0.0), 2)


@triton.jit
def halves(x):
    """Even and odd ones of a stack of matrices."""
    COUNT: tl.constexpr = x.shape[0] // 2
    x = tl.reshape(x, (COUNT, 2, x.shape[1], x.shape[2]))
    odd = tl.arange(0, 2)[None, :, None, None] == 1
    return tl.sum(tl.where(odd, -0.0, x), 1), tl.sum(tl.where(odd, x, -0.0), 1)


@triton.jit
def beside(a, b):
    """Columns of b behind those of a."""
    pair = tl.permute(tl.join(a, b), (0, 1, 3, 2))
    return tl.reshape(pair, (a.shape[0], a.shape[1], 2 * a.shape[2]))


@triton.jit
def above(a, b):
    """Rows of b behind those of a."""
    pair = tl.permute(tl.join(a, b), (0, 3, 1, 2))
    # The sum of one keeps Triton from choosing other operands for an MMA, as it does behind a join.
    return tl.sum(tl.reshape(pair, (1, a.shape[0], 2 * a.shape[1], a.shape[2])), 0)


@triton.jit
def inverses_on_diagonal(lower, NARROW: tl.constexpr):
    """The inverses [4, 16, 16] of I - lower, each strictly lower, and their transposes."""
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    # The highest bit in which row and column differ tells the size of the blocks that a merge joins there.
    apart = i ^ j
    inverse = tl.where(apart == 0, 1.0, tl.where(apart == 1, lower, 0.0))
    transposed = turned(inverse)
    for level in tl.range(1, 4):
        left = product(transposed, tl.where(apart >> level == 1, lower, 0.0), None, NARROW)
        merged = product(inverse, left, inverse, NARROW)
        transposed = product(left, inverse, transposed, NARROW)
        inverse = merged
    return inverse, transposed


@triton.jit
def inverse_of_blocks(diagonal, pairs, below, NARROW: tl.constexpr):
    """The inverse of I - a strictly lower matrix [64, 64]: blocks [2, 32, 32] on its diagonal, and the one below them.

    Args:
      diagonal: its blocks [4, 16, 16] on the diagonal, in float32.
      pairs: the blocks [2, 16, 16] below the first and the third of these.
      below: the lower left quarter, [1, 32, 32].
      NARROW: operands of matmuls are float16, where elements of the inverse are small.
    """
    inverse, transposed = inverses_on_diagonal(diagonal, NARROW)
    x00, x11 = halves(inverse)
    y00, y11 = halves(transposed)
    left = product_of_parts(y00, pairs, None, NARROW)
    x10, y10 = product(x11, left, None, NARROW), product(left, x11, None, NARROW)
    zero = tl.zeros((2, BLOCK, BLOCK), tl.float32)
    inverse = above(beside(x00, zero), beside(x10, x11))
    transposed = above(beside(y00, y10), beside(zero, y11))
    x11, y00 = halves(inverse)[1], halves(transposed)[0]
    left = product_of_parts(y00, below, None, NARROW)
    return inverse, product(x11, left, None, NARROW)


@triton.jit
def inverse_blocks(negative, NARROW: tl.constexpr):
    """The same of a matrix that is a sum of MMAs."""
    diagonal, pairs = on_diagonal(negative, BLOCKS), below_diagonal(negative, 2)
    return inverse_of_blocks(diagonal, pairs, below_diagonal(negative, 1), NARROW)


@triton.jit
def places(COUNT: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """Places of the elements of COUNT blocks [N, N] in a matrix [64, 64], STEP rows and columns apart."""
    b, i = tl.arange(0, COUNT), tl.arange(0, N)
    return b[:, None, None] * (STEP * SIZE + STEP) + i[None, :, None] * SIZE + i[None, None, :]


@triton.jit
def broken_rows(blocks, FIRST: tl.constexpr, row):
    """Blocks on a diagonal, of which the first has the row FIRST, that are NaN from a row of the matrix on."""
    b, i = tl.arange(0, blocks.shape[0]), tl.arange(0, blocks.shape[1])
    of_block = (b * blocks.shape[1] + FIRST)[:, None, None] + i[None, :, None]
    return tl.where(of_block < row, blocks, float("nan"))


@triton.jit
def store_diagonal(target, diagonal):
    """Stores the blocks [2, 32, 32] on the diagonal of a lower matrix [64, 64], and zeros above them."""
    HALF: tl.constexpr = SIZE // 2
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target + places(2, HALF, HALF), diagonal.to(dtype))
    tl.store(target + places(1, HALF, HALF) + HALF, tl.zeros((1, HALF, HALF), dtype))


@triton.jit
def store_lower_left(target, block):
    """Stores the block [1, 32, 32] below them."""
    HALF: tl.constexpr = SIZE // 2
    tl.store(target + places(1, HALF, HALF) + HALF * SIZE, block.to(target.dtype.element_ty))


@triton.jit
def chunk_inverse(
    key, beta, chunks, out,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes T0 of a chunk for every value head of a key head; the program's number is ``chunk · H + head``.

    key, beta   [rows, H, K] and [rows, HV]
    chunks      as in ``ChunkTable``
    out         [chunks, HV, 64, 64], in the dtype of operands of matmuls; chunks without a token are not written
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
        negative = tl.where(i[:, None] > i[None, :], -products, 0.0)
        group: tl.constexpr = HV // H
        for member in tl.range(group):
            value_head = head * group + member
            strength = tl.load(beta + first * HV + value_head + i * HV, mask=inside, other=0.0).to(tl.float32)
            target = out + (chunk.to(tl.int64) * HV + value_head) * (SIZE * SIZE)
            lower = strength[:, None] * negative
            broken = first_broken(lower, None)
            diagonal, lower_left = inverse_blocks(finite(lower), out.dtype.element_ty == tl.float16)
            store_diagonal(target, broken_rows(diagonal, 0, broken))
            store_lower_left(target, broken_rows(lower_left, SIZE // 2, broken))


@triton.jit
def invert_in_place(chunks, matrices, HV: tl.constexpr):
    """Writes the inverse of I - N over N, which is strictly lower, for a value head of a chunk that has a token.

    chunks      as in ``ChunkTable``
    matrices    [chunks, HV, 64, 64], float32
    """
    HALF: tl.constexpr = SIZE // 2
    if tl.load(chunks + 3 * (tl.program_id(0) // HV) + 2) > 0:
        target = matrices + tl.program_id(0).to(tl.int64) * (SIZE * SIZE)
        i = tl.arange(0, SIZE)
        broken = first_broken(tl.load(target + i[:, None] * SIZE + i[None, :]), None)
        diagonal = tl.load(target + places(BLOCKS, BLOCK, BLOCK))
        pairs = tl.load(target + BLOCK * SIZE + places(2, BLOCK, HALF))
        below = tl.load(target + HALF * SIZE + places(1, HALF, HALF))
        diagonal, below = inverse_of_blocks(finite(diagonal), finite(pairs), finite(below), False)
        store_diagonal(target, broken_rows(diagonal, 0, broken))
        store_lower_left(target, broken_rows(below, HALF, broken))
