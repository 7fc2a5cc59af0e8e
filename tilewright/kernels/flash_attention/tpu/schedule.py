"""The blocks of the score matrix that a kernel for TPUs visits: by arithmetic of a static band, or from a table.

The last axis of the grid counts the blocks of keys that a block of queries visits. A step behind the last of them
computes nothing, and loads nothing, since its blocks are those of the step before.
"""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.masking import FAR, Band, split_mask
from tilewright.kernels.masks import Mask, TileClass, TileClasses, TileGrid, reduce_classes
from tilewright.kernels.pallas_types import Condition, Ref, Scalar

MAX_ENTRIES = 1 << 16
"""Largest number of entries of a table: 256 KiB of the scalar memory, of which a core has 1 MiB.

A table of all heads or batch elements that is larger becomes one for all of them, in which a block is visited if any of
them needs it."""


class Step(NamedTuple):
    """A step of the grid: its block of keys, and whether that is computed without or with the mask."""

    block: Scalar
    full: Condition
    masked: Condition


class Corner(NamedTuple):
    """The place of a block that the mask touches: integers if that is known while tracing.

    Attributes:
      difference: its first key minus its first query; None if the band hides nothing of it.
      limit: the keys from its first one to the end of all keys; None if none of the block is behind them.
    """

    difference: Scalar | None
    limit: Scalar | None


class Kinds(NamedTuple):
    """The kinds of steps that a schedule has.

    Attributes:
      other: whether there are any that compute nothing, or apply the mask.
      full, masked: whether there are blocks that the mask does not touch, and such that it does.
      corners: of those that it does; empty if they are too many, or only a table knows them.
    """

    other: bool
    full: bool
    masked: bool
    corners: list[Corner]


MAX_CORNERS = 4
"""Most corners that have code of their own, which leaves out what the band hides: it is compiled for each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The visited blocks of keys of every block of queries.

    Attributes:
      band: the static band of the mask, in indices.
      table: batch elements and heads of the table; None if the band is all of the mask.
      first, end: the range of blocks of keys that a call visits.
    """

    grid: TileGrid
    band: Band
    table: tuple[int, int] | None
    first: int
    end: int

    @property
    def steps(self) -> int:
        """The most blocks of keys that a block of queries can visit, at least one."""
        low, high = self._visible(np.arange(self.grid.q_tiles, dtype=np.int64), np)
        return max(int(np.max(high - low)) + 1, 1)

    def kinds(self) -> Kinds:
        """The kinds of blocks that there are, as far as a static band tells; of a table there may be any."""
        grid, band = self.grid, self.band
        if self.table is not None:
            return Kinds(True, True, True, [])
        found: dict[Corner, None] = {}
        full = 0
        for row in range(grid.q_tiles):
            low, high = (int(bound) for bound in self._visible(np.int64(row), np))
            for block in range(low, high + 1):
                difference = block * grid.block_k - row * grid.block_q
                inside = (
                    difference - (grid.block_q - 1) >= band.lowest and difference + grid.block_k - 1 <= band.highest
                )
                limit = grid.kv_length - block * grid.block_k
                if inside and limit >= grid.block_k:
                    full += 1
                else:
                    found[Corner(None if inside else difference, limit if limit < grid.block_k else None)] = None
        empty = full < grid.q_tiles * self.steps
        return Kinds(empty, full > 0, bool(found), list(found) if len(found) <= MAX_CORNERS else [])

    def visited(self) -> int:
        """The number of blocks that the static band leaves."""
        low, high = self._visible(np.arange(self.grid.q_tiles, dtype=np.int64), np)
        return int(np.sum(np.maximum(high - low + 1, 0)))

    def fetched(self, entries: Ref | None, batch: Scalar, head: Scalar, row: Scalar, step: Scalar) -> Scalar:
        """The block of keys that is in VMEM in a step."""
        if self.table is not None:
            return lax.shift_right_logical(self._entry(entries, batch, head, row, step), 2)
        low, high = self._visible(row, jnp)
        return jnp.clip(low + step, self.first, jnp.maximum(high, self.first))

    def step(self, entries: Ref | None, batch: Scalar, head: Scalar, row: Scalar, step: Scalar) -> Step:
        """The block of a step, and how it is computed."""
        if self.table is not None:
            entry = self._entry(entries, batch, head, row, step)
            kind = entry & 3
            return Step(lax.shift_right_logical(entry, 2), kind == TileClass.FULL, kind == TileClass.PARTIAL)
        grid, band = self.grid, self.band
        low, high = self._visible(row, jnp)
        block = low + step
        # Differences of a key and a query in the block: from the corner of the last query and the first key on.
        least = block * grid.block_k - row * grid.block_q - (grid.block_q - 1)
        most = least + grid.block_q - 1 + grid.block_k - 1
        # Integers that tell how far the bounds are, since libtpu's simulator of a kernel's time follows neither negated
        # conditions nor divisions.
        slack = grid.kv_length - (block + 1) * grid.block_k
        reach = self.end - 1 - block
        if band.lowest > -FAR:
            slack, reach = jnp.minimum(slack, least - band.lowest), jnp.minimum(reach, most - band.lowest)
        if band.highest < FAR:
            slack, reach = jnp.minimum(slack, band.highest - most), jnp.minimum(reach, band.highest - least)
        kept = jnp.clip(block, self.first, jnp.maximum(high, self.first))
        return Step(kept, jnp.minimum(slack, reach) >= 0, (slack < 0) & (reach >= 0))

    def _entry(self, entries: Ref | None, batch: Scalar, head: Scalar, row: Scalar, step: Scalar) -> jax.Array:
        assert entries is not None
        batches, heads = self.table or (1, 1)
        index = (batch if batches > 1 else 0) * heads + (head if heads > 1 else 0)
        return entries[(index * self.grid.q_tiles + row) * self.steps + step]

    def _visible(self, row: Scalar | np.integer | np.ndarray, xp: ModuleType) -> tuple[Any, Any]:
        """The first and the last block of keys that the band leaves to a block of queries; the last may be less."""
        grid = self.grid

        def quotient(value: jax.Array | np.ndarray) -> Any:  # of values from 0 on: the device's division truncates
            return value // grid.block_k if xp is np else lax.div(value, jnp.int32(grid.block_k))

        low: Any = row * 0 + self.first
        high: Any = row * 0 + (self.end - 1)
        start, length = row * grid.block_q, grid.kv_tiles * grid.block_k
        if self.band.lowest > -FAR:
            low = xp.maximum(low, quotient(xp.clip(start + self.band.lowest, 0, length)))
        if self.band.highest < FAR:
            last = start + grid.block_q - 1 + self.band.highest
            high = xp.minimum(high, xp.where(last < 0, -1, quotient(xp.clip(last, 0, length))))
        return low, high


def plan_schedule(
    mask: Mask | None, grid: TileGrid, keys: tuple[int, int] | None = None
) -> tuple[Schedule, jax.Array | None]:
    """The schedule of a call, and its table: int32, for each step its block of keys times 4 plus its class.

    Args:
      keys: the first of the blocks of keys to visit and the one behind the last; all by default.
    """
    band, rest = split_mask(mask)
    first, end = keys or (0, grid.kv_tiles)
    if rest is None:
        return Schedule(grid, band, None, first, end), None
    assert mask is not None
    classes = _small(mask.classify(grid))
    schedule = Schedule(grid, band, (classes.shape[0], classes.shape[1]), first, end)
    if grid.kv_length % grid.block_k:
        ragged = np.arange(grid.kv_tiles) == grid.kv_tiles - 1
        classes = jnp.where(ragged, jnp.minimum(classes, TileClass.PARTIAL), classes)
    classes = jnp.asarray(classes)[..., first:end]
    # A stable sort: visited blocks in their order, then the others.
    order = jnp.argsort(classes == TileClass.EMPTY, axis=-1, stable=True)[..., : schedule.steps]
    classes = jnp.take_along_axis(classes, order, axis=-1)
    count = jnp.sum(classes != TileClass.EMPTY, axis=-1, keepdims=True)
    last = jnp.take_along_axis(order, jnp.maximum(count - 1, 0), axis=-1)
    blocks = jnp.where(jnp.arange(schedule.steps) < count, order, last) + first
    return schedule, (4 * blocks + classes).astype(jnp.int32).reshape(-1)


def _small(classes: TileClasses) -> TileClasses:
    """Classes that a table has room for, if need be of several heads or batch elements together."""
    if classes.size > MAX_ENTRIES:
        return reduce_classes(classes)[None, None]
    return classes
