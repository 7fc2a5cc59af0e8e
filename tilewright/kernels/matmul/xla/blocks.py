"""Grouped matmuls as loops over blocks of rows, each of which lies in one group.

A group's rows are cut into blocks of a static number of rows, from its first row on; the last one reaches into the next
group, and only the block's own rows are written. The number of blocks depends on the group sizes, the shapes of a step
do not. One block and one matrix are in memory beside the operands.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.utils.device import current_device


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of rows.

    Attributes:
      matrix: the matrix of its group.
      begin: the first row that is read.
      inside: ``[block_rows, 1]``, True for the rows that belong to the group and to no other block.
      is_first: True for the first block of its group.
    """

    matrix: jax.Array
    begin: jax.Array
    inside: jax.Array
    is_first: jax.Array

    def rows(self, array: jax.Array) -> jax.Array:
        """The block's rows of an array."""
        return lax.dynamic_slice_in_dim(array, self.begin, self.inside.shape[0])

    def own_rows(self, array: jax.Array) -> jax.Array:
        """The block's rows with zeros in place of those of others: selected, since 0 · NaN is NaN."""
        return jnp.where(self.inside, self.rows(array), 0)

    def of(self, matrices: jax.Array) -> jax.Array:
        """The block's matrix."""
        return lax.dynamic_index_in_dim(matrices, self.matrix, keepdims=False)

    def written(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the block's own rows replaced."""
        # The other rows of the slice belong to blocks before or behind, and are written back as they are.
        merged = jnp.where(self.inside, rows.astype(array.dtype), self.rows(array))
        return lax.dynamic_update_slice_in_dim(array, merged, self.begin, axis=0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of all groups: ``rows`` rows are cut into blocks of ``block_rows``, which is at most ``rows``."""

    starts: jax.Array
    ends: jax.Array
    rows: int
    block_rows: int

    @functools.cached_property
    def last(self) -> jax.Array:
        """For each group the number of blocks of all groups up to it."""
        return jnp.cumsum(-(-(self.ends - self.starts) // self.block_rows), dtype=jnp.int32)

    @property
    def max_count(self) -> int:
        """The maximum number of blocks, whatever the group sizes are."""
        # Only the last block of a group may lack rows, and no block is empty.
        return min((self.rows + self.starts.shape[0] * (self.block_rows - 1)) // self.block_rows, self.rows)

    def block(self, index: jax.Array) -> Block:
        """A block by its number. One that is beyond the last has no rows, and the last group's matrix."""
        group = jnp.minimum(jnp.sum(self.last <= index, dtype=jnp.int32), self.starts.shape[0] - 1)
        start, end = self.starts[group], self.ends[group]
        count = -(-(end - start) // self.block_rows)
        within = index - (self.last[group] - count)
        first = start + within * self.block_rows
        # The last rows of the array are read by blocks that would reach behind them.
        begin = jnp.minimum(first, self.rows - self.block_rows)
        row = begin + jnp.arange(self.block_rows, dtype=jnp.int32)
        inside = (row >= first) & (row < end)
        return Block(group, begin, inside[:, None], within == 0)

    def over[T](self, step: Callable[[Block, T], T], init: T) -> T:
        """``step(block, carry)`` over all blocks, in order."""
        init = vary_over(varying_axes((self.starts, self.ends, init)), init)
        count: Any = self.last[-1]
        # A GPU's host would wait for the number of blocks in each iteration; blocks without rows cost less.
        if current_device().kind != "cpu" and not is_symbolic(self.rows, *self.starts.shape):
            count = jnp.int32(self.max_count)
        _, result = lax.while_loop(
            lambda state: state[0] < count,
            lambda state: (state[0] + 1, step(self.block(state[0]), state[1])),
            # An index of 32 bits: that of a fori_loop of static length has 64 with jax_enable_x64.
            (vary_over(varying_axes(count), jnp.int32(0)), init),
        )
        return result
