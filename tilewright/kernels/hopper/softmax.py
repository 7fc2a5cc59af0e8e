"""The online softmax of a warpgroup, in its registers: in base 2, with a maximum and a sum for each row.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import math

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.tiles import across, row_constants

LOG2E = math.log2(math.e)


def split_scale(softmax_scale: float) -> tuple[float, float]:
    """What products are multiplied by before ``online_softmax``, and its multiplier, which must be positive."""
    scale = softmax_scale * LOG2E
    return (1.0, scale) if scale > 0 else (scale, 1.0)


def initial_statistics() -> tuple[jax.Array, jax.Array]:
    """The maximum and the sum of rows before their first key."""
    return row_constants(-jnp.inf), row_constants(0.0)


def online_softmax(
    logits: jax.Array, multiplier: float, m: jax.Array, total: jax.Array, guarded: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Probabilities of a tile in float32, what scales sums so far, and the new statistics of rows.

    Args:
      logits: ``[64, keys]``; times ``multiplier``, which is positive, they are in base 2. −∞ is masked.
      m, total: ``[64]``: the maximum of them so far, and the sum.
      guarded: whether a row may have no visible key so far.
    """
    maximum = jnp.maximum(m, logits.max(axis=1) * multiplier)
    # A row that has seen nothing yet is shifted by nothing: −∞ − −∞ is NaN.
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum) if guarded else maximum
    scale = jnp.exp2(m - shift)
    p = jnp.exp2(logits * multiplier - across(shift, logits.shape[1]))
    return p, scale, maximum, total * scale + p.sum(axis=1)


def normaliser(total: jax.Array) -> jax.Array:
    """What a row's sum of values is multiplied by in the end; 0 where all of its keys are masked."""
    return jnp.where(total == 0.0, 0.0, 1 / total)


def row_lse(m: jax.Array, total: jax.Array) -> jax.Array:
    """The natural log-sum-exp of rows; −∞ where all of their keys are masked."""
    return jnp.where(total == 0.0, -jnp.inf, (m + jnp.log2(total)) * (1 / LOG2E))
