"""Attention of chunks of queries over pages on Hopper: keys and values come by TMA, a page or a part of one at a time.

A program has the rows of one query tile and one key head: the tile's tokens with all heads that share the key, so that
a key is loaded once for all of them. One producer warpgroup loads; the other two own 64 rows each, and run the product
QKᵀ of the next tile beside PV of this one (Shah et al., "FlashAttention-3", 2024, section 3.2). A tile of few rows,
such as a token that is decoded, leaves the second one nothing to compute.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.pallas_gpu_scores import COMPILER_PARAMS, LOG2E, ROWS, TILE
from tilewright.kernels.kv_buffer.ring import RingPlan
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.paged_attention.pallas_gpu_softmax import online_softmax

CONSUMERS = 2

BLOCK_ROWS = CONSUMERS * ROWS
"""Query rows of a program."""

MANY_PAGES = 16
"""Pages of a tile, whose numbers the producer has in registers all at once."""

REGISTERS = {False: (240, 24), True: (232, 40)}
"""Registers per thread of a consumer and of the producer, by whether the producer needs many or consumers few."""

VISIT_BITS = 24
"""Bits of the number of a tile's visit; lengths have 29."""

CHUNK = 64
"""Columns that are read and written at once where rows are cleared."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The shared memory of the kernel; the output takes the place of the queries."""

    dtype: Any
    dim: int
    block_k: int
    num_stages: int
    copies: int

    @property
    def queries(self) -> RingPlan:
        return RingPlan((BLOCK_ROWS, self.dim), self.dtype, 1, 1)

    @property
    def keys(self) -> RingPlan:
        return RingPlan((self.block_k, self.dim), self.dtype, self.num_stages, CONSUMERS, copies=self.copies)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        return self.queries, self.keys, self.keys

    def scratch(self) -> list[Any]:
        """Of the rings, and a barrier for who clears values."""
        return [*(part for ring in self.rings for part in ring.scratch()), plgpu.Barrier(num_arrivals=CONSUMERS)]

    @property
    def shared_bytes(self) -> int:
        return sum(ring.shared_bytes for ring in self.rings) + 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCall:
    """The static half of a call.

    Attributes:
      tiles: of queries; a tile's rows are its tokens' heads of one key head, token by token.
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

    def plan(self, dtype: Any, dim: int) -> ChunkPlan:
        return ChunkPlan(dtype, dim, self.block_k, self.num_stages, self.copies)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one program has to do, as scalars on the device: ``total`` blocks from ``first`` on, at least one.

    Some row sees keys from ``low`` on and before ``high``, every row those from ``all_low`` on and before ``all_high``.
    """

    sequence: Any
    kv_head: Any
    rows: Any
    position: Any
    low: Any
    high: Any
    all_low: Any
    all_high: Any
    first: Any
    total: Any


def _work(call: ChunkCall, program: Any, tiles_ref: Any, lengths_ref: Any) -> _Work:
    kv_head, tile = lax.rem(program, jnp.int32(call.kv_heads)), lax.div(program, jnp.int32(call.kv_heads))
    sequence, tokens, position = (tiles_ref[i * call.tiles + tile] for i in range(3))
    zero = jnp.int32(0)
    length = lax.max(lax.min(lengths_ref[sequence], jnp.int32(min(call.capacity, FAR))), zero)

    def cut(place: Any) -> Any:
        return lax.max(lax.min(place, length), zero)

    low = all_low = zero
    high = all_high = length
    if call.right is not None:
        high, all_high = cut(position + tokens + call.right), cut(position + (call.right + 1))
    if call.left is not None:
        low, all_low = cut(position - call.left), cut(position + tokens - (call.left + 1))
    nothing = (tokens == 0) | (high <= low)
    high = jnp.where(nothing, 0, high)
    low = jnp.where(nothing, 0, low)
    first = lax.div(low, jnp.int32(call.block_k))
    total = lax.div(high + (call.block_k - 1), jnp.int32(call.block_k)) - first
    total = lax.max(total, jnp.int32(1))
    return _Work(sequence, kv_head, tokens * call.group, position, low, high, all_low, all_high, first, total)


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


def chunk_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    bits: jax.Array,
    tiles: jax.Array,
    lengths: jax.Array,
    *,
    call: ChunkCall,
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of rows, ``[tiles · kv_heads, 128, dim]`` and float32 ``[tiles · kv_heads, 128]``.

    Rows beyond a tile's tokens have any results.

    Args:
      query: ``[tiles · kv_heads, 128, dim]``.
      key, value: ``[num_pages, page_size, kv_heads, dim]``.
      table, bits: of `present_pages`.
      tiles: int32 ``[3 · tiles]``: sequences, numbers of tokens, positions of the first ones.
      lengths: int32 ``[sequences]``.
    """
    dtype, dim, block_k = query.dtype, query.shape[2], call.block_k
    plan = call.plan(dtype, dim)
    statistics = TILE.reduce(1)
    every = (1 << call.copies) - 1
    piece = block_k // call.copies
    registers = REGISTERS[call.copies >= MANY_PAGES or dim <= 64]
    # Greater logits have to be greater multiples: a scale that is not positive goes first.
    early, multiplier = call.softmax_scale * LOG2E, 1.0
    if early > 0:
        early, multiplier = 1.0, early

    def body(
        q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, bits_ref: Any, tiles_ref: Any, lengths_ref: Any, *refs: Any
    ) -> None:
        out_ref, lse_ref, *scratch = refs
        q_ring, k_ring, v_ring = (ring.bind(*scratch[3 * i : 3 * i + 3]) for i, ring in enumerate(plan.rings))
        cleared = scratch[-1]
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        # What few blocks need is looked up again where they do: kept in registers it has others spilled.
        look_up = functools.partial(_work, call, program, tiles_ref, lengths_ref)
        work = look_up()
        first, visits = work.first, work.total
        own_bits = work.sequence * call.blocks + first
        # Of these visits every row sees all keys, and some row those of a wider range: whole blocks, from the first on.
        plain_from = lax.div(work.all_low + (block_k - 1), jnp.int32(block_k)) - first
        plain_until = lax.div(work.all_high, jnp.int32(block_k)) - first
        zero = warpgroup * 0  # no constant: JAX 0.12 refuses a slice that it sees to hang over the end of an array
        my_rows = pl.ds(warpgroup * ROWS, ROWS)

        def start_of(visit: Any) -> Any:
            """The position of the first key of a visit."""
            return (first + visit) * block_k

        def bits_of(visit: Any) -> Any:
            return bits_ref[own_bits + lax.min(visit, visits - 1)]

        def plain(visit: Any, bits: Any) -> Any:
            """Whether every row sees all keys."""
            return (visit >= plain_from) & (visit < plain_until) & (bits == every)

        def produce() -> None:
            def load(ring: Any, ref: Any, visit: Any) -> None:
                start = start_of(visit)
                column = work.sequence * call.columns + lax.div(start, jnp.int32(call.page_size))
                row = lax.rem(start, jnp.int32(call.page_size)) if call.page_size > block_k else zero
                pages = [table_ref[column + number] for number in range(call.copies)]
                ring.load_from_dram(visit, *(ref.at[page, pl.ds(row, piece), work.kv_head] for page in pages))

            def load_both(visit: Any, _: Any) -> None:
                # In the order in which the consumers hand slots back.
                load(k_ring, k_ref, visit)
                load(v_ring, v_ref, visit - 1)

            load(k_ring, k_ref, zero)
            q_ring.load_from_dram(0, q_ref.at[program])
            lax.fori_loop(1, visits, load_both, None)
            load(v_ring, v_ref, zero + (visits - 1))

        def across(vector: Any, columns: int) -> Any:
            return lax.broadcast_in_dim(vector, (ROWS, columns), [0])

        def iota(size: int, axis: int) -> Any:
            return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=TILE.reduce(1 - axis))

        def present(place: Any, bits: Any) -> Any:
            """Places of keys in the block, those of pages that are not there beyond every bound."""
            if call.copies == 1:
                return place
            page = lax.shift_right_logical(place, jnp.int32(piece.bit_length() - 1))
            return jnp.where((lax.shift_right_logical(bits, page) & 1) == 1, place, FAR)

        def end_of(work: _Work, visit: Any, bits: Any) -> Any:
            """One past the last place that some row sees."""
            end = work.high - start_of(visit)
            return jnp.where(bits == 1, end, 0) if call.copies == 1 else end

        def fill(visit: Any, bits: Any) -> None:
            """Waits for values, with zeros for those that no row sees, which may be anything: 0 · NaN is NaN."""
            v_ring.load_from_shared(visit)

            @pl.when(jnp.logical_not(plain(visit, bits)))
            def _() -> None:
                # Each consumer has a half of the rows.
                work = look_up()
                half = block_k // CONSUMERS
                rows = pl.ds(warpgroup * half, half)
                for column in range(0, dim, CHUNK):
                    chunk = v_ring.get_mma_tile(visit).at[rows, pl.ds(column, CHUNK)]
                    held = plgpu.load(chunk, layout=TILE)
                    place = plgpu.broadcasted_iota(jnp.int32, (half, CHUNK), 0, layout=TILE) + warpgroup * half
                    place = present(place, bits)
                    kept = (place < end_of(work, visit, bits)) & (place >= work.low - start_of(visit))
                    chunk[...] = jnp.where(kept, held, jnp.zeros_like(held))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

        def visible(visit: Any, bits: Any) -> Any:
            # Bounds are of rows, which take two registers; of differences the compiler would keep every element.
            work = look_up()
            end = end_of(work, visit, bits)
            key = lax.broadcast_in_dim(present(iota(block_k, 1), bits), (ROWS, block_k), [1])
            row = lax.div(iota(ROWS, 0) + warpgroup * ROWS, jnp.int32(call.group)) + (work.position - start_of(visit))
            right = FAR if call.right is None else call.right
            seen = key < across(jnp.minimum(row + (right + 1), end), block_k)
            if call.left is not None:
                seen &= key >= across(jnp.maximum(row - call.left, work.low - start_of(visit)), block_k)
            return seen

        def softmax(products: Any, visit: Any, bits: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
            """Probabilities, what scales earlier ones, and the new statistics."""
            logits = products if early == 1.0 else products * early
            logits = lax.cond(
                plain(visit, bits), lambda x: x, lambda x: jnp.where(visible(visit, bits), x, -jnp.inf), logits
            )
            p, *statistics_after = online_softmax(logits, multiplier, m, total)
            return p.astype(dtype), *statistics_after

        def scores_of(scores: Any, visit: Any) -> None:
            # Addresses that do not change from tile to tile would all be kept in registers, and others spilled. So they
            # hang on the visit, of which there are not so many.
            none = lax.shift_right_logical(visit, jnp.int32(VISIT_BITS))
            plgpu.wgmma(scores, q_ring.smem.at[none, my_rows], k_ring.get_mma_tile(visit, transposed=True))

        def attend(acc: Any) -> None:
            def alone(scores: Any) -> Any:
                k_ring.load_from_shared(zero)
                scores_of(scores, zero)
                return scores[...]

            def visit_one(visit: Any, carry: Any) -> Any:
                p, m, total, bits = carry
                after = bits_of(visit + 1)

                def overlapped(scores: Any) -> Any:
                    k_ring.load_from_shared(visit)
                    scores_of(scores, visit)
                    plgpu.wgmma(acc, p, v_ring.get_mma_tile(visit - 1))
                    products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    k_ring.release(visit)
                    p_after, scale, m_after, total_after = softmax(products, visit, bits, m, total)
                    plgpu.wgmma_wait(0)
                    v_ring.release(visit - 1)
                    acc[...] = acc[...] * across(scale, dim)
                    fill(visit, bits)
                    return p_after, m_after, total_after, after

                return pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_k), jnp.float32))

            products = pl.run_scoped(alone, plgpu.ACC((ROWS, block_k), jnp.float32))
            k_ring.release(zero)
            bits = bits_of(zero)
            m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), statistics)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), statistics)
            p, _, m, total = softmax(products, zero, bits, m, total)
            fill(zero, bits)
            p, m, total, _ = lax.fori_loop(1, visits, visit_one, (p, m, total, bits_of(zero + 1)))
            plgpu.wgmma(acc, p, v_ring.get_mma_tile(visits - 1))
            out = acc[...]
            v_ring.release(visits - 1)
            weight = jnp.where(total == 0.0, 0.0, 1 / total)
            target = q_ring.get_mma_tile(0).at[my_rows]
            target[...] = (out * across(weight, dim)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, out_ref.at[program, my_rows])
            lse = jnp.where(total == 0.0, -jnp.inf, (m + jnp.log2(total)) * (1 / LOG2E))
            lse_ref.at[program, my_rows][...] = lse
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def attend_none() -> None:
            """No row is this warpgroup's: it hands slots back, and has its half of the values to clear."""

            def visit_one(visit: Any, bits: Any) -> Any:
                after = bits_of(visit + 1)
                k_ring.load_from_shared(visit)
                k_ring.release(visit)
                fill(visit, bits)
                v_ring.release(visit)
                return after

            lax.fori_loop(0, visits, visit_one, bits_of(zero))

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(registers[0], action="increase")
            q_ring.load_from_shared(0)

            @pl.when(work.rows > warpgroup * ROWS)
            def _() -> None:
                pl.run_scoped(attend, plgpu.ACC((ROWS, dim), jnp.float32))

            @pl.when(work.rows <= warpgroup * ROWS)
            def _() -> None:
                attend_none()

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(registers[1], action="decrease")
            produce()

    programs = call.tiles * call.kv_heads
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((programs, BLOCK_ROWS, dim), dtype),
            jax.ShapeDtypeStruct((programs, BLOCK_ROWS), jnp.float32),
        ),
        scratch_types=plan.scratch(),
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return kernel(query, key, value, table, bits, tiles, lengths)
