"""The noise of a token: a counter-based generator, so that no backend, tiling or neighbour changes it.

Token i of a row with the key words ``(first, second)`` has the word ``i mod 2`` of Philox-2x32 with 10 rounds, of the
key ``first`` and the counter ``(i // 2, second)``. With ``u = (word + 1/2) · 2⁻³²`` its noise is ``-log(-log(1 - u))``,
which is Gumbel-distributed: the token with the greatest ``logit / temperature + noise`` is a draw of the softmax.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import jax
import jax.numpy as jnp

from tilewright.kernels.numerics.dropout import philox2x32, threefry2x32

MOST = 1.0 - 2.0**-24
"""Largest u: the next number of float32 is 1, whose noise is infinite."""


def gumbel(key: jax.Array, index: jax.Array) -> jax.Array:
    """The noise of tokens, in float32.

    Args:
      key: ``uint32[..., 2]``; its leading dimensions broadcast against those of ``index``.
      index: ``uint32[...]``.
    """
    left, right = philox2x32(key[..., 0], (index >> 1, key[..., 1]))
    word = jnp.where(index & 1 == 0, left, right)
    # Small u are those of large noise, and there float32 has all bits of the word.
    u = jnp.minimum((word.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32), jnp.float32(MOST))
    return -jnp.log(-jnp.log1p(-u))


def folded_keys(key: jax.Array, rows: int) -> jax.Array:
    """The key of each of so many rows, ``uint32[rows, 2]``: those of ``jax.random.fold_in`` with the row's number."""
    row = jnp.arange(rows, dtype=jnp.uint32)
    return jnp.stack(threefry2x32((key[0], key[1]), (jnp.zeros_like(row), row)), axis=-1)
