"""A bias of positions in XLA attention: tiles of it, and of its gradient, without an array of all pairs.

A tile of relative values has one value on each of its diagonals. It is the row of them, repeated and reshaped so that
each row is shifted by one; the sums along the diagonals of a tile of gradients are the inverse.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.flash_attention.xla.tiles import Tiling, pad_axis
from tilewright.kernels.masks import Index


@dataclasses.dataclass(frozen=True, slots=True)
class TiledBias:
    """The bias of one step's heads, with its arrays padded so that every tile can be cut out of them.

    Attributes:
      bias: its values in the dtype of the logits.
    """

    bias: PositionBias
    tiling: Tiling

    @classmethod
    def of(cls, bias: PositionBias | None, tiling: Tiling, step: Index, dtype: DTypeLike) -> "TiledBias | None":
        """The heads of a step; None without a bias."""
        if bias is None:
            return None
        values = tiling.take(bias.values[None], step, batch_axis=0, head_axis=1)[0].astype(dtype)
        positions = bias.q_positions
        if positions is not None:
            positions = tiling.take(positions[:, None], step, batch_axis=0, head_axis=1)[:, 0]
            positions = pad_axis(positions, 1, tiling.q_padding)
        return cls(dataclasses.replace(bias, values=values, q_positions=positions), tiling)

    @property
    def has_diagonals(self) -> bool:
        """True if a tile has one relative value on each diagonal: positions that are an array may have gaps."""
        return self.bias.kind == "relative" and self.bias.q_positions is None

    def first_entry(self, row: Index, column: Index) -> Any:
        """The entry of the lowest diagonal of a tile, in values that have ``q_padding`` entries in front."""
        grid = self.tiling.grid
        # Of key 0 and the last query of the tile; the alignment cancels out.
        last_query = (row + 1) * grid.block_q - 1
        entry = column * grid.block_k - last_query + (grid.q_length - 1) + self.tiling.q_padding
        return np.int32(entry) if isinstance(entry, int) else entry  # one type, also in x64 mode

    def pad_values(self, values: jax.Array) -> Any:
        """Values with the entries of padded queries in front, and of padded keys behind."""
        return _pad(values, self.tiling.q_padding, self.tiling.kv_padding)

    def tile(self, row: Index, column: Index) -> Any:
        """A tile, ``[batch | 1, heads | 1, block_q, block_k]``."""
        grid, bias = self.tiling.grid, self.bias
        block_q, block_k = grid.block_q, grid.block_k
        if not self.has_diagonals:
            return bias.tile(row * block_q, block_q, column * block_k, block_k, grid.kv_length)
        number = block_q + block_k - 1
        diagonals = lax.dynamic_slice_in_dim(
            self.pad_values(bias.values), self.first_entry(row, column), number, axis=1
        )
        # Rows of number + 1 entries, read as rows of number: each begins an entry earlier than the one before.
        heads = diagonals.shape[0]
        repeated = jnp.broadcast_to(_pad(diagonals, 0, 1)[:, None], (heads, block_q, number + 1))
        shifted = repeated.reshape(heads, -1)[:, : block_q * number].reshape(heads, block_q, number)
        return shifted[None, :, :, block_q - 1 :]

    def gradient(self, d_logits: jax.Array, row: Index, column: Index) -> tuple[Any, Any]:
        """A tile's part of the gradient of the values, and the entry where it begins in padded values.

        Args:
          d_logits: ``[batch, heads, block_q, block_k]``.
        """
        grid, bias = self.tiling.grid, self.bias
        block_q, block_k = grid.block_q, grid.block_k
        start = row * block_q, block_q, column * block_k, block_k
        if bias.kind == "alibi":
            distances = jnp.abs(bias.differences(*start)).astype(d_logits.dtype)[:, None]
            return -jnp.sum(d_logits * distances, axis=(0, 2, 3))[:, None], np.int32(0)
        if bias.values.shape[0] == 1:
            d_logits = jnp.sum(d_logits, axis=1, keepdims=True)
        if not self.has_diagonals:
            entries = bias.entries(bias.differences(*start), grid.kv_length)
            by_head = jnp.broadcast_to(entries[:, None], d_logits.shape)
            heads = jnp.arange(d_logits.shape[1], dtype=jnp.int32)[None, :, None, None]
            zeros = self.pad_values(jnp.zeros_like(bias.values, dtype=d_logits.dtype))
            return zeros.at[heads, by_head + self.tiling.q_padding].add(d_logits), np.int32(0)
        number, summed = block_q + block_k - 1, jnp.sum(d_logits, axis=0)
        # The inverse of `tile`: rows from the last to the first, each shifted by one more.
        padded = lax.pad(summed[:, ::-1], jnp.zeros((), summed.dtype), [(0, 0, 0), (0, 0, 0), (0, block_q, 0)])
        flat = padded.reshape(padded.shape[0], -1)[:, : block_q * number]
        return flat.reshape(-1, block_q, number).sum(axis=1), self.first_entry(row, column)


def padded_gradient(bias: PositionBias, tiling: Tiling, dtype: DTypeLike) -> jax.Array:
    """Zeros for the gradient of the values, of all heads, with room for every tile's part."""
    zeros = jnp.zeros(bias.values.shape, dtype)
    return zeros if bias.kind == "alibi" else _pad(zeros, tiling.q_padding, tiling.kv_padding)


def unpadded_gradient(gradient: jax.Array, bias: PositionBias, tiling: Tiling) -> jax.Array:
    """The gradient without the padding, in the dtype of the values."""
    if bias.kind == "relative":
        gradient = lax.dynamic_slice_in_dim(gradient, tiling.q_padding, bias.values.shape[1], axis=1)
    return gradient.astype(bias.values.dtype)


def add_position_bias(
    gradient: jax.Array, tiled: TiledBias, d_logits: jax.Array, step: Index, row: Index, column: Index
) -> jax.Array:
    """Adds a tile's part to the gradient of all heads."""
    tiling, (batch, kv_heads, group, *block) = tiled.tiling, d_logits.shape
    part, entry = tiled.gradient(d_logits.reshape(batch, kv_heads * group, *block), row, column)
    head: Any = np.int32(0)
    if gradient.shape[0] > 1:
        head = tiling.starts(step)[1] * tiling.group
        head = np.int32(head) if isinstance(head, int) else head
    old = lax.dynamic_slice(gradient, (head, entry), part.shape)
    return lax.dynamic_update_slice(gradient, old + part, (head, entry))


def _pad(rows: jax.Array, before: int, after: int) -> Any:
    """Pads the last of two dimensions with zeros."""
    if isinstance(before, int) and isinstance(after, int) and before == after == 0:
        return rows
    return lax.pad(rows, jnp.zeros((), rows.dtype), [(0, 0, 0), (before, after, 0)])
