"""The rows of each group, from group sizes that may hold anything."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.ops.kernel.arrays import is_symbolic

MAX_INT32 = (1 << 31) - 1

MAX_COMPARED = 1024
"""Elements up to which sums of prefixes are computed by comparing all pairs of indices."""


def row_bounds(
    group_sizes: Int32[Array, " groups"], rows: int
) -> tuple[Int32[Array, " groups"], Int32[Array, " groups"]]:
    """The first row of each group and the row behind its last: negative sizes count as zero, rows end at ``rows``."""
    sizes = jnp.clip(group_sizes, 0, rows)
    if is_symbolic(rows, *sizes.shape) or sizes.shape[0] * rows <= MAX_INT32:
        ends = jnp.minimum(prefix_sums(sizes), rows)
    else:  # the plain sum may overflow; this one is associative, for no summand exceeds ``rows``
        ends = lax.associative_scan(lambda a, b: jnp.where(b > rows - a, rows, a + b), sizes)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def matrix_bounds(inputs: MatmulInputs) -> tuple[Any, Any]:
    """The first row of each matrix and the row behind its last: those of its group, and none if there is no such."""
    group_sizes, group_offset, matrices = inputs.group_sizes, inputs.group_offset, inputs.rhs.shape[0]
    assert group_sizes is not None
    starts, ends = row_bounds(group_sizes, inputs.rows)
    if group_offset is None:
        return starts, ends
    # A hostile offset plus an index may wrap around, but only to another number that is not a group.
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


def row_segments(
    starts: jax.Array, ends: jax.Array, rows: int, has_offset: bool, fills: bool = True
) -> tuple[Int32[Array, " segments"], Int32[Array, " segments"], Int32[Array, " segments"]]:
    """All rows, in disjoint segments: first row, row behind the last, and the matrix, -1 for rows without one.

    Args:
      starts, ends: of `matrix_bounds`. Rows before the first matrix's and behind the last one's are two more segments.
      has_offset: whether there may be rows before the first matrix's.
      fills: whether rows without a matrix are in segments, too.
    """
    which = jnp.arange(starts.shape[0], dtype=jnp.int32)
    if not fills:
        return starts, ends, which
    if not has_offset:
        parts = [starts, ends[-1:]], [ends, jnp.full(1, rows, jnp.int32)], [which, jnp.full(1, -1, jnp.int32)]
    else:
        first = jnp.min(jnp.where(starts < ends, starts, rows))
        last = jnp.maximum(jnp.max(jnp.where(starts < ends, ends, 0)), first)
        parts = (
            [starts, jnp.stack([jnp.int32(0), last])],
            [ends, jnp.stack([first, jnp.int32(rows)])],
            [which, jnp.full(2, -1, jnp.int32)],
        )
    return tuple(jnp.concatenate(part) for part in parts)  # type: ignore[return-value]


class RowTiles(NamedTuple):
    """Tiles of rows, each of one segment; there are as many as there may be, whatever the segments' sizes are.

    Attributes:
      behind: ``[segments]``, the tiles of a segment and of those before it; all that have rows come first.
      matrix, first, end: of each tile its matrix, its first row, and the row behind its segment.
    """

    behind: Int32[Array, " segments"]
    matrix: Int32[Array, " tiles"]
    first: Int32[Array, " tiles"]
    end: Int32[Array, " tiles"]


def row_tiles(starts: jax.Array, ends: jax.Array, which: jax.Array, rows: int, block_rows: int) -> RowTiles:
    """The tiles of disjoint segments; a tile begins at its segment's first row, or a block behind another tile."""
    counts = -(-(ends - starts) // block_rows)
    last = prefix_sums(counts)
    segments = starts.shape[0]
    index = jnp.arange(min((rows + segments * (block_rows - 1)) // block_rows, rows), dtype=jnp.int32)[:, None]
    # Mask every field to the tile's own segment and sum over segments: one reduction, one kernel on a GPU.
    own = (index >= last - counts) & (index < last)

    def of_tile(value: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(own, value, 0), axis=1, dtype=jnp.int32)

    return RowTiles(last, of_tile(which), of_tile(starts + (index - (last - counts)) * block_rows), of_tile(ends))


def prefix_sums(counts: Int32[Array, " size"]) -> Int32[Array, " size"]:
    """Inclusive sums.

    XLA makes two to three kernels of ``jnp.cumsum`` on a GPU, and one of this, in which the matrix of comparisons is
    never in memory; there a short call's schedule takes as long as its kernels are many.
    """
    size = counts.shape[0]
    if is_symbolic(size) or size > MAX_COMPARED:
        return jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(size)
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], counts, 0), axis=1, dtype=jnp.int32)
