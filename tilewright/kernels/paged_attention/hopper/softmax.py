"""One step of an online softmax in a warpgroup's registers."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def online_softmax(logits: Any, multiplier: float, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
    """Probabilities of a tile in float32, what scales sums so far, and the new statistics of rows.

    Args:
      logits: ``[rows, keys]``; times ``multiplier``, which is positive, they are in base 2. −∞ is not seen.
      m, total: ``[rows]``: the largest of them so far, and the sum.
    """
    largest = jnp.maximum(m, logits.max(axis=1) * multiplier)
    # A row that has seen nothing yet is shifted by nothing: −∞ − −∞ is NaN.
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    scale = jnp.exp2(m - shift)
    p = jnp.exp2(logits * multiplier - lax.broadcast_in_dim(shift, logits.shape, [0]))
    return p, scale, largest, total * scale + p.sum(axis=1)
