"""Attention over pages of latents on Hopper: what TMA brings once is the keys of one product and the values of another.

A program has 64 query rows and a tile of 64 latents at a time. An output of 64 × 512 does not fit one warpgroup's
registers, so two share it by columns. The first computes the logits of all columns and the softmax, and leaves the
probabilities and what scales earlier sums in shared memory for the second, which only adds up its half. The logits of
the next tile and the first half of this one's output are in flight together (Shah et al., "FlashAttention-3", 2024,
section 3.2), so that exponentials are computed beside products of both warpgroups. A tile lies in shared memory in
three parts, each of which is loaded anew as soon as its last product is done.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import RingPlan, bind_rings, ring_scratch
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.softmax import initial_statistics, normaliser, online_softmax, row_lse, split_scale
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, row_layout, tile_layout
from tilewright.kernels.paged_attention.inputs import FAR

KEYS = 64
"""Latents of a tile, and what a page has a whole number of."""

LATENT_DIM = 576
VALUE_DIM = 512

HALF = VALUE_DIM // 2
"""Columns of the output that a warpgroup adds up: 128 registers of each thread."""

SIZES = HALF, HALF, LATENT_DIM - VALUE_DIM
"""Columns of the parts in which a tile is loaded: both halves of the value, and the rest, as many as there are keys."""

STAGES = 2
"""Tiles in shared memory at once, beside the queries: a third does not fit."""

VISIT_BITS = 24
"""Bits of the number of a tile's visit; lengths have 30."""

CHUNK = 64
"""Columns that are read and written at once where rows are cleared."""

FIRST, SECOND, PRODUCER = range(WARPGROUPS := 3)
"""The warpgroups: logits and the first half of the output, the second half, loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPlan:
    """The shared memory of the kernel: tiles of queries and latents in the halves of the value and the rest."""

    dtype: Any

    @property
    def queries(self) -> tuple[RingPlan, ...]:
        """The output takes the place of the first two."""
        return tuple(RingPlan(SharedTile((ROWS, size), self.dtype), 1, 1) for size in SIZES)

    @property
    def left(self) -> RingPlan:
        return self._part(HALF, 1)

    @property
    def right(self) -> RingPlan:
        return self._part(HALF, 2)

    @property
    def rest(self) -> RingPlan:
        """What only logits need of a latent, and then the probabilities of the tile, for both warpgroups."""
        return self._part(LATENT_DIM - VALUE_DIM, 2)

    def _part(self, columns: int, consumers: int) -> RingPlan:
        return RingPlan(SharedTile((KEYS, columns), self.dtype), STAGES, consumers)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        return *self.queries, self.left, self.right, self.rest

    def scratch(self) -> list[Any]:
        """Of the rings, of what scales sums so far by turns, and of the barrier behind the last of these."""
        return [
            *ring_scratch(self.rings),
            plgpu.SMEM((STAGES + 1, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(),
        ]

    @property
    def shared_bytes(self) -> int:
        return sum(ring.shared_bytes for ring in self.rings) + 1024


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCall:
    """The static half of a call.

    Attributes:
      q_length: query tokens of each sequence; a sequence's rows are its tokens' heads, token by token.
      right: keys visible after a query's position, None for all.
      splits: programs among which the tiles of some rows are shared out.
      prefetched: how many tiles ahead of its load a latent is brought to the L2 cache, 0 for not at all.
      parts: whether results come in float32, for each split, to be combined.
    """

    sequences: int
    q_length: int
    heads: int
    num_pages: int
    page_size: int
    columns: int
    softmax_scale: float
    right: int | None
    splits: int
    prefetched: int
    parts: bool

    @property
    def rows(self) -> int:
        return self.q_length * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one program has to do, as scalars on the device: ``total`` tiles from ``first`` on, at least one."""

    sequence: Any
    row_tile: Any
    split: Any
    position: Any  # of the sequence's first new token
    highest: Any  # one past the last key that some row sees, 0 where there is nothing to do
    lowest: Any  # keys before it are seen by every row
    first: Any
    total: Any


def _work(call: LatentCall, program: Any, lengths_ref: Any) -> _Work:
    row_tile = lax.rem(program, jnp.int32(call.row_tiles))
    rest = lax.div(program, jnp.int32(call.row_tiles))
    split, sequence = lax.rem(rest, jnp.int32(call.splits)), lax.div(rest, jnp.int32(call.splits))
    length = lax.max(lax.min(lengths_ref[sequence], jnp.int32(FAR)), jnp.int32(0))
    position = length - call.q_length
    length = lax.min(length, jnp.int32(min(call.capacity, FAR)))
    highest = lowest = length
    if call.right is not None:
        # Of the first row and the last one.
        token = lax.div(row_tile * ROWS, jnp.int32(call.heads))
        last = lax.min(lax.div(row_tile * ROWS + (ROWS - 1), jnp.int32(call.heads)), jnp.int32(call.q_length - 1))
        highest = lax.max(lax.min(length, position + last + (call.right + 1)), jnp.int32(0))
        lowest = lax.max(lax.min(length, position + token + (call.right + 1)), jnp.int32(0))
    tiles = lax.div(highest + (KEYS - 1), jnp.int32(KEYS))
    each = lax.div(tiles + (call.splits - 1), jnp.int32(call.splits))
    first = split * each
    total = lax.min(tiles - first, each)
    # A program without tiles looks at one of which it sees nothing.
    highest = jnp.where(total > 0, highest, 0)
    first = jnp.where(total > 0, first, 0)
    return _Work(sequence, row_tile, split, position, highest, lowest, first, lax.max(total, jnp.int32(1)))


def latent_kernel(
    query: jax.Array, pages: jax.Array, page_table: jax.Array, lengths: jax.Array, *, call: LatentCall
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of rows: ``[sequences, rows, 512]``, float32 ``[sequences, row_tiles · 64]``.

    With ``call.parts``, ``[splits, sequences, row_tiles · 64, 512]`` in float32 and
    ``[splits, sequences, row_tiles · 64]``.

    Args:
      query: ``[sequences, rows, 576]``, of which TMA wants a multiple of 8 rows: those beyond ``call.rows`` hold
        anything, and so do their results.
      pages: ``[num_pages, page_size, 576]``.
      page_table: ``[sequences · columns]`` int32.
      lengths: ``[sequences]`` int32.
    """
    dtype = query.dtype
    plan = LatentPlan(dtype)
    columns = [pl.ds(start, size) for start, size in zip((0, HALF, VALUE_DIM), SIZES, strict=True)]
    early, multiplier = split_scale(call.softmax_scale)
    tiles_per_page = call.page_size // KEYS

    def body(q_ref: Any, pages_ref: Any, table_ref: Any, lengths_ref: Any, *refs: Any) -> None:
        out_ref, lse_ref, *scratch = refs
        (*queries, left, right, rest), (scales, ready, finished) = bind_rings(plan.rings, scratch)
        work = _work(call, lax.axis_index("program"), lengths_ref)
        warpgroup = lax.axis_index("warpgroup")
        my_rows = pl.ds(work.row_tile * ROWS, ROWS)
        zero = warpgroup * 0  # no constant: JAX 0.12 refuses a slice that it sees to hang over the end of an array

        def page_of(visit: Any) -> Any:
            """The number that the table has for a visit's tile, or for the last tile behind it."""
            tile = work.first + lax.min(visit, work.total - 1)
            column = lax.min(lax.div(tile, jnp.int32(tiles_per_page)), jnp.int32(call.columns - 1))
            return table_ref[work.sequence * call.columns + column]

        def row_of(visit: Any) -> Any:
            """The tile's first row in its page."""
            return lax.rem(work.first + visit, jnp.int32(tiles_per_page)) * KEYS

        def exists(page: Any) -> Any:
            return (page >= 0) & (page < call.num_pages)

        def produce() -> None:
            def load(visit: Any, page: Any, ring: Any, columns: Any) -> None:
                page = jnp.where(exists(page), page, 0)
                ring.load_from_dram(visit, pages_ref.at[page, pl.ds(row_of(visit), KEYS), columns])

            def prefetch(visit: Any) -> None:
                # A slot is handed back shortly before its next tile is needed: too late for device memory. Programs
                # of the same sequence go side by side, so the first alone does it.
                page, row = page_of(visit), row_of(visit)
                wanted = exists(page) & (visit < work.total) & (work.row_tile == 0)
                page = jnp.where(wanted, page, 0)
                for part in columns:
                    plgpu.async_prefetch(pages_ref.at[page, pl.ds(row, KEYS), part], predicate=wanted)

            def load_all(visit: Any, page: Any) -> Any:
                after = page_of(visit + 1)
                if call.prefetched:
                    prefetch(visit + call.prefetched)
                # In the order in which they are handed back.
                load(visit, page, right, columns[1])
                load(visit, page, rest, columns[2])
                load(visit, page, left, columns[0])
                return after

            for ring, part in zip(queries, columns, strict=True):
                ring.load_from_dram(0, q_ref.at[work.sequence, my_rows, part])
            lax.fori_loop(0, work.total, load_all, page_of(zero))

        def seen_until(visit: Any, page: Any) -> Any:
            """One past the tile's last row that some query sees, counted from its first."""
            return jnp.where(exists(page), work.highest - (work.first + visit) * KEYS, 0)

        def clear(ring: Any, visit: Any, page: Any) -> None:
            """Puts zeros for values that no query sees, which may be anything: 0 · NaN is NaN. The logits are done."""
            end = seen_until(visit, page)

            @pl.when(end < KEYS)
            def _() -> None:
                tile = ring.get_mma_tile(visit)
                for start in range(0, HALF, CHUNK):
                    chunk = tile.at[:, pl.ds(start, CHUNK)]
                    held = plgpu.load(chunk, layout=tile_layout())
                    row = plgpu.broadcasted_iota(jnp.int32, (KEYS, CHUNK), 0, layout=tile_layout())
                    chunk[...] = jnp.where(row < end, held, jnp.zeros_like(held))
                plgpu.commit_smem()

        def masks(visit: Any, page: Any) -> Any:
            """Whether a tile has keys that not all rows see."""
            return (seen_until(visit, page) < KEYS) | (work.lowest - (work.first + visit) * KEYS < KEYS)

        def visible(visit: Any, page: Any) -> Any:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=tile_layout())
            end = seen_until(visit, page)
            if call.right is None or call.q_length == 1:
                return key < end
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 0, layout=tile_layout())
            token = lax.div(row + work.row_tile * ROWS, jnp.int32(call.heads))
            start = (work.first + visit) * KEYS
            return (key < end) & (key <= token + (work.position + call.right - start))

        def softmax(products: Any, visit: Any, page: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
            """Probabilities, what scales earlier ones, and the new statistics."""
            logits = products if early == 1.0 else products * early
            logits = lax.cond(
                masks(visit, page), lambda x: jnp.where(visible(visit, page), x, -jnp.inf), lambda x: x, logits
            )
            p, *statistics_after = online_softmax(logits, multiplier, m, total)
            return p.astype(dtype), *statistics_after

        def logits_of(scores: Any, visit: Any) -> None:
            # The left part comes last: its slot was the last to be handed back. Each product's operands have addresses
            # of their own; those of the queries do not change from tile to tile, and kept in registers they are
            # spilled. So they hang on the visit, of which there are not so many.
            none = opaque_zero(visit, VISIT_BITS)
            for query, ring in ((queries[1], right), (queries[2], rest), (queries[0], left)):
                ring.load_from_shared(visit)
                plgpu.wgmma(scores, query.smem.at[none], ring.get_mma_tile(visit, transposed=True))

        def weights_of(visit: Any) -> Any:
            """Probabilities lie where the rest of their keys was."""
            return rest.get_mma_tile(visit)

        def hand_over(visit: Any, p: Any, scale: Any) -> None:
            slot = right.slot(visit)
            scales[slot, :] = scale
            weights_of(visit)[...] = p
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])

        def first_logits(page: Any) -> tuple[Any, Any]:
            def alone(scores: Any) -> Any:
                for ring in queries:
                    ring.load_from_shared(0)
                logits_of(scores, zero)
                return scores[...]

            products = pl.run_scoped(alone, plgpu.ACC((ROWS, KEYS), jnp.float32))
            m, total = initial_statistics()
            right.release(zero)
            p, scale, m, total = softmax(products, zero, page, m, total)
            hand_over(zero, p, scale)
            clear(left, zero, page)
            return m, total

        def attend_first(acc: Any) -> None:
            def visit_one(visit: Any, carry: Any) -> Any:
                m, total, page = carry
                after = page_of(visit + 1)

                def overlapped(scores: Any) -> Any:
                    logits_of(scores, visit)
                    plgpu.wgmma(acc, weights_of(visit - 1), left.get_mma_tile(visit - 1))
                    products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    right.release(visit)
                    p, scale, m_after, total_after = softmax(products, visit, page, m, total)
                    hand_over(visit, p, scale)
                    plgpu.wgmma_wait(0)
                    rest.release(visit - 1)
                    left.release(visit - 1)
                    clear(left, visit, page)
                    acc[...] = acc[...] * across(scale, HALF)
                    return m_after, total_after, after

                return pl.run_scoped(overlapped, plgpu.ACC((ROWS, KEYS), jnp.float32))

            page = page_of(zero)
            carry = (*first_logits(page), page_of(zero + 1))
            m, total, _ = lax.fori_loop(1, work.total, visit_one, carry)
            plgpu.wgmma(acc, weights_of(work.total - 1), left.get_mma_tile(work.total - 1))
            weight = normaliser(total)
            scales[STAGES, :] = weight
            plgpu.barrier_arrive(finished)
            lse = row_lse(m, total)
            out = acc[...] * across(weight, HALF)
            rest.release(work.total - 1)
            left.release(work.total - 1)
            store(out, 0, queries[0].get_mma_tile(0))
            place = (work.split, work.sequence) if call.parts else (work.sequence,)
            lse_ref.at[(*place, my_rows)][...] = lse

        def attend_second(acc: Any) -> None:
            def visit_one(visit: Any, page: Any) -> Any:
                after = page_of(visit + 1)
                for ring in (right, rest):
                    ring.load_from_shared(visit)
                plgpu.barrier_wait(ready.at[right.slot(visit)])
                scale = plgpu.load(scales.at[right.slot(visit)], layout=row_layout())
                acc[...] = acc[...] * across(scale, HALF)
                clear(right, visit, page)
                plgpu.wgmma(acc, weights_of(visit), right.get_mma_tile(visit))
                plgpu.wgmma_wait(0)
                right.release(visit)
                rest.release(visit)
                return after

            lax.fori_loop(0, work.total, visit_one, page_of(zero))
            plgpu.barrier_wait(finished)
            weight = plgpu.load(scales.at[STAGES], layout=row_layout())
            store(acc[...] * across(weight, HALF), HALF, queries[1].get_mma_tile(0))

        def store(out: Any, start: int, smem: Any) -> None:
            columns = pl.ds(start, HALF)
            if call.parts:
                out_ref.at[work.split, work.sequence, my_rows, columns][...] = out
                return
            # Of the queries' memory, which no product reads any more.
            smem[...] = out.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, out_ref.at[work.sequence, my_rows, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == FIRST)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[2][0], action="increase")
            pl.run_scoped(attend_first, plgpu.ACC((ROWS, HALF), jnp.float32))

        @pl.when(warpgroup == SECOND)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[2][0], action="increase")
            pl.run_scoped(attend_second, plgpu.ACC((ROWS, HALF), jnp.float32))

        @pl.when(warpgroup == PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[2][1], action="decrease")
            produce()

    rows = call.row_tiles * ROWS
    if call.parts:
        parts = (call.splits, call.sequences, rows)
        out_type = [jax.ShapeDtypeStruct((*parts, VALUE_DIM), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]
    else:
        out_type = [
            jax.ShapeDtypeStruct((call.sequences, query.shape[1], VALUE_DIM), dtype),
            jax.ShapeDtypeStruct((call.sequences, rows), jnp.float32),
        ]
    programs = call.sequences * call.splits * call.row_tiles
    kernel = warpgroup_kernel(body, tuple(out_type), plan.scratch(), programs, WARPGROUPS)
    return kernel(query, pages, page_table, lengths)
