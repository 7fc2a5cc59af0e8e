"""Tile schedules: the tiles of the score matrix that a work item of a Hopper kernel computes, and their order.

A schedule has *rows* and *columns*: queries and keys in the forward pass and for dQ, keys and queries for dK and dV. A
work item is a row of tiles, a step one of its tiles that is not fully masked. The order of steps is free, so tiles that
need the mask come first: a kernel tells by the index of a step whether to apply it, in a branch or in one loop for each
kind.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from tilewright.kernels.flash_attention.masking import Band, split_mask
from tilewright.kernels.masks import Mask, TileClass, TileGrid
from tilewright.kernels.pallas_types import Condition, Ref, Scalar

type TableRefs = tuple[Ref, ...]
"""References to the `Tables` of a ``TableSchedule`` in a kernel; empty for a ``BandSchedule``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one work item.

    Attributes:
      masked: the first so many steps need the mask.
      total: number of steps, at least one.
      tile: the column of tiles of a step.
    """

    masked: Scalar
    total: Scalar
    tile: Callable[[Scalar], Scalar]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of the score matrix and of its tiles, from the side of a schedule."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.block_columns)


@dataclasses.dataclass(frozen=True, slots=True)
class BandSchedule:
    """A schedule that arithmetic gives, of a mask that is a static band.

    Attributes:
      masked_rows, masked_columns: whether the ragged last tile of that side counts as masked.
      staggered: rows of tiles that run at once start at different columns (see `_rotated`).
    """

    extent: Extent
    band: Band
    masked_rows: bool
    masked_columns: bool
    staggered: bool = False

    @property
    def may_mask(self) -> bool:
        return bool(np.any(self.counts()[0]))

    @property
    def has_same_steps(self) -> bool:
        """True if every row of tiles has all tiles, in the same order."""
        if self.extent.column_tiles == 1:
            return True
        band, extent = self.band, self.extent
        is_full = band.lowest <= -extent.rows and band.highest >= extent.columns - 1
        return is_full and not self.masked_rows and not self.staggered

    def steps(
        self, tables: TableRefs, batch: Scalar, head: Scalar, row_tile: Scalar, descending: Condition = False
    ) -> Steps:
        """The steps of a row of tiles.

        Args:
          descending: whether full tiles come from the last to the first in a staggered schedule.
        """
        low, full_low, full_high, high = self._bounds(row_tile, lax)
        right = high - full_high
        masked = right + full_low - low

        def tile(step: Scalar) -> Scalar:
            # Masked tiles right of the full ones from the right on, those left of them, then the full ones.
            if isinstance(full_low, int) and full_low == 0 and not self.staggered:  # no masked tile on the left
                return high - 1 - step
            left, full = step - right, full_high - 1 - (step - masked)
            if self.staggered:
                ascending = full_low + _rotated(step - masked, full_high - full_low, row_tile, full_low, self.extent)
                full = ascending if descending is False else jnp.where(descending, full, ascending)
            inner = jnp.where(step < masked, full_low - 1 - left, full)
            return jnp.where(step < right, high - 1 - step, inner)

        return Steps(masked, high - low, tile)

    def columns(self, row_tile: Scalar) -> tuple[Scalar, Scalar]:
        """The first column of the tiles of a row that are steps, and the one behind the last."""
        low, _, _, high = self._bounds(row_tile, lax)
        return low, high

    @property
    def has_all_tiles(self) -> bool:
        """True if every tile is a step."""
        return bool(np.all(self.counts()[1] == self.extent.column_tiles))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Masked steps and all steps of each row of tiles, ``[row_tiles]``."""
        low, full_low, full_high, high = (
            np.broadcast_to(bound, (self.extent.row_tiles,))
            for bound in self._bounds(np.arange(self.extent.row_tiles, dtype=np.int64), np)
        )
        return high - full_high + full_low - low, high - low

    def _bounds(self, row_tile: Scalar | np.ndarray, xp: ModuleType) -> tuple[Any, Any, Any, Any]:
        """Columns of a row of tiles: first visible, first full, end of the full and end of the visible ones.

        Of an array of rows by NumPy, of a scalar on the device by lax.
        """
        extent, width = self.extent, self.extent.block_columns
        # A ragged last tile of columns counts as full where it needs no bound, as for queries with P = 0.
        count, whole = extent.column_tiles, extent.columns // width if self.masked_columns else extent.column_tiles
        first = row_tile * extent.block_rows
        last = (
            xp.minimum(first + extent.block_rows, extent.rows) - 1
            if xp is np
            else lax.min(first + extent.block_rows, jnp.int32(extent.rows)) - 1
        )

        def clip(value: Scalar | np.ndarray, low: int, high: int) -> Any:
            return np.clip(value, low, high) if xp is np else lax.max(lax.min(value, jnp.int32(high)), jnp.int32(low))

        def quotient(value: jax.Array | np.ndarray) -> Any:  # only of values >= 0: the device's division truncates
            return value // width if xp is np else lax.div(value, jnp.int32(width))

        low: Any = 0
        full_low: Any = 0
        # A bound that no row reaches stays a Python integer: nothing is computed of it on the device. The first row of
        # a tile sees furthest to the left, so it gives the first visible column; the last row gives the first full
        # tile.
        if self.band.lowest > -extent.rows:
            low = quotient(clip(first + self.band.lowest, 0, extent.columns - 1))
            full_low = quotient(clip(last + self.band.lowest, 0, count * width) + (width - 1))
        high: Any = count
        full_high: Any = whole
        # To the right it is the other way round.
        if self.band.highest < extent.columns - 1:
            high = quotient(clip(last + self.band.highest, 0, extent.columns - 1)) + 1
            full_high = _minimum(quotient(clip(first + self.band.highest + 1, 0, count * width)), whole, xp)
        if self.masked_rows and extent.rows % extent.block_rows:
            # Rows beyond the end are masked in every step of the last row of tiles.
            ragged = row_tile == extent.row_tiles - 1
            full_high = np.where(ragged, 0, full_high) if xp is np else jnp.where(ragged, 0, full_high)
        # A fully masked row of tiles has one step, whose tile is masked as a whole.
        high = _maximum(high, low + 1, xp)
        full_low = _minimum(_maximum(full_low, low, xp), high, xp)
        full_high = _minimum(_maximum(full_high, full_low, xp), high, xp)
        return low, full_low, full_high, high


def _rotated(number: Scalar, count: Scalar, row_tile: Scalar, first: Scalar, extent: Extent) -> jax.Array:
    """``number`` of ``count`` full tiles, rotated so that a row of tiles starts near the diagonal.

    CTAs that add to the dQ of one column at the same time wait for each other: the memory serialises their additions.
    """
    begin = lax.div(row_tile * extent.block_rows, jnp.int32(extent.block_columns)) - first
    rotated = number + lax.rem(jnp.maximum(begin, 0), jnp.maximum(count, 1))
    return jnp.where(rotated >= count, rotated - count, rotated)


def _minimum(a: Scalar | np.ndarray, b: Scalar | np.ndarray, xp: ModuleType) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return np.minimum(a, b) if xp is np else jnp.minimum(a, b)


def _maximum(a: Scalar | np.ndarray, b: Scalar | np.ndarray, xp: ModuleType) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return np.maximum(a, b) if xp is np else jnp.maximum(a, b)


@dataclasses.dataclass(frozen=True, slots=True)
class TableSchedule:
    """A schedule that is read from tables, which a small XLA program makes of the mask's arrays before the kernel.

    ``band`` is the static band of the mask, from the side of the schedule: all that is known while tracing.
    """

    extent: Extent
    band: Band
    batches: int
    heads: int
    staggered: bool

    @property
    def may_mask(self) -> bool:
        return True

    def steps(self, tables: TableRefs, batch: Scalar, head: Scalar, row_tile: Scalar) -> Steps:
        counts, entries = tables
        index = (batch if self.batches > 1 else 0, head if self.heads > 1 else 0, row_tile)
        masked, total = counts[(*index, 0)], counts[(*index, 1)]

        def tile(step: Scalar) -> Scalar:
            if self.staggered:
                full = masked + _rotated(step - masked, total - masked, row_tile, 0, self.extent)
                step = jnp.where(step < masked, step, full)
            return entries[(*index, step)]

        return Steps(masked, total, tile)


type TileSchedule = BandSchedule | TableSchedule
type Tables = tuple[Int[Array, "#batch #heads row_tiles 2"], Int[Array, "#batch #heads row_tiles column_tiles"]]
"""Masked steps and all steps of each row of tiles; the columns of its tiles, in the order of the steps."""


def plan_schedule(
    mask: Mask | None, extent: Extent, *, transposed: bool, masked_rows: bool, masked_columns: bool
) -> tuple[TileSchedule, Tables | tuple[()]]:
    """The schedule of one kernel, and its tables (none for static bands).

    A fully masked row of tiles has one step all the same, which is masked as a whole.

    Args:
      transposed: rows are keys.
      masked_rows, masked_columns: whether a tile that hangs over the end of that side needs the mask.
    """
    band, rest = split_mask(mask)
    band = band.transposed if transposed else band
    if rest is None:
        return BandSchedule(extent, band, masked_rows, masked_columns, transposed), ()
    if transposed:
        grid = TileGrid(extent.columns, extent.rows, extent.block_columns, extent.block_rows)
    else:
        grid = TileGrid(extent.rows, extent.columns, extent.block_rows, extent.block_columns)
    assert mask is not None
    classes = jnp.asarray(mask.classify(grid))
    classes = jnp.swapaxes(classes, 2, 3) if transposed else classes
    ragged = np.zeros((extent.row_tiles, extent.column_tiles), bool)
    ragged[-1] |= masked_rows and extent.rows % extent.block_rows != 0
    ragged[:, -1] |= masked_columns and extent.columns % extent.block_columns != 0
    classes = jnp.where(ragged, jnp.minimum(classes, TileClass.PARTIAL), classes)
    # A stable sort: masked tiles, full ones, then those without a step, each in the order of their columns.
    order = jnp.where(classes == TileClass.PARTIAL, 0, jnp.where(classes == TileClass.FULL, 1, 2))
    entries = jnp.argsort(order, axis=-1, stable=True).astype(jnp.int32)
    masked = jnp.sum(classes == TileClass.PARTIAL, axis=-1, dtype=jnp.int32)
    total = masked + jnp.sum(classes == TileClass.FULL, axis=-1, dtype=jnp.int32)
    # A fully masked row of tiles has one step, whose tile is masked as a whole.
    counts = jnp.stack([jnp.where(total == 0, 1, masked), jnp.maximum(total, 1)], axis=-1)
    return TableSchedule(extent, band, classes.shape[0], classes.shape[1], transposed), (counts, entries)


def row_steps(schedule: TileSchedule) -> np.ndarray:
    """Steps of each row of tiles as far as static bands tell, ``[row_tiles]``: the costs of a longest-first order."""
    # What arrays mask is known on the device only: their part of the mask counts as if it were not there.
    if isinstance(schedule, TableSchedule):
        schedule = BandSchedule(schedule.extent, schedule.band, True, True)
    return schedule.counts()[1]
