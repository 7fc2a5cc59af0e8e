"""Pages on their way from HBM to VMEM: the plan of what is read, and asynchronous copies of blocks of pages.

The kernels see a cache as ``[pages, page_rows, head_dim]``, where a page's rows are its tokens' heads, token by token.
For most caches this is no copy on a TPU (see `is_copied`), and a page is one asynchronous copy to VMEM.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from tilewright.kernels.masks import Index
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.token_layout import bounded
from tilewright.kernels.pallas_types import Ref, Scalar
from tilewright.kernels.tpu.device import LANES, SUBLANES

MAX_PAGE = 512
"""Tokens of a page that are copied at once; larger pages and caches without a table are taken in parts."""

MAX_TABLE_BYTES = 1 << 19
"""Maximum of the page table, which lies in SMEM (1 MiB) with the other scalars of a call."""


def page_tokens(inputs: PagedInputs) -> int:
    """Tokens of a page as the kernels see it: the largest divisor of the page size that is not too large; 0 if none."""
    heads, tile = inputs.kv_heads, tile_rows(inputs.key.dtype.itemsize)
    sizes = range(min(inputs.page_size, MAX_PAGE), 0, -1)
    return next((size for size in sizes if inputs.page_size % size == 0 and size * heads % tile == 0), 0)


def rows_at(start: Scalar, count: int) -> Any:
    """Rows from a multiple of ``count`` on."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, count), count)


def in_lanes(x: jax.Array, width: int) -> Any:
    """Repeats the lanes of ``[rows, LANES]``, which all hold the same, up to a width: vectors as they are."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def tile_rows(itemsize: int) -> int:
    """Rows of a tile of VMEM."""
    return SUBLANES * 4 // itemsize


def cache_reasons(inputs: PagedInputs) -> list[str]:
    """Reasons why the kernels cannot read a cache; empty if they can."""
    if not page_tokens(inputs):
        return [
            f"a page, or a part of it, needs {tile_rows(inputs.key.dtype.itemsize)} tokens × key heads or a multiple, "
            f"got page_size={inputs.page_size}, kv_heads={inputs.kv_heads}"
        ]
    table = 4 * inputs.sequences * (inputs.capacity // page_tokens(inputs))
    if table > MAX_TABLE_BYTES:
        return [f"the page table takes {table} bytes of SMEM, of which it may have {MAX_TABLE_BYTES}"]
    return []


def is_copied(inputs: PagedInputs) -> bool:
    """True if XLA copies the cache to bring it into the kernels' form, as it lays out arrays of such sizes on TPUs.

    A tile has as many rows as there are key heads, 8 at most, so tiles of several columns are in the same order for
    whole tiles only. Other numbers of heads lie by head, and head dims that are no multiple of the lanes by page.
    """
    heads, itemsize = inputs.kv_heads, inputs.key.dtype.itemsize
    dims = [inputs.head_dim] if inputs.value is None else [inputs.head_dim, inputs.value_dim]
    if any(dim % LANES for dim in dims):
        return True
    if heads % SUBLANES == 0 or (heads == 1 and itemsize < 4):
        return False
    return max(dims) > LANES or heads not in ((1, 4) if itemsize == 1 else (1, 2, 4))


def paged_view(inputs: PagedInputs, pages: jax.Array) -> Any:
    """Keys or values as ``[pages, page_rows, head_dim]``."""
    return pages.reshape(-1, page_tokens(inputs) * pages.shape[2], pages.shape[3])


def table_of(inputs: PagedInputs) -> Any:
    """The page of each column of each sequence, as the kernels see pages; -1 if it does not exist."""
    parts = inputs.page_size // page_tokens(inputs)
    if inputs.page_table is None:
        pages = jnp.arange(inputs.sequences, dtype=jnp.int32)[:, None]
    else:
        pages = inputs.page_table
    exists = (pages >= 0) & (pages < inputs.num_pages)
    split = jnp.where(exists, pages, 0)[..., None] * parts + jnp.arange(parts, dtype=jnp.int32)
    return jnp.where(exists[..., None], split, -1).reshape(inputs.sequences, -1)


class Work(NamedTuple):
    """The tokens that each step of a kernel reads; steps whose ``end`` is not above ``low`` read nothing.

    Attributes:
      sequence: whose row of the table is read.
      low, end: the range of positions that any row of the step sees.
      first: the position of its first query.
      holes: 1 if a page in the range does not exist.
      next: the next step of the same core that reads something; the number of steps if there is none.
    """

    sequence: Int[Array, " steps"]
    low: Int[Array, " steps"]
    end: Int[Array, " steps"]
    first: Int[Array, " steps"]
    holes: Int[Array, " steps"]
    next: Int[Array, " steps"]


def work_of(
    inputs: PagedInputs, table: jax.Array, sequence: jax.Array, first: jax.Array, rows: jax.Array, cores: int
) -> Work:
    """The work of steps with ``rows`` query tokens each, from position ``first`` of a sequence on."""
    low = jnp.zeros_like(first)
    if inputs.kv_starts is not None:
        low = bounded(inputs.kv_starts)[sequence]
    if inputs.left is not None:
        low = jnp.maximum(low, first - inputs.left)
    end = jnp.minimum(bounded(inputs.kv_lengths)[sequence], inputs.capacity)
    if inputs.right is not None:
        end = jnp.minimum(end, first + rows + inputs.right)
    end = jnp.where(rows > 0, jnp.maximum(end, low), low)
    size = page_tokens(inputs)
    column = jnp.arange(table.shape[1], dtype=jnp.int32)
    needed = (column >= (low // size)[:, None]) & (column * size < end[:, None])
    holes = ((table < 0)[sequence] & needed).any(axis=1)
    steps = first.shape[0]
    reads = jnp.where(end > low, jnp.arange(steps, dtype=jnp.int32), steps).reshape(cores, -1)
    following = lax.cummin(reads, axis=1, reverse=True)[:, 1:]
    following = jnp.pad(following, ((0, 0), (0, 1)), constant_values=steps).reshape(-1)
    return Work(sequence, low, end, first, holes.astype(jnp.int32), following)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of pages of a call.

    Attributes:
      tokens, heads: of a page.
      pages: of a block.
      columns: of the table.
      steps: of the grid, over all cores.
      fields: names of the arrays of `Work`, which the kernels get as one, and of those that follow them.
    """

    tokens: int
    heads: int
    pages: int
    columns: int
    steps: int
    fields: tuple[str, ...] = Work._fields

    @property
    def page_rows(self) -> int:
        return self.tokens * self.heads

    @property
    def rows(self) -> int:
        """Rows of a block: keys of all heads."""
        return self.page_rows * self.pages

    @property
    def block_k(self) -> int:
        """Tokens of a block."""
        return self.tokens * self.pages

    @classmethod
    def of(
        cls,
        inputs: PagedInputs,
        block_rows: int,
        steps: int,
        fields: tuple[str, ...] = Work._fields,
        by_head: bool = False,
    ) -> "Blocks":
        """Blocks of about so many rows; ``by_head``: keys of a head are sorted out of them."""
        tokens, heads = page_tokens(inputs), inputs.kv_heads
        columns = inputs.capacity // tokens
        # The logits of a block, or of a head in it, are its columns: whole vectors of lanes.
        keys = tokens if by_head else tokens * heads
        several = math.lcm(keys, LANES) // keys
        most = -(-columns // several) * several
        pages = max(block_rows // (tokens * heads) // several, 1) * several
        return cls(tokens, heads, min(pages, most), columns, steps, fields)


@dataclasses.dataclass(frozen=True, slots=True)
class PagedCall:
    """Static facts of a call.

    Attributes:
      blocks: of pages.
      rows: of queries in a step.
      value_dim: elements of a value; with ``latent`` the first of a key.
      scaled: keys have scales of their own.
      left, right: as in `PagedInputs`; ``None`` as well if all rows of a step have one position.
    """

    blocks: Blocks
    rows: int
    head_dim: int
    value_dim: int
    latent: bool
    left: int | None
    right: int | None
    softmax_scale: float
    scaled: bool
    soft_cap: float | None
    slopes: bool

    @staticmethod
    def facts(inputs: PagedInputs) -> dict[str, Any]:
        """The fields that follow from the inputs: all but ``blocks`` and ``rows``."""
        return {
            "head_dim": inputs.head_dim,
            "value_dim": inputs.value_dim,
            "latent": inputs.value is None,
            "left": inputs.left,
            "right": inputs.right,
            "softmax_scale": inputs.softmax_scale,
            "scaled": inputs.key_scale is not None,
            "soft_cap": inputs.logits_soft_cap,
            "slopes": inputs.alibi_slopes is not None,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The pages that a step of the grid reads: fields of its work as numbers, and the blocks that they mean."""

    blocks: Blocks
    work: Ref
    number: Index

    def field(self, name: str) -> Any:
        return self.work[self.blocks.fields.index(name) * self.blocks.steps + self.number]

    @property
    def low(self) -> Any:
        return self.field("low")

    @property
    def end(self) -> Any:
        return self.field("end")

    @property
    def first_page(self) -> Any:
        return lax.div(self.low, self.blocks.tokens)

    @property
    def last_page(self) -> Any:
        """The page after the last."""
        return lax.div(self.end + (self.blocks.tokens - 1), self.blocks.tokens)

    @property
    def count(self) -> Any:
        """The number of blocks."""
        pages = self.last_page - self.first_page
        return jnp.where(self.end > self.low, lax.div(pages + (self.blocks.pages - 1), self.blocks.pages), 0)

    def pages_of(self, block: Index) -> Any:
        """The first page of a block, and the number of its pages that are read."""
        first = self.first_page + block * self.blocks.pages
        return first, jnp.minimum(self.last_page - first, self.blocks.pages)


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Copies blocks of pages to VMEM, into one of two slots for each array.

    Attributes:
      arrays: pages in HBM: keys, and values if they are an array of their own.
      buffers: ``[2, block_rows, head_dim]`` of each.
      semaphores: ``[arrays, 2]``.
    """

    blocks: Blocks
    table: Ref
    work: Ref
    arrays: tuple[Ref, ...]
    buffers: tuple[Ref, ...]
    semaphores: Ref

    def step(self, number: Index) -> Step:
        return Step(self.blocks, self.work, number)

    def page(self, step: Step, column: Index) -> Any:
        """The page of a column of a step's sequence; -1 if it does not exist."""
        return self.table[step.field("sequence") * self.blocks.columns + column]

    def start(self, step: Step, block: Index, slot: Index) -> None:
        """Starts the copies of a block. A page that does not exist is another one's copy, for masked keys."""
        first, count = step.pages_of(block)

        def each(page: Index, _: None) -> None:
            number = jnp.maximum(self.page(step, first + page), 0)
            for copy in self._copies(number, page, slot):
                copy.start()

        lax.fori_loop(0, count, each, None)

    def wait(self, step: Step, block: Index, slot: Index) -> None:
        """Waits for the copies of a block."""
        _, count = step.pages_of(block)

        @pl.when(count == self.blocks.pages)
        def whole() -> None:
            # A semaphore counts bytes: all copies of a whole block are waited for at once.
            for which, buffer in enumerate(self.buffers):
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.semaphores.at[which, slot]).wait()

        @pl.when(count < self.blocks.pages)
        def by_page() -> None:
            def each(page: Index, _: None) -> None:
                for copy in self._copies(0, page, slot):
                    copy.wait()

            lax.fori_loop(0, count, each, None)

    def blocks_of(self, step: Step, slot_of: Ref, compute: Callable[[Index, Index], None]) -> None:
        """Runs ``compute(block, slot)`` for each block of a step, while the next one, or the next step's, is copied.

        ``slot_of`` holds the slot of the step's first block, whose copies were started by the step before.
        """

        def each(block: Index, slot: Index) -> Any:
            is_last = block + 1 == step.count
            ahead = jnp.where(is_last, step.field("next"), step.number)

            @pl.when(ahead < self.blocks.steps)
            def start_next() -> None:
                self.start(self.step(ahead), jnp.where(is_last, 0, block + 1), 1 - slot)

            self.wait(step, block, slot)
            compute(block, slot)
            return 1 - slot

        slot_of[0] = lax.fori_loop(0, step.count, each, slot_of[0])

    def start_first(self, step: Step, slot_of: Ref) -> None:
        """Starts the copies of the first block that a core reads; ``step`` is its first."""
        slot_of[0] = 0
        first = jnp.where(step.count > 0, step.number, step.field("next"))

        @pl.when(first < self.blocks.steps)
        def start() -> None:
            self.start(self.step(first), 0, 0)

    def is_whole(self, step: Step, block: Index) -> Any:
        """True if all pages of a block exist, and the step sees all of their tokens."""
        begin = step.pages_of(block)[0] * self.blocks.tokens
        return (begin >= step.low) & (begin + self.blocks.block_k <= step.end) & (step.field("holes") == 0)

    def seen(self, step: Step, block: Index, value: Ref, heads: int) -> Any:
        """For each token of a block, ``heads`` times, whether the step sees it, ``[1, tokens · heads]``.

        Values that it does not see become zeros: what was not copied, and what lies beyond a length, may be NaN.
        """
        blocks = self.blocks
        first, _ = step.pages_of(block)
        column = lax.broadcasted_iota(jnp.int32, (1, blocks.block_k * heads), 1) // heads
        row = lax.broadcasted_iota(jnp.int32, (blocks.page_rows, 1), 0) // blocks.heads

        def each(page: Index, seen: jax.Array) -> Any:
            start = page * blocks.tokens
            exists = self.page(step, jnp.minimum(first + page, blocks.columns - 1)) >= 0
            position = first * blocks.tokens + start + row
            keep = (position >= step.low) & (position < step.end) & exists
            at = rows_at(page * blocks.page_rows, blocks.page_rows)
            value[at] = jnp.where(keep, value[at], jnp.zeros((), value.dtype))
            hidden = (column >= start) & (column < start + blocks.tokens) & jnp.logical_not(exists)
            return jnp.where(hidden, 0, seen)

        position = first * blocks.tokens + column
        seen = ((position >= step.low) & (position < step.end)).astype(jnp.int32)
        return lax.fori_loop(0, blocks.pages, each, seen) == 1

    def _copies(self, number: Scalar, page: Index, slot: Index) -> list[Any]:
        rows = self.blocks.page_rows
        at = rows_at(page * rows, rows)
        return [
            pltpu.make_async_copy(array.at[number], buffer.at[slot, at], self.semaphores.at[which, slot])
            for which, (array, buffer) in enumerate(zip(self.arrays, self.buffers, strict=True))
        ]
