"""The gradient of an additive bias on Hopper: dS itself, stored tile by tile by the kernels for dK and dV."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.scores import TileCoord
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.shared import aligned_bytes
from tilewright.kernels.hopper.tiles import ROWS, store_unoptimised
from tilewright.kernels.hopper.types import Ref

BIAS_TILE = 128
"""Keys and queries of which the gradient of a bias has a whole number in global memory: the largest step's."""

TILE_ROWS = ROWS * ROWS // ROW
"""Rows of a tile of it whose parts are added."""


@dataclasses.dataclass(frozen=True, slots=True)
class BiasGradient:
    """Where in global memory the kernels for dK and dV put the gradient of a bias, and what is made of it.

    It is a matrix ``[keys, queries]``, also for a bias with one key; for a bias with one query, the sums over the
    queries of each tile, ``[tiles, keys]``, which take a 64th. Where batch or heads share the bias, tiles are added up
    by TMA reductions, in no fixed order, those of a matrix as strips like dQ's; if ``deterministic``, every batch
    element and head has an array of its own instead, and they are summed afterwards.

    Attributes:
      bias_shape: ``[batch | 1, heads | 1, q_length | 1, kv_length | 1]``.
      bias_dtype: a gradient that nothing is summed for is stored in it, all others in float32.
      scores: batch, heads, q_length and kv_length of the call.
    """

    bias_shape: tuple[int, ...]
    bias_dtype: DTypeLike
    scores: tuple[int, int, int, int]
    deterministic: bool

    def __post_init__(self) -> None:
        if len(self.bias_shape) != 4 or any(
            size not in (1, full) for size, full in zip(self.bias_shape, self.scores, strict=True)
        ):
            raise ValueError(f"a bias broadcasts to the scores, got {self.bias_shape=}, {self.scores=}")

    @property
    def shared(self) -> bool:
        """Whether several batch elements or heads have the same bias."""
        return self.bias_shape[:2] != self.scores[:2]

    @property
    def added(self) -> bool:
        """Whether tiles are added to what is there."""
        return self.shared and not self.deterministic

    @property
    def of_queries(self) -> bool:
        return self.bias_shape[2] > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        q_tiles, kv_tiles = self.tiles
        if not self.of_queries:
            matrix = q_tiles, kv_tiles * ROWS
        else:
            matrix = (kv_tiles * q_tiles * TILE_ROWS, ROW) if self.added else (kv_tiles * ROWS, q_tiles * ROWS)
        return (*(self.bias_shape[:2] if self.added else self.scores[:2]), *matrix)

    @property
    def tiles(self) -> tuple[int, int]:
        """Of queries and of keys, in whole steps and programs of both kernels."""
        q_tiles, kv_tiles = (-(-length // BIAS_TILE) * BIAS_TILE // ROWS for length in self.scores[2:])
        return q_tiles, kv_tiles

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32 if self.shared or 1 in self.bias_shape[2:] else self.bias_dtype

    @property
    def bytes(self) -> int:
        """Of the array."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize

    def staging(self, warpgroups: int) -> Any:
        """Scratch type of the places where the warpgroups that compute dS leave tiles that are added."""
        return plgpu.SMEM(self._staging_shape(warpgroups), jnp.float32)

    def staging_bytes(self, warpgroups: int) -> int:
        return aligned_bytes(self._staging_shape(warpgroups), jnp.float32) if self.added else 0

    def _staging_shape(self, warpgroups: int) -> tuple[int, ...]:
        return (warpgroups, ROWS // STRIP, ROWS, STRIP) if self.of_queries else (warpgroups, ROWS)

    def store(self, ref: Ref, staging: Ref | None, ds: jax.Array, place: TileCoord) -> None:
        """Stores or adds a float32 tile ``[64 keys, 64 queries]``.

        Args:
          ref: the array.
          staging: the calling warpgroup's; None unless ``added``.
          place: of this tile.
        """
        b = place.batch if self.shape[0] > 1 else 0
        h = place.head if self.shape[1] > 1 else 0
        keys, q_tile = pl.ds(place.kv_start, ROWS), lax.div(place.q_start, jnp.int32(ROWS))
        values = ds.astype(self.dtype) if self.of_queries else ds.sum(axis=1)
        if not self.added:
            # As they lie in registers: a matrix takes one address.
            tile = ref.at[b, h, keys, pl.ds(place.q_start, ROWS)] if self.of_queries else ref.at[b, h, q_tile, keys]
            store_unoptimised(tile, values)
            return
        assert staging is not None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.of_queries:
            store_strips(staging, values)
            first = (lax.div(place.kv_start, jnp.int32(ROWS)) * self.tiles[0] + q_tile) * TILE_ROWS
            source, target = staging.reshape(TILE_ROWS, ROW), ref.at[b, h, pl.ds(first, TILE_ROWS)]
        else:
            staging[...] = values
            source, target = staging, ref.at[b, h, q_tile, keys]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def result(self, array: jax.Array) -> jax.Array:
        """The gradient, in the shape and dtype of the bias."""
        _, _, q_length, kv_length = self.scores
        q_tiles, kv_tiles = self.tiles
        if self.of_queries and self.added:
            array = array.reshape(*array.shape[:2], kv_tiles, q_tiles, ROWS // STRIP, ROWS, STRIP)
            array = array.transpose(0, 1, 3, 4, 6, 2, 5).reshape(*array.shape[:2], q_tiles * ROWS, kv_tiles * ROWS)
        elif self.of_queries:
            array = jnp.swapaxes(array, 2, 3)
        if self.of_queries:
            array = array[:, :, :q_length]
        array = array[..., :kv_length]
        broadcast = tuple(
            axis for axis, (ours, size) in enumerate(zip(array.shape, self.bias_shape, strict=True)) if ours != size
        )
        return array.sum(axis=broadcast, keepdims=True).astype(self.bias_dtype)
