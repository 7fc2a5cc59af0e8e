"""What there is to do for packed queries over pages on Hopper: shared memory, tiles in order, the pages that exist."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import RingPlan, ring_scratch
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.paged_attention.token_layout import TilePlan

CONSUMERS = 2

BLOCK_ROWS = CONSUMERS * ROWS
"""Query rows of a tile."""

RESERVED = 2080
"""Shared memory for the remaining barriers and alignment, in bytes."""

TOGETHER = 48
"""Tiles of a key head that are begun before those of the next one: they find its keys in the cache."""

TILE_COST = 2
"""What a tile takes besides its blocks of keys, in blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The shared memory of the kernel; ``copies`` of pages make a block of keys, ``pieces`` a tile of queries."""

    dtype: DTypeLike
    dim: int
    block_k: int
    num_stages: int
    copies: int
    pieces: int

    @property
    def keys(self) -> RingPlan:
        tile = SharedTile((self.block_k, self.dim), self.dtype)
        return RingPlan(tile, self.num_stages, CONSUMERS, copies=self.copies)

    @property
    def queries(self) -> SharedTile:
        return SharedTile((BLOCK_ROWS, self.dim), self.dtype)

    def scratch(self) -> list[Any]:
        """Rings of keys and values; queries as they come, and as the product wants them; barriers: all pieces have
        come, and values have been cleared.

        Queries come, and outputs go, row by row: TMA swizzles whole groups of 8 rows only, from every eighth row on.
        """
        return [
            plgpu.SMEM(self.queries.shape, self.dtype),
            *ring_scratch((self.keys, self.keys)),
            self.queries.scratch(),
            plgpu.Barrier(num_arrivals=self.pieces),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ]

    @property
    def shared_bytes(self) -> int:
        return 2 * (self.keys.shared_bytes + self.queries.stack_bytes(1)) + RESERVED


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCall:
    """The static half of a call.

    Attributes:
      tiles: of queries, at most.
      group: query heads of a key head.
      page_size: a whole number of blocks of keys, or the other way round.
      columns: of the page table, a whole number of blocks.
      left, right: keys visible before and after a query's position, None for all.
    """

    tiles: int
    kv_heads: int
    group: int
    page_size: int
    columns: int
    block_k: int
    num_stages: int
    softmax_scale: float
    left: int | None
    right: int | None

    @property
    def tokens(self) -> int:
        """Of a warpgroup's rows, in which those of a head lie side by side."""
        return ROWS // self.group

    @property
    def width(self) -> int:
        """Tiles of a key head that are begun side by side."""
        return min(TOGETHER, self.tiles)

    @property
    def places(self) -> int:
        """Of tiles in their order: a whole number of widths, of which the last ones may have none."""
        return -(-self.tiles // self.width) * self.width

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns

    @property
    def copies(self) -> int:
        """Pages of a block of keys."""
        return max(self.block_k // self.page_size, 1)

    @property
    def blocks(self) -> int:
        """Blocks of keys of a sequence."""
        return self.capacity // self.block_k

    def plan(self, dtype: DTypeLike, dim: int) -> ChunkPlan:
        return ChunkPlan(dtype, dim, self.block_k, self.num_stages, self.copies, CONSUMERS * self.group)


@dataclasses.dataclass(frozen=True)
class TileWork:
    """What there is to do for tiles, as arrays or, in the kernel, as scalars.

    Some row sees keys from ``low`` on and before ``high``, every row those from ``all_low`` on and before ``all_high``.
    ``tile`` is the number in the plan, and ``token`` the first of the packed ones.
    """

    tile: jax.Array
    sequence: jax.Array
    token: jax.Array
    tokens: jax.Array
    position: jax.Array
    low: jax.Array
    high: jax.Array
    all_low: jax.Array
    all_high: jax.Array

    def first(self, block_k: int) -> jax.Array:
        """The first block of keys."""
        return lax.div(self.low, jnp.int32(block_k))

    def total(self, block_k: int) -> jax.Array:
        """Blocks of keys, at least one."""
        return jnp.maximum(lax.div(self.high + (block_k - 1), jnp.int32(block_k)) - self.first(block_k), 1)


FIELDS = len(dataclasses.fields(TileWork))


def ordered_work(plan: TilePlan, lengths: jax.Array, call: ChunkCall) -> jax.Array:
    """A `TileWork` of all places in the order in which tiles are best begun, flat; a place without a tile has no rows.

    The costliest come first, those of one warpgroup and those of two each at a steady pace: as much of the one kind's
    cost has been begun as of the other's.

    Args:
      lengths: of the sequences of the plan, ``[tiles]``.
    """
    length = jnp.clip(lengths, 0, min(call.capacity, FAR))
    low, high, all_low, all_high = jnp.zeros_like(length), length, jnp.zeros_like(length), length
    if call.right is not None:
        high = jnp.clip(plan.position + plan.rows + call.right, 0, length)
        all_high = jnp.clip(plan.position + (call.right + 1), 0, length)
    if call.left is not None:
        low = jnp.clip(plan.position - call.left, 0, length)
        all_low = jnp.clip(plan.position + plan.rows - (call.left + 1), 0, length)
    nothing = high <= low
    low, high = jnp.where(nothing, 0, low), jnp.where(nothing, 0, high)
    number = jnp.arange(call.tiles, dtype=jnp.int32)
    work = TileWork(number, plan.sequence, plan.token, plan.rows, plan.position, low, high, all_low, all_high)
    cost = jnp.where(plan.rows > 0, work.total(call.block_k) + TILE_COST, 0)

    def before(key: jax.Array) -> jax.Array:
        """``[tiles, tiles]``: whether the second tile comes before the first, a smaller key first."""
        return (key[None] < key[:, None]) | ((key[None] == key[:, None]) & (number[None] < number[:, None]))

    # By comparison of all with all: sorting takes a GPU longer.
    short = plan.rows <= call.tokens
    alike = short[None] == short[:, None]
    begun, all_alike = (jnp.where(which & alike, cost, 0).sum(axis=1) for which in (before(-cost), True))
    share = jnp.where(plan.rows > 0, begun / jnp.maximum(all_alike, 1), 2.0)
    place = before(share).sum(axis=1, dtype=jnp.int32)
    fields = jnp.stack([getattr(work, field.name) for field in dataclasses.fields(TileWork)])
    ordered = jnp.zeros((FIELDS, call.places), jnp.int32)
    return ordered.at[:, place].set(fields, unique_indices=True).reshape(-1)


def present_pages(page_table: jax.Array, num_pages: int, call: ChunkCall) -> tuple[jax.Array, jax.Array]:
    """The table without what is no page, and for each block of keys the bits of those of its pages that are there.

    Args:
      page_table: ``[sequences, columns]``, at most ``call.columns``.

    Returns:
      int32 ``[sequences · call.columns]`` and ``[sequences · call.blocks]``.
    """
    table = jnp.pad(page_table, ((0, 0), (0, call.columns - page_table.shape[1])), constant_values=-1)
    there = (table >= 0) & (table < num_pages)
    if call.page_size > call.block_k:
        bits = jnp.repeat(there.astype(jnp.int32), call.page_size // call.block_k, axis=1)
    else:
        bit = jnp.asarray(1 << np.arange(call.copies), jnp.int32)
        bits = (there.reshape(len(table), call.blocks, call.copies) * bit).sum(axis=2, dtype=jnp.int32)
    return jnp.where(there, table, 0).reshape(-1), bits.reshape(-1)
