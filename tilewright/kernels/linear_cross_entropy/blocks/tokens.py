"""Blocks of tokens that are not ignored: a loop over as many as there are, in which ignored tokens cost nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.ops.kernel.arrays import at_most


@dataclasses.dataclass(frozen=True)
class TokenBlocks:
    """Tokens in an order in which those that are not ignored come first.

    Attributes:
      valid: ``[tokens]``, False for tokens that are ignored.
      order: ``[tokens]``, the index of the token at each place.
    """

    valid: jax.Array
    order: jax.Array
    count: jax.Array
    size: int

    @classmethod
    def of(cls, valid: jax.Array, size: int) -> "TokenBlocks":
        # Stable, so that neighbours stay neighbours and a call without ignored tokens reads x in its order.
        order = jnp.argsort(~valid, stable=True).astype(jnp.int32)
        return cls(valid, order, valid.sum(dtype=jnp.int32), at_most(valid.shape[0], size))

    def over[T](self, step: Callable[[jax.Array, jax.Array, T], T], init: T, operands: object) -> T:
        """``step(first place, token indices, carry)`` over all blocks; an index past the last is padding."""
        tokens = self.valid.shape[0]
        padded = jnp.pad(self.order, (0, self.size))
        within = jnp.arange(self.size, dtype=jnp.int32)
        init = vary_over(varying_axes((init, operands, self.order)), init)
        # Every block is a large matmul, so the time in which a GPU's host reads the condition does not show.
        blocks = (self.count + self.size - 1) // self.size

        def body(state: Any) -> Any:
            index, carry = state
            begin = index * self.size
            rows = lax.dynamic_slice_in_dim(padded, begin, self.size)
            rows = jnp.where(begin + within < self.count, rows, tokens)
            return index + 1, step(begin, rows, carry)

        zero = vary_over(varying_axes(self.count), jnp.int32(0))
        return lax.while_loop(lambda state: state[0] < blocks, body, (zero, init))[1]

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """An array of results by place, into which every block can be written as a whole."""
        # With the size of a block more, no slice is moved back to fit at the end.
        return jnp.zeros((self.valid.shape[0] + self.size, *shape), dtype)

    def by_token(self, results: Any, shape: tuple[int, ...]) -> Any:
        """A tree of results by place as results by token, ``[*shape, ...]``; zeros for those that are ignored."""

        def ordered(array: jax.Array) -> jax.Array:
            places = jnp.zeros_like(self.order).at[self.order].set(jnp.arange(self.order.shape[0], dtype=jnp.int32))
            valid = self.valid.reshape(-1, *(1,) * (array.ndim - 1))
            return jnp.where(valid, array[places], 0).reshape(*shape, *array.shape[1:])

        return jax.tree.map(ordered, results)


def rows_of(arrays: Any, rows: jax.Array, fill: float = 0) -> Any:
    """The elements of some tokens, in each array of a tree."""
    return jax.tree.map(lambda array: array.at[rows].get(mode="fill", fill_value=fill), arrays)


def written(arrays: Any, rows: Any, begin: jax.Array) -> Any:
    """A tree of arrays with the results of a block replaced."""

    def write(array: jax.Array, part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), begin, axis=0)

    return jax.tree.map(write, arrays, rows)
