"""The rows of a sequence that each device holds, and the reordering of a whole sequence for the zigzag layout."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.signatures import ArrayLike

type LayoutName = Literal["zigzag", "contiguous"]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The split of queries and keys over the devices of a mesh axis.

    Attributes:
      name: "contiguous" (device i has shard i) or "zigzag" (device i has chunks i and 2n − 1 − i of 2n).
      shards: devices of the axis, n.
      q_length: rows of the query on each device.
      kv_length: rows of key and value on each device.
    """

    name: LayoutName
    shards: int
    q_length: int
    kv_length: int

    @property
    def chunks(self) -> int:
        """Contiguous runs of rows on a device."""
        return 2 if self.name == "zigzag" else 1

    def chunk_numbers(self, index: int) -> tuple[int, ...]:
        """The numbers of a device's chunks among those of the whole sequence, ascending."""
        return (index, 2 * self.shards - 1 - index) if self.name == "zigzag" else (index,)

    def positions(self, index: jax.Array, length: int) -> jax.Array:
        """The absolute positions of a device's rows, ascending: int32 ``[length]``.

        Args:
          index: the device's index on the axis, traced.
          length: rows of each device.
        """
        size = length // self.chunks
        index = index.astype(jnp.int32)
        numbers = (index, 2 * self.shards - 1 - index) if self.name == "zigzag" else (index,)
        return jnp.concatenate([number * size + jnp.arange(size, dtype=jnp.int32) for number in numbers])

    def in_order(self, gathered: jax.Array, axis: int) -> jax.Array:
        """Rows in the order of their positions, from those of all devices one after another."""
        return unzigzag(gathered, axis, self.shards) if self.name == "zigzag" else gathered

    def by_device(self, ordered: jax.Array, axis: int) -> jax.Array:
        """The inverse of ``in_order``."""
        return zigzag(ordered, axis, self.shards) if self.name == "zigzag" else ordered


def zigzag(x: ArrayLike, axis: int, shards: int) -> jax.Array:
    """Reorders a whole sequence so that shard i of a contiguous split has chunks i and 2n − 1 − i of 2n.

    Under a causal mask every device then has the same work. Reorder tokens, positions, segment ids and labels alike,
    before they are split over the mesh; ``unzigzag`` undoes it.

    Args:
      x: an array.
      axis: the dimension of the sequence; its size must be a multiple of ``2 * shards``.
      shards: devices over which the sequence will be split, n.

    Raises:
      ValueError: the size is not a multiple of ``2 * shards``.
    """
    return _reordered(x, axis, shards, _zigzag_order(shards))


def unzigzag(x: ArrayLike, axis: int, shards: int) -> jax.Array:
    """Puts a sequence that ``zigzag`` reordered back in order.

    Args:
      x: an array.
      axis: the dimension of the sequence.
      shards: as given to ``zigzag``.

    Raises:
      ValueError: the size is not a multiple of ``2 * shards``.
    """
    return _reordered(x, axis, shards, np.argsort(_zigzag_order(shards)))


def _zigzag_order(shards: int) -> np.ndarray:
    """The numbers of the chunks, in the order in which the devices hold them."""
    first = np.arange(shards)
    return np.stack([first, 2 * shards - 1 - first], axis=1).reshape(-1)


def _reordered(x: ArrayLike, axis: int, shards: int, order: np.ndarray) -> jax.Array:
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if shards < 1 or not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{shards=} must be positive and {axis=} a dimension of the array, got {array.shape=}")
    size = array.shape[axis]
    if size % (2 * shards):
        raise ValueError(f"zigzag has two chunks for each of {shards=}: {size=} must be a multiple of {2 * shards}")
    chunk = size // (2 * shards)
    # Slices, which XLA copies at the speed of memory, rather than a gather.
    parts = [jax.lax.slice_in_dim(array, n * chunk, (n + 1) * chunk, axis=axis) for n in order.tolist()]
    return jnp.concatenate(parts, axis=axis)
