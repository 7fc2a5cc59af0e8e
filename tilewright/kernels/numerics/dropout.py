"""The attention probabilities that a dropout keeps: one counter-based generator for every backend.

Element (batch, head, row, column) of a call with seed ``s`` is decided by 16 of the 64 bits of a call of Philox-2x32
with 10 rounds, which serves four elements: the rows r and r + 8 with the columns c and c + 8, where bit 3 of r and of c
is 0. One thread holds these four in a tensor core's accumulator, of the matrix and of its transpose alike. With
``(first, second) = threefry2x32(s, (batch, head))`` and ``i(x)``, x without its bit 3:

- the key is ``first``, the counter ``(i(row), i(column) ^ second)``;
- bit 3 of the row selects a word of the result, bit 3 of the column its lower or upper half;
- the element is kept iff that half is at least ``keep_threshold``.

No element depends on tiling, sharding or backend. Philox has a key of 32 bits, so two heads may get the same key. Their
masks still differ, because ``second`` gives them other counters: the two heads would have to agree in 64 bits, except
for those that count columns, to drop the same elements.

Philox-2x32 and Threefry-2x32: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A round of the
one is a multiplication and two exclusive ors; the other, of 20 rounds of three operations, makes the keys, in JAX's
form.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_PARITY = 0x1BD11BDA
PHILOX_MULTIPLIER = 0xD256D193
PHILOX_KEY_STEP = 0x9E3779B9
PHILOX_ROUNDS = 10
PAIR = 8
"""Distance of two rows, and of two columns, that a call of Philox serves."""
BLOCK = 2 * PAIR
"""Rows and columns of a block whose elements share their calls with no other block."""
LANES = 1 << 16
"""Values of the random number that decides an element."""

type Words = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]


def threefry2x32(key: Words, counter: Words) -> Words:
    """Twenty rounds of Threefry-2x32; all four words are uint32 and broadcast against each other."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(KEY_PARITY))
    left, right = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def philox2x32(key: UInt32[Array, "..."], counter: Words) -> Words:
    """Ten rounds of Philox-2x32; all three words are uint32 and broadcast against each other."""
    left, right = counter
    for _ in range(PHILOX_ROUNDS):
        left, right = _upper_product(left, PHILOX_MULTIPLIER) ^ key ^ right, left * jnp.uint32(PHILOX_MULTIPLIER)
        key = key + jnp.uint32(PHILOX_KEY_STEP)
    return left, right


def _upper_product(x: UInt32[Array, "..."], factor: int) -> UInt32[Array, "..."]:
    """The upper word of a product of 64 bits.

    Computed by 16-bit halves, because uint64 may not exist; XLA has no lowering of ``lax.mulhi`` under a mesh.
    """
    low, high = x % LANES, x // LANES
    factor_low, factor_high = jnp.uint32(factor % LANES), jnp.uint32(factor // LANES)
    middle = low * factor_high
    # At most (2¹⁶ − 1)² + 2 (2¹⁶ − 1) = 2³² − 1.
    sums = high * factor_low + (low * factor_low) // LANES + middle % LANES
    return high * factor_high + middle // LANES + sums // LANES


def drawn_probability(prob: float) -> float:
    """The share that a dropout of this probability drops: a multiple of 2⁻¹⁶, the nearest one below 1.

    Divide the kept elements by 1 minus this share, so that the expectation is exact.
    """
    if not 0.0 <= prob < 1.0:
        raise ValueError(f"a dropout probability must be in [0, 1), got {prob=}")
    return min(round(prob * LANES), LANES - 1) / LANES


def keep_threshold(prob: float) -> int:
    """The smallest of 2¹⁶ random numbers that keeps its element; ``prob`` is a `drawn_probability`."""
    if prob != drawn_probability(prob):
        raise ValueError(f"no multiple of 2^-16: {prob=}; drawn_probability makes one of it")
    return int(prob * LANES)


def head_keys(seed: UInt32[Array, "2"], batch: Any, head: Any) -> Words:
    """The generator's key of each (batch, head), given as integer indices that broadcast against each other."""
    return threefry2x32((seed[0], seed[1]), (jnp.asarray(batch, jnp.uint32), jnp.asarray(head, jnp.uint32)))


def keep_elements(keys: Words, rows: Array, columns: Array, prob: float) -> Bool[Array, "..."]:
    """Marks the kept ones of elements given by position; everything broadcasts. A call for each, for oracles."""
    rows, columns = (jnp.asarray(positions).astype(jnp.uint32) for positions in (rows, columns))
    upper, lower = philox2x32(keys[0], (_number(rows), _number(columns) ^ keys[1]))
    word = jnp.where(rows & PAIR == 0, upper, lower)
    return (word >> (columns & PAIR) * 2) % LANES >= keep_threshold(prob)


def keep_mask_tile(
    keys: Words,
    row_start: int | Integer[Array, ""],
    column_start: int | Integer[Array, ""],
    shape: tuple[int, int],
    prob: float,
    *,
    multiples: tuple[int, int] = (1, 1),
) -> Bool[Array, "... rows columns"]:
    """Marks the kept elements of a tile, ``[*keys' shape, *shape]``; for XLA.

    Args:
      multiples: numbers that are promised to divide the starts; 16 and its multiples save a slice each.
    """
    starts = (row_start, column_start)
    # A traced start may be anywhere in a block (None), so there must be room for a whole block before it.
    offsets = tuple(
        start % BLOCK if isinstance(start, int) else 0 if multiple % BLOCK == 0 else None
        for start, multiple in zip(starts, multiples, strict=True)
    )
    row_blocks, column_blocks = (
        -(-((BLOCK - 1 if offset is None else offset) + size) // BLOCK)
        for offset, size in zip(offsets, shape, strict=True)
    )
    row = _count(row_start // BLOCK * PAIR, (row_blocks * PAIR, 1))
    column = _count(column_start // BLOCK * PAIR, (1, column_blocks * PAIR))
    first, second = keys[0][..., None, None], keys[1][..., None, None]
    words = philox2x32(first, (row, column ^ second))
    # The four bits of a call go into one byte: otherwise XLA would run all rounds again for each. The barrier keeps it
    # from running them for each of the four elements.
    threshold = jnp.uint32(keep_threshold(prob))
    bits = jnp.uint8(0)
    for number, word in enumerate(words):
        for half, value in enumerate((word % LANES, word // LANES)):
            bits = bits | (value >= threshold).astype(jnp.uint8) << (2 * number + half)
    leading = bits.shape[:-2]
    bits = lax.optimization_barrier(bits).reshape(*leading, row_blocks, 1, PAIR, column_blocks, 1, PAIR)
    places = jnp.arange(4, dtype=jnp.uint8).reshape(2, 1, 1, 2, 1)
    kept = (bits >> places & 1 != 0).reshape(*leading, row_blocks * BLOCK, column_blocks * BLOCK)
    for axis, (start, offset, size) in enumerate(zip(starts, offsets, shape, strict=True), len(leading)):
        if offset is None:
            kept = lax.dynamic_slice_in_dim(kept, start % BLOCK, size, axis)
        else:
            kept = lax.slice_in_dim(kept, offset, offset + size, axis=axis)
    return kept


def keep_mask(
    seed: UInt32[Array, "2"], batch: int, heads: int, q_length: int, kv_length: int, prob: float
) -> Bool[Array, "batch heads q_length kv_length"]:
    """Marks the kept elements of the whole score matrix: the definition, for oracles."""
    first, second = head_keys(seed, jnp.arange(batch)[:, None], jnp.arange(heads)[None, :])
    keys = first[..., None, None], second[..., None, None]
    return keep_elements(keys, jnp.arange(q_length)[:, None], jnp.arange(kv_length), prob)


def _number(positions: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The number of a row or column among those that share its calls' bit 3: the position without that bit."""
    return positions // BLOCK * PAIR | positions % PAIR


def _count(start: int | Integer[Array, ""], shape: tuple[int, int]) -> UInt32[Array, "rows columns"]:
    axis = 0 if shape[1] == 1 else 1
    return jnp.asarray(start).astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, shape, axis)
