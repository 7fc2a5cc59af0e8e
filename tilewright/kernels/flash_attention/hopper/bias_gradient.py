"""The gradient of an additive bias on Hopper: dS itself, or sums of it, from each tile of the kernels for dK and dV.

A tile of dS is transposed on its way through shared memory, and TMA stores it to an array ``[queries, keys]``: the
gradient, if nothing shares the bias. A bias that batch elements or heads share gets the sum of their dS, by TMA
reductions (``added``) or, if deterministic, by an XLA sum over an array that keeps them separate.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import PositionOptions, TileCoord, scaled_distances
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.diagonals import add_along_diagonals
from tilewright.kernels.hopper.limits import TMA_STRIDE_BYTES
from tilewright.kernels.hopper.panels import PanelRef, store_tile
from tilewright.kernels.hopper.shared import SharedTile, aligned_bytes
from tilewright.kernels.hopper.tiles import ROWS, row_layout, store_unoptimised, tile_layout
from tilewright.kernels.pallas_types import Ref, Scalar

BIAS_TILE = 128
"""Keys and queries to whose multiple the gradient is padded in global memory: those of the largest step."""

CACHED_SUMS = 16 << 20
"""Bytes of sums over the batch that are added to at a time, so that they stay in the L2 cache."""

DIAGONALS = 2 * ROWS - 1
"""Diagonals of a tile of dS, which has 64 keys and queries."""


@dataclasses.dataclass(frozen=True, slots=True)
class BiasGradient:
    """The array in global memory to which the kernels for dK and dV store the gradient of a bias.

    It is a matrix ``[queries, keys]``, also for a bias with one key; for a bias with one query, the sums over the
    queries of each tile, ``[tiles, keys]``, a 64th of that. Where batch or heads share the bias, tiles are added by TMA
    reductions, in no fixed order; if ``deterministic``, every batch element and head has an array of its own instead,
    and they are summed afterwards.

    Attributes:
      bias_shape: ``[batch | 1, heads | 1, q_length | 1, kv_length | 1]``.
      bias_dtype: dtype of the array if it holds the gradient itself; where anything is to be summed, it is float32.
      scores: batch, heads, q_length and kv_length of the call.
      tile_queries: that pass through shared memory at a time, 64 or, where that is scarce, 32.
    """

    bias_shape: tuple[int, ...]
    bias_dtype: DTypeLike
    scores: tuple[int, int, int, int]
    deterministic: bool
    tile_queries: int = ROWS

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
    def exact(self) -> bool:
        """True if the array is the gradient but for the ends of its rows: in panels TMA clips tiles of 16 bits."""
        return not self.shared and 1 not in self.bias_shape[2:] and jnp.dtype(self.bias_dtype).itemsize == 2

    def covered_by(self, schedule: TileSchedule) -> bool:
        """True if the kernel stores all of the array, so that it need not be cleared: it knows which tiles it skips."""
        return self.is_matrix and not self.added and isinstance(schedule, BandSchedule)

    def reordered(self, order: np.ndarray, row_tiles: int, key_parts: int) -> np.ndarray:
        """Work items so that what batch elements add to the same tiles stays in the L2 cache.

        Where the sums of all heads do not fit it, some heads of all batch elements come before the others.

        Args:
          order: ``program_order`` over tiles of keys, of matrices batch · key_parts + part.
        """
        # Reductions of float32 run at 2.6 to 3.4 TB/s where the sums fit the cache, else at 2.2. With a few heads of
        # all batch elements first, Flan-T5's 75 MB of sums took 0.789 ms instead of 1.045
        # (docs/notes/hopper_attention.md).
        per_part = self.bytes // max(key_parts, 1)
        at_once = max(CACHED_SUMS // per_part, 1)
        if not self.added or self.bias_shape[1] == 1 or at_once >= key_parts:
            return order
        matrices = np.arange(self.scores[0] * key_parts)
        batch, part = np.divmod(matrices, key_parts)
        # By groups of heads, within one by batch element: those add to the same sums while they are in the L2 cache.
        sequence = np.lexsort((part, batch, part // at_once))
        return (sequence[order // row_tiles] * row_tiles + order % row_tiles).astype(order.dtype)

    @property
    def is_matrix(self) -> bool:
        """True if the bias has queries; else tiles are summed over theirs."""
        return self.bias_shape[2] > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        q_tiles, kv_tiles = self.tiles
        if self.exact:
            _, _, q_length, kv_length = self.scores
            alignment = TMA_STRIDE_BYTES // jnp.dtype(self.dtype).itemsize
            matrix = q_length, -(-kv_length // alignment) * alignment
        else:
            matrix = q_tiles * ROWS if self.is_matrix else q_tiles, kv_tiles * ROWS
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
        """Scratch of a buffer per warpgroup for tiles that wait for their store or reduction; None if none do."""
        if self.is_matrix:
            return self.tile.stack(warpgroups)
        return plgpu.SMEM((warpgroups, ROWS), jnp.float32) if self.added else None

    @property
    def tile(self) -> SharedTile:
        """The part of a tile of a matrix that passes through shared memory at a time, ``[queries, keys]``."""
        return SharedTile((self.tile_queries, ROWS), self.dtype, panelled=self.exact)

    def staging_bytes(self, warpgroups: int) -> int:
        if self.is_matrix:
            return self.tile.stack_bytes(warpgroups)
        return aligned_bytes((warpgroups, ROWS), jnp.float32) if self.added else 0

    def store(self, ref: Ref, staging: Ref | None, ds: jax.Array, coord: TileCoord) -> None:
        """Stores or adds a float32 tile of dS, ``[64 keys, 64 queries]``.

        Args:
          ref: the array.
          staging: the buffer of the calling warpgroup; None for a vector that is not ``added``.
          coord: of this tile.
        """
        b = coord.batch if self.shape[0] > 1 else 0
        h = coord.head if self.shape[1] > 1 else 0
        keys = pl.ds(coord.kv_start, ROWS)
        if self.is_matrix:
            assert staging is not None
            for begin in range(0, ROWS, self.tile_queries):
                # One buffer for each warpgroup: `_fill` waits until the copy before has read it.
                part = ds if self.tile_queries == ROWS else ds[:, begin : begin + self.tile_queries]
                self._fill(staging, part)
                target = ref.at[b, h, pl.ds(coord.q_start + begin, self.tile_queries), keys]
                if self.added:
                    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")
                else:
                    store_tile(staging, target)
            return
        # A row for each tile of queries, so that each is the sum of one step; steps add to one only where heads share
        # the bias.
        target, sums = ref.at[b, h, lax.div(coord.q_start, jnp.int32(ROWS)), keys], ds.sum(axis=1)
        if not self.added:
            store_unoptimised(target, sums)
            return
        assert staging is not None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the reduction of the tile before has read the buffer
        staging[...] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")

    def _fill(self, staging: Ref, values: jax.Array) -> None:
        """Moves ``[64 keys, tile_queries]`` of an accumulator into the buffer, transposed."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy before has read the buffer
        if isinstance(staging, PanelRef):
            (panel,) = staging.operands
            panel.T[...] = values.astype(self.dtype)  # by stmatrix, which transposes 16 bits
        else:
            # 32-bit elements have no stmatrix: the other layout moves them between lanes before the store.
            staging.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

    def clear_skipped(
        self, ref: Ref, staging: Ref | None, schedule: TileSchedule, row_tile: Scalar, coord: TileCoord
    ) -> None:
        """Stores zeros to the tiles of 64 keys that have no step, where the kernel stores all of the array.

        Args:
          row_tile: of the schedule, whose columns are queries.
          coord: of the keys; its queries are not read.
        """
        if not self.covered_by(schedule) or not isinstance(schedule, BandSchedule) or schedule.has_all_tiles:
            return
        assert staging is not None
        size = self.tile_queries
        self._fill(staging, plgpu.layout_cast(jnp.zeros((ROWS, size), jnp.float32), tile_layout()))

        def clear(tile: Scalar, _: None) -> None:
            target = ref.at[coord.batch, coord.head, pl.ds(tile * size, size), pl.ds(coord.kv_start, ROWS)]
            store_tile(staging, target)

        per_column = schedule.extent.block_columns // size
        # The buffer keeps its zeros, so the stores below wait for nothing.
        low, high = schedule.columns(row_tile)
        for first, last in ((0, low), (high, schedule.extent.column_tiles)):
            if not isinstance(first, int) or not isinstance(last, int) or first < last:
                lax.fori_loop(first * per_column, last * per_column, clear, None)

    def result(self, array: jax.Array) -> jax.Array:
        """Reduces the array to the gradient, in the shape and dtype of the bias."""
        _, _, q_length, kv_length = self.scores
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
    ``deterministic`` one for each 16 keys, to which a single warp adds.

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
        # A row for each warp has bits that repeat, but many rows are to be summed: 2 × 2048 took 779 µs so, and 615
        # with two rows (docs/notes/hopper_attention.md).
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

    @property
    def exact(self) -> bool:
        """True if the array is the gradient itself: it holds sums."""
        return False

    def covered_by(self, schedule: TileSchedule) -> bool:
        """True if the kernel stores all of the array: it adds to zeros."""
        del schedule
        return False

    def reordered(self, order: np.ndarray, row_tiles: int, key_parts: int) -> np.ndarray:
        """Work items in the order that suits the gradient: any does."""
        del row_tiles, key_parts
        return order

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
        # Two rows where order does not matter: the consumers of a CTA, neighbours in keys, then add to different
        # addresses.
        row, rows = (tile * (ROWS // 16), ROWS // 16) if self.deterministic else (lax.rem(tile, jnp.int32(2)), 1)
        # Diagonals by key − query from that of the first key and the last padded query, which is number 0.
        first = coord.kv_start - coord.q_start - (ROWS - 1) + self.padded_lengths[0] - 1
        target = ref.at[coord.batch, coord.head, pl.ds(row, rows), pl.ds(first, DIAGONALS)]
        add_along_diagonals(ds, target, self.shape[-1])

    def result(self, array: jax.Array) -> jax.Array:
        """Reduces the array to the gradient, in the shape and dtype of the values."""
        if self.positions.kind == "alibi":
            # The array has sums of dS · |i − j|, and the bias is −slope · |i − j|.
            return -array.sum(axis=(0, 2))[:, None].astype(self.values_dtype)
        sums = array.sum(axis=(0, 2))
        if self.values_shape[0] == 1:
            sums = sums.sum(axis=0, keepdims=True)
        # Differences begin at that of key 0 and the last query; the array's at that of the last padded one.
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
