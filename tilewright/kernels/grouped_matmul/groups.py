"""The rows of each group, from group sizes that may hold anything."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from tilewright.ops.kernel.arrays import is_symbolic

MAX_INT32 = (1 << 31) - 1


def row_bounds(
    group_sizes: Int32[Array, " groups"], rows: int
) -> tuple[Int32[Array, " groups"], Int32[Array, " groups"]]:
    """The first row of each group and the row behind its last: negative sizes count as zero, rows end at ``rows``."""
    sizes = jnp.clip(group_sizes, 0, rows)
    if is_symbolic(rows, *sizes.shape) or sizes.shape[0] * rows <= MAX_INT32:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    else:  # the plain sum may overflow; this one is associative, for no summand exceeds ``rows``
        ends = lax.associative_scan(lambda a, b: jnp.where(b > rows - a, rows, a + b), sizes)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def matrix_bounds(
    group_sizes: Int32[Array, " groups"], group_offset: Int32[Array, ""] | None, rows: int, matrices: int
) -> tuple[Any, Any]:
    """The rows of each matrix: those of group ``group_offset + i``, and none if there is no such group."""
    starts, ends = row_bounds(group_sizes, rows)
    if group_offset is None:
        return starts, ends
    # The sum of a hostile offset and an index wraps around, but only to a number that is no group either.
    groups = group_offset + jnp.arange(matrices, dtype=jnp.int32)
    exists = (groups >= 0) & (groups < group_sizes.shape[0]) & (group_offset > -matrices)
    clipped = jnp.clip(groups, 0, group_sizes.shape[0] - 1)
    starts = jnp.where(exists, starts[clipped], 0)
    return starts, jnp.where(exists, ends[clipped], starts)


def owned(starts: jax.Array, ends: jax.Array, rows: int) -> jax.Array:
    """True for each row that belongs to a matrix; the rows of consecutive matrices are consecutive."""
    row = jnp.arange(rows, dtype=jnp.int32)
    # Comparisons with all matrices fuse into one reduction; the array of them is never in memory.
    return jnp.any((row[:, None] >= starts) & (row[:, None] < ends), axis=1)
