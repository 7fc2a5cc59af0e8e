"""The gradient of an additive bias on Hopper: dS itself, or sums of it, from each tile of the kernels for dK and dV.

A bias that batch elements or heads share gets the sum of their dS, by TMA reductions (``added``) or, if deterministic,
by an XLA sum over an array that keeps them separate.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.scores import PositionOptions, TileCoord, scaled_distances
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.diagonals import add_along_diagonals
from tilewright.kernels.hopper.shared import aligned_bytes
from tilewright.kernels.hopper.tiles import ROWS, row_layout, store_unoptimised
from tilewright.kernels.hopper.types import Ref

BIAS_TILE = 128
"""Keys and queries to whose multiple the gradient is padded in global memory: those of the largest step."""

DIAGONALS = 2 * ROWS - 1
"""Diagonals of a tile of dS, which has 64 keys and queries."""

TILE_ROWS = ROWS * ROWS // ROW
"""Rows of ``ROW`` elements that a 64 × 64 tile takes in a matrix to which tiles are added."""


@dataclasses.dataclass(frozen=True, slots=True)
class BiasGradient:
    """The array in global memory to which the kernels for dK and dV store the gradient of a bias.

    It is a matrix ``[keys, queries]``, also for a bias with one key; for a bias with one query, the sums over the
    queries of each tile, ``[tiles, keys]``, a 64th of that. Where batch or heads share the bias, tiles are added by TMA
    reductions, in no fixed order, those of a matrix as strips like those of dQ; if ``deterministic``, every batch
    element and head has an array of its own instead, and they are summed afterwards.

    Attributes:
      bias_shape: ``[batch | 1, heads | 1, q_length | 1, kv_length | 1]``.
      bias_dtype: dtype of the array if it holds the gradient itself; where anything is to be summed, it is float32.
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
        """True if batch elements or heads share the bias."""
        return self.bias_shape[:2] != self.scores[:2]

    @property
    def added(self) -> bool:
        """True if tiles are added by TMA reductions, rather than stored."""
        return self.shared and not self.deterministic

    @property
    def is_matrix(self) -> bool:
        """True if the bias has queries; else tiles are summed over theirs."""
        return self.bias_shape[2] > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        q_tiles, kv_tiles = self.tiles
        if not self.is_matrix:
            matrix = q_tiles, kv_tiles * ROWS
        else:
            matrix = (kv_tiles * q_tiles * TILE_ROWS, ROW) if self.added else (kv_tiles * ROWS, q_tiles * ROWS)
        return (*(self.bias_shape[:2] if self.added else self.scores[:2]), *matrix)

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of 64-query and of 64-key tiles, in whole steps and CTAs of both kernels."""
        q_tiles, kv_tiles = (-(-length // BIAS_TILE) * BIAS_TILE // ROWS for length in self.scores[2:])
        return q_tiles, kv_tiles

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32 if self.shared or 1 in self.bias_shape[2:] else self.bias_dtype

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize

    def staging(self, warpgroups: int) -> object:
        """Scratch type of a buffer per warpgroup for tiles that wait for their reduction; None unless ``added``."""
        return plgpu.SMEM(self._staging_shape(warpgroups), jnp.float32) if self.added else None

    def staging_bytes(self, warpgroups: int) -> int:
        return aligned_bytes(self._staging_shape(warpgroups), jnp.float32) if self.added else 0

    def _staging_shape(self, warpgroups: int) -> tuple[int, ...]:
        return (warpgroups, ROWS // STRIP, ROWS, STRIP) if self.is_matrix else (warpgroups, ROWS)

    def store(self, ref: Ref, staging: Ref | None, ds: jax.Array, coord: TileCoord) -> None:
        """Stores or adds a float32 tile of dS, ``[64 keys, 64 queries]``.

        Args:
          ref: the array.
          staging: the buffer of the calling warpgroup; None unless ``added``.
          coord: of this tile.
        """
        b = coord.batch if self.shape[0] > 1 else 0
        h = coord.head if self.shape[1] > 1 else 0
        keys, q_tile = pl.ds(coord.kv_start, ROWS), lax.div(coord.q_start, jnp.int32(ROWS))
        values = ds.astype(self.dtype) if self.is_matrix else ds.sum(axis=1)
        if not self.added:
            # In the order of the registers: the addresses of a matrix then follow from one.
            tile = ref.at[b, h, keys, pl.ds(coord.q_start, ROWS)] if self.is_matrix else ref.at[b, h, q_tile, keys]
            store_unoptimised(tile, values)
            return
        assert staging is not None
        # The reduction of the tile before must have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.is_matrix:
            store_strips(staging, values)
            first = (lax.div(coord.kv_start, jnp.int32(ROWS)) * self.tiles[0] + q_tile) * TILE_ROWS
            source, target = staging.reshape(TILE_ROWS, ROW), ref.at[b, h, pl.ds(first, TILE_ROWS)]
        else:
            staging[...] = values
            source, target = staging, ref.at[b, h, q_tile, keys]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def result(self, array: jax.Array) -> jax.Array:
        """Reduces the array to the gradient, in the shape and dtype of the bias."""
        _, _, q_length, kv_length = self.scores
        q_tiles, kv_tiles = self.tiles
        if self.is_matrix and self.added:
            # A tile of dS is [strips of queries, keys, queries of a strip]: the three axes of queries go before the two
            # of keys.
            array = array.reshape(*array.shape[:2], kv_tiles, q_tiles, ROWS // STRIP, ROWS, STRIP)
            array = array.transpose(0, 1, 3, 4, 6, 2, 5).reshape(*array.shape[:2], q_tiles * ROWS, kv_tiles * ROWS)
        elif self.is_matrix:
            array = jnp.swapaxes(array, 2, 3)
        # Sums over the queries of a tile need no cut: padded queries have P = 0.
        if self.is_matrix:
            array = array[:, :, :q_length]
        array = array[..., :kv_length]
        broadcast = tuple(
            axis for axis, (stored, size) in enumerate(zip(array.shape, self.bias_shape, strict=True)) if stored != size
        )
        return array.sum(axis=broadcast, keepdims=True).astype(self.bias_dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class PositionGradient:
    """The array in global memory to which the kernels for dK and dV add the gradient of the values of a bias.

    It takes the place of a `BiasGradient` in these kernels. ALiBi: for each batch element, head and key the sum of
    dS · |i − j| over the queries, which one warpgroup adds up in the order of its steps. Relative values: the sums of
    dS along diagonals, in ``rows`` rows for each batch element and head: one for each of a CTA's consumers, or if
    ``deterministic`` one for each 16 keys, to which one warp alone adds.

    Attributes:
      positions: of the kernels' scores; its ``last_query`` is not used.
      values_shape: ``[heads | 1, 1 or number of differences]``.
      values_dtype: of the gradient.
      scores: batch, heads, q_length and kv_length of the call.
    """

    positions: PositionOptions
    values_shape: tuple[int, int]
    values_dtype: DTypeLike
    scores: tuple[int, int, int, int]
    deterministic: bool

    added = False
    """No tile passes through shared memory."""

    @property
    def padded_lengths(self) -> tuple[int, int]:
        q_padded, kv_padded = (-(-length // BIAS_TILE) * BIAS_TILE for length in self.scores[2:])
        return q_padded, kv_padded

    @property
    def rows(self) -> int:
        """Rows of sums along diagonals."""
        return self.padded_lengths[1] // 16 if self.deterministic else 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        q_padded, kv_padded = self.padded_lengths
        if self.positions.kind == "alibi":
            return (*self.scores[:2], kv_padded)
        return (*self.scores[:2], self.rows, q_padded + kv_padded)

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return 4 * int(np.prod(self.shape))

    def staging(self, warpgroups: int) -> object:
        """Scratch type of a buffer for tiles in shared memory: there is none."""
        del warpgroups
        return None

    def staging_bytes(self, warpgroups: int) -> int:
        del warpgroups
        return 0

    def store(self, ref: Ref, staging: Ref | None, ds: jax.Array, coord: TileCoord) -> None:
        """Adds the sums of a float32 tile of dS, ``[64 keys, 64 queries]``."""
        del staging
        if self.positions.kind == "alibi":
            coord = dataclasses.replace(coord, shape=(ROWS, ROWS))
            sums = (ds * scaled_distances(coord, self.positions, None)).sum(axis=1)
            target = ref.at[coord.batch, coord.head, pl.ds(coord.kv_start, ROWS)]
            # No other warpgroup has these keys.
            store_unoptimised(target, plgpu.load(target, layout=row_layout(), optimized=False) + sums)
            return
        tile = lax.div(coord.kv_start, jnp.int32(ROWS))
        row, rows = (tile * (ROWS // 16), ROWS // 16) if self.deterministic else (lax.rem(tile, jnp.int32(2)), 1)
        first = coord.kv_start - coord.q_start - (ROWS - 1) + self.padded_lengths[0] - 1
        target = ref.at[coord.batch, coord.head, pl.ds(row, rows), pl.ds(first, DIAGONALS)]
        add_along_diagonals(ds, target, self.shape[-1])

    def result(self, array: jax.Array) -> jax.Array:
        """Reduces the array to the gradient, in the shape and dtype of the values."""
        if self.positions.kind == "alibi":
            return -array.sum(axis=(0, 2))[:, None].astype(self.values_dtype)
        sums = array.sum(axis=(0, 2))
        if self.values_shape[0] == 1:
            sums = sums.sum(axis=0, keepdims=True)
        begin = self.padded_lengths[0] - self.scores[2]
        return sums[:, begin : begin + self.values_shape[1]].astype(self.values_dtype)


def position_gradient_of(
    bias: PositionBias | None, positions: Any, scores: tuple[int, int, int, int], deterministic: bool
) -> PositionGradient | None:
    """The layout of the gradient of a bias's values; None without a bias."""
    if bias is None:
        return None
    heads, differences = bias.values.shape
    return PositionGradient(positions, (heads, differences), bias.values.dtype, scores, deterministic)


type AnyBiasGradient = BiasGradient | PositionGradient
"""The gradient of a bias that is an array, or of the values of one of positions."""
