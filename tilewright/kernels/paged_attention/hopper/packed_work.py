"""Host side of `packed`: shared memory, the order of the tiles of queries, and the pages that are present.

Sizes are static; what depends on lengths and on the page table is computed by XLA before the kernel.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import NARROW_REGISTERS, REGISTERS, RegisterSplit
from tilewright.kernels.hopper.ring import RingPart, RingPlan
from tilewright.kernels.hopper.schedule import Rounds
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.turns import TurnsPlan
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.paged_attention.token_layout import TilePlan
from tilewright.kernels.pallas_types import Scalar

CONSUMERS = 2

BLOCK_ROWS = CONSUMERS * ROWS
"""Query rows of a tile."""

RESERVED = 2080
"""Shared memory for the remaining barriers and alignment, in bytes."""

TILES_AT_ONCE = 48
"""Tiles of a key head that are started before those of the next one: they find its K and V in the L2 cache."""

WORD = 32
"""Bits of a word of ``tree_mask``."""

TILE_OVERHEAD = 2
"""Cost of a tile besides its steps, in steps."""


class ChunkScratch[R, T, M](NamedTuple):
    """Shared memory of the kernel: plans of rings and types or, in the kernel, what they bind.

    Attributes:
      rows: Q as TMA brings it: row-major, for TMA swizzles only whole groups of 8 rows that start at a multiple of 8,
        and a head's tokens need not.
      out: the output before its TMA stores, row-major.
      k, v: blocks of keys and values.
      q_tile: Q swizzled, as wgmma reads it.
      queries_ready: a barrier: all pieces of Q have arrived in ``rows``.
      queries_free: a barrier: both consumers have read ``rows``.
      cleared: a barrier: both consumers have cleared masked rows of V.
      turns: of the consumers, to issue MMAs under ``ping_pong``.
    """

    rows: M
    out: M
    k: R
    v: R
    q_tile: M
    queries_ready: M
    queries_free: M
    cleared: M
    turns: T


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The shared memory of the kernel.

    Attributes:
      pages_per_block: TMA copies that fill a stage of K or V, one of each page.
      pieces: TMA copies that fill Q, one of each head of each consumer.
    """

    dtype: DTypeLike
    dim: int
    block_k: int
    num_stages: int
    pages_per_block: int
    pieces: int

    @property
    def keys(self) -> RingPlan:
        """The ring of K; that of V is the same."""
        part = RingPart(SharedTile((self.block_k, self.dim), self.dtype), copies=self.pages_per_block)
        return RingPlan((part,), self.num_stages, CONSUMERS)

    @property
    def registers(self) -> RegisterSplit:
        """Registers of the warpgroups: consumers of narrow heads need few, and leave them to the producer."""
        return NARROW_REGISTERS if self.dim <= 64 else REGISTERS[CONSUMERS]

    @property
    def queries(self) -> SharedTile:
        return SharedTile((BLOCK_ROWS, self.dim), self.dtype)

    def scratch(self) -> ChunkScratch[RingPlan, TurnsPlan, object]:
        """The rings, and scratch types of the buffers and of the barriers."""
        return ChunkScratch(
            rows=plgpu.SMEM(self.queries.shape, self.dtype),
            out=plgpu.SMEM(self.queries.shape, self.dtype),
            k=self.keys,
            v=self.keys,
            q_tile=self.queries.scratch(),
            queries_ready=plgpu.Barrier(num_arrivals=self.pieces),
            queries_free=plgpu.Barrier(num_arrivals=CONSUMERS),
            cleared=plgpu.Barrier(num_arrivals=CONSUMERS),
            turns=TurnsPlan(CONSUMERS),
        )

    @property
    def shared_bytes(self) -> int:
        return 2 * self.keys.shared_bytes + 3 * self.queries.stack_bytes(1) + RESERVED


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCall:
    """The static half of a call.

    Attributes:
      tiles: tiles of queries, at most.
      group: query heads of a key head.
      page_size: a multiple of ``block_k``, or a divisor.
      columns: columns of the page table, a whole number of blocks.
      left, right: keys visible before and after a query's position, None for all.
      ping_pong: whether the consumers take turns to issue MMAs.
      num_sms: CTAs that run at a time.
      items_of_program: the most items of a CTA.
      mask_words: words of a row in `tree_rows`; 0 without a ``tree_mask``.
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
    ping_pong: bool
    num_sms: int
    items_of_program: int
    mask_words: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a consumer, whose 64 rows are these for each head of the group, head by head."""
        return ROWS // self.group

    @property
    def tiles_at_once(self) -> int:
        """Tiles of a key head that are started side by side."""
        return min(TILES_AT_ONCE, self.tiles)

    @property
    def order_length(self) -> int:
        """Length of the order of tiles, a multiple of ``tiles_at_once``: the last indices may have no tile."""
        return -(-self.tiles // self.tiles_at_once) * self.tiles_at_once

    @property
    def items(self) -> int:
        """Work items: tiles of each key head, of which the last ones may have no tile."""
        return self.order_length * self.kv_heads

    @property
    def rounds(self) -> Rounds:
        """The items of each CTA. The hardware starts the next CTA where one ends, which evens out their times."""
        return Rounds(min(self.num_sms, self.items), self.items_of_program)

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns

    @property
    def pages_per_block(self) -> int:
        """Pages of a block of keys, 1 where a page has several blocks."""
        return max(self.block_k // self.page_size, 1)

    @property
    def page_rows(self) -> int:
        """Keys of a block that one page has."""
        return self.block_k // self.pages_per_block

    @property
    def all_pages(self) -> int:
        """The bits of a block whose pages are all present."""
        return (1 << self.pages_per_block) - 1

    @property
    def blocks(self) -> int:
        """Blocks of keys of a sequence."""
        return self.capacity // self.block_k

    def first_word(self, work: "TileWork") -> jax.Array:
        """The place of a row's first word among those of all keys: behind the tokens that were in the cache before."""
        return lax.div(work.all_high, jnp.int32(WORD))

    def plan(self, dtype: DTypeLike, dim: int) -> ChunkPlan:
        return ChunkPlan(dtype, dim, self.block_k, self.num_stages, self.pages_per_block, CONSUMERS * self.group)


@dataclasses.dataclass(frozen=True)
class TileWork:
    """Tiles of queries and the keys that they see, as arrays or, in the kernel, as scalars.

    Attributes:
      tile: index of the tile in the plan.
      token: first token, among the packed ones.
      tokens: number of tokens, 0 where there is no tile.
      position: position of the first token in its sequence.
      low, high: some row sees keys from ``low`` on, and before ``high``.
      all_low, all_high: every row sees keys from ``all_low`` on, and before ``all_high``.
      written: keys from ``low`` on and before ``written`` are those of tokens, if their pages are present; others may
        hold anything.
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
    written: jax.Array

    def first(self, call: ChunkCall) -> Scalar:
        """The first block of keys."""
        return 0 if call.left is None else lax.div(self.low, jnp.int32(call.block_k))

    def total(self, call: ChunkCall) -> jax.Array:
        """Blocks of keys, at least one."""
        return jnp.maximum(lax.div(self.high + (call.block_k - 1), jnp.int32(call.block_k)) - self.first(call), 1)


FIELDS = len(dataclasses.fields(TileWork))


def tile_work(plan: TilePlan, lengths: jax.Array, call: ChunkCall, first_new: jax.Array | None = None) -> TileWork:
    """The tiles of a plan and the keys that they see.

    Args:
      lengths: lengths of the sequences of the plan's tiles, ``[tiles]``.
      first_new: positions of the first new tokens of these sequences, if there is a ``tree_mask``.
    """
    # Lengths come from the device: what lies beyond the page table, or is negative, must not be addressed.
    length = jnp.clip(lengths, 0, min(call.capacity, FAR))
    low, high, all_low, all_high = jnp.zeros_like(length), length, jnp.zeros_like(length), length
    if call.right is not None:
        high = jnp.clip(plan.position + plan.rows + call.right, 0, length)
        all_high = jnp.clip(plan.position + (call.right + 1), 0, length)
    if first_new is not None:
        all_high = jnp.clip(first_new, 0, length)
    if call.left is not None:
        low = jnp.clip(plan.position - call.left, 0, length)
        all_low = jnp.clip(plan.position + plan.rows - (call.left + 1), 0, length)
    # Without keys a tile still has a step (`TileWork.total`), which is fully masked: its rows get 0 and −∞.
    no_keys = high <= low
    low, high, written = (jnp.where(no_keys, 0, x) for x in (low, high, length))
    number = jnp.arange(call.tiles, dtype=jnp.int32)
    return TileWork(number, plan.sequence, plan.token, plan.rows, plan.position, low, high, all_low, all_high, written)


def tree_rows(tree_mask: jax.Array, work: TileWork, first_new: jax.Array, call: ChunkCall) -> jax.Array:
    """The words of ``tree_mask`` for each row of a tile, shifted so that a word has the bits of 32 aligned keys.

    Returns:
      int32 ``[tiles, CONSUMERS, mask_words, 64]``, of keys from 32 · ``call.first_word`` on; those before the new
      tokens have ones.
    """
    rows = jnp.arange(BLOCK_ROWS, dtype=jnp.int32)
    token = rows // ROWS * call.tokens + rows % ROWS % call.tokens
    token = jnp.clip(work.token[:, None] + token, 0, tree_mask.shape[0] - 1)
    # The index among the new tokens of the first bit of each word.
    index = call.first_word(work)[:, None] * WORD - first_new[:, None]
    index = index + WORD * jnp.arange(call.mask_words, dtype=jnp.int32)

    def words(place: jax.Array) -> jax.Array:
        exists = (place >= 0) & (place < tree_mask.shape[1])
        found = tree_mask[token[:, None, :], jnp.clip(place, 0, tree_mask.shape[1] - 1)[:, :, None]]
        return jnp.where(exists[:, :, None], found, 0)

    shift = (index % WORD).astype(jnp.uint32)[:, :, None]
    low, high = words(index // WORD), words(index // WORD + 1)
    shifted = jnp.where(shift == 0, low, (low >> shift) | (high << (WORD - shift)))
    before = jnp.clip(-index, 0, WORD).astype(jnp.uint32)[:, :, None]
    ones = jnp.where(before == WORD, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << before) - 1)
    found = lax.bitcast_convert_type(shifted | ones, jnp.int32)
    return jnp.swapaxes(found.reshape(call.tiles, call.mask_words, CONSUMERS, ROWS), 1, 2)


def ordered_work(work: TileWork, call: ChunkCall) -> jax.Array:
    """A `TileWork` of ``order_length`` tiles, flat, in the order in which they are started.

    The costliest tiles come first. Those that fill one consumer and those that fill two are interleaved, so that at any
    time the same share of each kind's total cost has been started: tiles of one consumer are bound by memory bandwidth,
    those of two by the tensor cores.
    """
    number = work.tile
    cost = jnp.where(work.tokens > 0, work.total(call) + TILE_OVERHEAD, 0)

    def before(key: jax.Array) -> jax.Array:
        """``[tiles, tiles]``, True where the second tile comes before the first: a smaller key first."""
        return (key[None] < key[:, None]) | ((key[None] == key[:, None]) & (number[None] < number[:, None]))

    # Tiles of both kinds are ordered by the share of their kind's cost that starts before them; those without tokens
    # are last. Ranks by comparing all tiles with all: sorting takes a GPU longer.
    short = work.tokens <= call.tokens
    same_kind = short[None] == short[:, None]
    started, total = (jnp.where(which & same_kind, cost, 0).sum(axis=1) for which in (before(-cost), True))
    # 2 sorts after every share, which is below 1.
    share = jnp.where(work.tokens > 0, started / jnp.maximum(total, 1), 2.0)
    rank = before(share).sum(axis=1, dtype=jnp.int32)
    fields = jnp.stack([getattr(work, field.name) for field in dataclasses.fields(TileWork)])
    ordered = jnp.zeros((FIELDS, call.order_length), jnp.int32)
    return ordered.at[:, rank].set(fields, unique_indices=True).reshape(-1)


def present_pages(page_table: jax.Array, num_pages: int, call: ChunkCall) -> tuple[jax.Array, jax.Array]:
    """The page table, with 0 for what is not a page, and for each block of keys the bits of its present pages.

    Args:
      page_table: ``[sequences, columns]``, at most ``call.columns``.

    Returns:
      int32 ``[sequences · call.columns]`` and ``[sequences · call.blocks]``.
    """
    # Padded with −1, which is not a page: blocks of keys are whole, and the last one may have columns that the table
    # lacks.
    table = jnp.pad(page_table, ((0, 0), (0, call.columns - page_table.shape[1])), constant_values=-1)
    present = (table >= 0) & (table < num_pages)
    if call.page_size > call.block_k:
        bits = jnp.repeat(present.astype(jnp.int32), call.page_size // call.block_k, axis=1)
    else:
        bit = jnp.asarray(1 << np.arange(call.pages_per_block), jnp.int32)
        bits = (present.reshape(len(table), call.blocks, call.pages_per_block) * bit).sum(axis=2, dtype=jnp.int32)
    return jnp.where(present, table, 0).reshape(-1), bits.reshape(-1)
