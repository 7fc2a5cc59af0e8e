"""The attention probabilities that a dropout keeps: one counter-based generator for every backend.

Element (batch, head, row, column) of a call with seed ``s`` is decided by word ``column & 1`` of
``threefry2x32(threefry2x32(s, (batch, head)), (row, column >> 1))``: kept iff it is at least ``round(p · 2³²)``. No
element depends on tiling, sharding or backend. Threefry-2x32 with 20 rounds: Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011); only 32-bit additions, exclusive ors and rotations.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_PARITY = 0x1BD11BDA

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


def keep_threshold(prob: float) -> int:
    """The smallest word that keeps its element, a uint32."""
    if not 0.0 <= prob < 1.0:
        raise ValueError(f"a dropout probability must be in [0, 1), got {prob=}")
    # A probability next to 1 rounds to 2³², which no uint32 holds.
    return min(round(prob * 2**32), 2**32 - 1)


def head_keys(seed: UInt32[Array, "2"], batch: Any, head: Any) -> Words:
    """The generator's key of each (batch, head), given as integer indices that broadcast against each other."""
    return threefry2x32((seed[0], seed[1]), (jnp.asarray(batch, jnp.uint32), jnp.asarray(head, jnp.uint32)))


def keep_mask_tile(
    keys: Words,
    row_start: int | Integer[Array, ""],
    column_start: int | Integer[Array, ""],
    shape: tuple[int, int],
    prob: float,
    *,
    even_start: bool = False,
) -> Bool[Array, "... rows columns"]:
    """Marks the kept elements of a tile, ``[*keys' shape, *shape]``; for XLA (kernels call ``threefry2x32``).

    Args:
      even_start: promises that a traced ``column_start`` is even, which saves a slice.
    """
    rows, columns = shape
    odd = column_start % 2 if isinstance(column_start, int) else None if not even_start else 0
    # A tile that begins at an odd column begins with the second word of a pair, so it needs a word more. Where the
    # parity of the start is traced (None), there must be room for it.
    pairs = (columns + (1 if odd is None else odd) + 1) // 2
    row = _count(row_start, (rows, 1))
    pair = _count(column_start // 2, (1, pairs))
    left, right = threefry2x32((keys[0][..., None, None], keys[1][..., None, None]), (row, pair))
    threshold = jnp.uint32(keep_threshold(prob))
    # Both bits of a pair go into one byte: otherwise XLA would run all rounds again for the second bit. The barrier
    # keeps it from running them for each of the two columns (a third of the time of interleaving the comparisons, on a
    # CPU).
    bits = (left >= threshold).astype(jnp.uint8) | (right >= threshold).astype(jnp.uint8) << 1
    bits = lax.optimization_barrier(bits)[..., None] >> jnp.arange(2, dtype=jnp.uint8)
    kept = (bits & 1 != 0).reshape(*left.shape[:-1], 2 * pairs)
    if odd is None:
        return lax.dynamic_slice_in_dim(kept, column_start % 2, columns, axis=-1)
    return kept[..., odd : odd + columns]


def keep_mask(
    seed: UInt32[Array, "2"], batch: int, heads: int, q_length: int, kv_length: int, prob: float
) -> Bool[Array, "batch heads q_length kv_length"]:
    """Marks the kept elements of the whole score matrix: the definition, for oracles."""
    keys = head_keys(seed, jnp.arange(batch)[:, None], jnp.arange(heads)[None, :])
    return keep_mask_tile(keys, 0, 0, (q_length, kv_length), prob)


def _count(start: int | Integer[Array, ""], shape: tuple[int, int]) -> UInt32[Array, "rows columns"]:
    axis = 0 if shape[1] == 1 else 1
    return jnp.asarray(start).astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, shape, axis)
