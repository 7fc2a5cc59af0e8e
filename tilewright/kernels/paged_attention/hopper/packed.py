"""Attention of packed queries over pages on Hopper: keys and values come by TMA, a page or a part of one at a time.

A program has a tile of queries and a key head: up to 128 / group tokens of one sequence, each with all heads that
share the key, so that it is loaded once for all of them. One producer warpgroup loads; the other two own 64 rows each,
and run the product QKᵀ of the next block of keys beside PV of this one (Shah et al., "FlashAttention-3", 2024, section
3.2). A tile of few rows, such as a token that is decoded, leaves the second one nothing to compute, and waits for
memory where others wait for the tensor cores: so both kinds are begun side by side.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.ring import Ring, bind_rings
from tilewright.kernels.hopper.softmax import initial_statistics, normaliser, online_softmax, row_lse, split_scale
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, store_unoptimised, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar
from tilewright.kernels.paged_attention.hopper.packed_work import (
    CONSUMERS,
    FIELDS,
    ChunkCall,
    TileWork,
)
from tilewright.kernels.paged_attention.inputs import FAR

REGISTERS = {False: (240, 24), True: (232, 40)}
"""Registers per thread of a consumer and of the producer, by whether consumers need few."""

VISIT_BITS = 24
"""Bits of the number of a tile's visit; lengths have 29."""

CHUNK = 64
"""Columns that are read and written at once where rows are cleared."""


def chunk_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    bits: jax.Array,
    work: jax.Array,
    *,
    call: ChunkCall,
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of tokens, ``[tokens, heads, dim]``, and of rows, float32 ``[tiles, kv_heads, 2, 64]``.

    Tokens of no tile, and rows beyond a tile's tokens, have any results.

    Args:
      query: ``[tokens, heads, dim]``.
      key, value: ``[num_pages, page_size, kv_heads, dim]``.
      table, bits: of `present_pages`.
      work: of `ordered_work`.
    """
    (tokens, _, dim), dtype, block_k, group = query.shape, query.dtype, call.block_k, call.group
    plan, each, width = call.plan(dtype, dim), call.tokens, call.width
    every = (1 << call.copies) - 1
    piece = block_k // call.copies
    registers = REGISTERS[dim <= 64]
    early, multiplier = split_scale(call.softmax_scale)

    def body(
        q_ref: Ref, k_ref: Ref, v_ref: Ref, table_ref: Ref, bits_ref: Ref, work_ref: Ref, out_ref: Ref, lse_ref: Ref,
        *refs: Ref,
    ) -> None:  # fmt: skip
        rows_smem, *scratch = refs
        (k_ring, v_ring), (q_smem, queries_ready, cleared) = bind_rings((plan.keys, plan.keys), scratch)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        within = lax.rem(program, jnp.int32(width * call.kv_heads))
        kv_head = lax.div(within, jnp.int32(width))
        place = lax.div(program, jnp.int32(width * call.kv_heads)) * width + lax.rem(within, jnp.int32(width))

        # What few blocks need is looked up again where they do: kept in registers it has others spilled.
        def look_up() -> TileWork:
            return TileWork(*(work_ref[field * call.places + place] for field in range(FIELDS)))

        work = look_up()
        there = work.tokens > 0
        first, visits = work.first(block_k), work.total(block_k)
        own_bits = work.sequence * call.blocks + first
        # Of these visits every row sees all keys, and some row those of a wider range: whole blocks, from the first on.
        plain_from = lax.div(work.all_low + (block_k - 1), jnp.int32(block_k)) - first
        plain_until = lax.div(work.all_high, jnp.int32(block_k)) - first
        zero = warpgroup * 0  # no constant: JAX 0.12 refuses a slice that it sees to hang over the end of an array
        my_rows = pl.ds(warpgroup * ROWS, ROWS)

        def start_of(work: TileWork, visit: Scalar) -> Any:
            """The position of the first key of a visit."""
            return (work.first(block_k) + visit) * block_k

        def bits_of(visit: Scalar) -> Any:
            return bits_ref[own_bits + lax.min(visit, visits - 1)]

        def plain(visit: Scalar, bits: jax.Array) -> Any:
            """Whether every row sees all keys."""
            return (visit >= plain_from) & (visit < plain_until) & (bits == every)

        def produce() -> None:
            def load(ring: Ring, ref: Ref, visit: Scalar) -> None:
                start = start_of(work, visit)
                column = work.sequence * call.columns + lax.div(start, jnp.int32(call.page_size))
                row = lax.rem(start, jnp.int32(call.page_size)) if call.page_size > block_k else zero
                pages = [table_ref[column + number] for number in range(call.copies)]
                ring.load_from_dram(visit, *(ref.at[page, pl.ds(row, piece), kv_head] for page in pages))

            def load_both(visit: Scalar, _: None) -> None:
                # In the order in which the consumers hand slots back.
                load(k_ring, k_ref, visit)
                load(v_ring, v_ref, visit - 1)

            def load_queries(number: Scalar, _: None) -> None:
                """Of one head and a warpgroup's tokens; those that a tile does not have are any others."""
                half, head = lax.div(number, jnp.int32(group)), lax.rem(number, jnp.int32(group))
                token = lax.min(work.token + half * each, jnp.int32(tokens - 1))
                source = q_ref.at[pl.ds(token, each), kv_head * group + head]
                target = rows_smem.at[pl.ds(half * ROWS + head * each, each)]
                plgpu.copy_gmem_to_smem(source, target, queries_ready)

            load(k_ring, k_ref, zero)
            lax.fori_loop(0, plan.pieces, load_queries, None)
            lax.fori_loop(1, visits, load_both, None)
            load(v_ring, v_ref, zero + (visits - 1))

        def iota(size: int, axis: int) -> Any:
            return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=tile_layout().reduce(1 - axis))

        def present(place: Scalar, bits: jax.Array) -> Any:
            """Places of keys in the block, those of pages that are not there beyond every bound."""
            if call.copies == 1:
                return place
            page = lax.shift_right_logical(place, jnp.int32(piece.bit_length() - 1))
            return jnp.where((lax.shift_right_logical(bits, page) & 1) == 1, place, FAR)

        def end_of(work: TileWork, visit: Scalar, bits: jax.Array) -> Any:
            """One past the last place that some row sees."""
            end = work.high - start_of(work, visit)
            return jnp.where(bits == 1, end, 0) if call.copies == 1 else end

        def fill(visit: Scalar, bits: jax.Array) -> None:
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
                    held = plgpu.load(chunk, layout=tile_layout())
                    place = plgpu.broadcasted_iota(jnp.int32, (half, CHUNK), 0, layout=tile_layout()) + warpgroup * half
                    place = present(place, bits)
                    kept = (place < end_of(work, visit, bits)) & (place >= work.low - start_of(work, visit))
                    chunk[...] = jnp.where(kept, held, jnp.zeros_like(held))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

        def visible(visit: Scalar, bits: jax.Array) -> Any:
            # Bounds are of rows, which take two registers; of differences the compiler would keep every element.
            work = look_up()
            end = end_of(work, visit, bits)
            key = lax.broadcast_in_dim(present(iota(block_k, 1), bits), (ROWS, block_k), [1])
            row = lax.rem(iota(ROWS, 0), jnp.int32(each)) + (warpgroup * each + (work.position - start_of(work, visit)))
            right = FAR if call.right is None else call.right
            seen = key < across(jnp.minimum(row + (right + 1), end), block_k)
            if call.left is not None:
                seen &= key >= across(jnp.maximum(row - call.left, work.low - start_of(work, visit)), block_k)
            return seen

        def softmax(
            products: jax.Array, visit: Scalar, bits: jax.Array, m: jax.Array, total: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Probabilities, what scales earlier ones, and the new statistics."""
            logits = products if early == 1.0 else products * early
            logits = lax.cond(
                plain(visit, bits), lambda x: x, lambda x: jnp.where(visible(visit, bits), x, -jnp.inf), logits
            )
            p, scale, m, total = online_softmax(logits, multiplier, m, total)
            return p.astype(dtype), scale, m, total

        def swizzle_queries() -> None:
            plgpu.barrier_wait(queries_ready)
            q_smem.at[my_rows][...] = plgpu.load(rows_smem.at[my_rows], layout=tile_layout(), optimized=False)
            plgpu.commit_smem()

        def scores_of(scores: Ref, visit: Scalar) -> None:
            # Addresses that do not change from block to block would all be kept in registers, and others spilled. So
            # they hang on the visit, of which there are not so many.
            none = opaque_zero(visit, VISIT_BITS)
            rows = pl.ds((warpgroup + none) * ROWS, ROWS)
            plgpu.wgmma(scores, q_smem.at[rows], k_ring.get_mma_tile(visit, transposed=True))

        def attend(acc: Ref) -> None:
            def alone(scores: Ref) -> Any:
                k_ring.load_from_shared(zero)
                scores_of(scores, zero)
                return scores[...]

            def visit_one(visit: Scalar, carry: Any) -> Any:
                p, m, total, bits = carry
                bits_before, bits_after = bits_of(visit - 1), bits_of(visit + 1)

                def overlapped(scores: Ref) -> Any:
                    k_ring.load_from_shared(visit)
                    scores_of(scores, visit)
                    fill(visit - 1, bits_before)
                    plgpu.wgmma(acc, p, v_ring.get_mma_tile(visit - 1))
                    products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    k_ring.release(visit)
                    p_after, scale, m_after, total_after = softmax(products, visit, bits, m, total)
                    plgpu.wgmma_wait(0)
                    v_ring.release(visit - 1)
                    acc[...] = acc[...] * across(scale, dim)
                    return p_after, m_after, total_after, bits_after

                return pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_k), jnp.float32))

            swizzle_queries()
            products = pl.run_scoped(alone, plgpu.ACC((ROWS, block_k), jnp.float32))
            k_ring.release(zero)
            bits = bits_of(zero)
            m, total = initial_statistics()
            p, _, m, total = softmax(products, zero, bits, m, total)
            p, m, total, _ = lax.fori_loop(1, visits, visit_one, (p, m, total, bits_of(zero + 1)))
            fill(visits - 1, bits_of(visits - 1))
            plgpu.wgmma(acc, p, v_ring.get_mma_tile(visits - 1))
            out = acc[...]
            v_ring.release(visits - 1)
            store(out, m, total)

        def store(out: jax.Array, m: jax.Array, total: jax.Array) -> None:
            """Of the tokens that there are; rows lie where the warpgroup's queries came to."""
            work = look_up()
            weight = normaliser(total)
            held = rows_smem.at[my_rows]
            store_unoptimised(held, (out * across(weight, dim)).astype(dtype))
            plgpu.commit_smem()
            token, head = work.token + warpgroup * each, kv_head * group
            mine = lax.min(work.tokens - warpgroup * each, jnp.int32(each))

            def copy(begin: Scalar, size: int) -> None:
                def of_head(number: Scalar, _: None) -> None:
                    target = out_ref.at[pl.ds(token + begin, size), head + number]
                    plgpu.copy_smem_to_gmem(held.at[pl.ds(number * each + begin, size)], target)

                lax.fori_loop(0, group, of_head, None)

            @pl.when(mine == each)
            def _() -> None:
                copy(zero, each)

            @pl.when(mine < each)
            def _() -> None:
                lax.fori_loop(0, mine, lambda begin, _: copy(begin, 1), None)

            lse = row_lse(m, total)
            lse_ref.at[work.tile, kv_head, warpgroup][...] = lse
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def attend_none() -> None:
            """No row is this warpgroup's: it hands slots back, and has its half of the values to clear."""

            def visit_one(visit: Scalar, bits: jax.Array) -> Any:
                after = bits_of(visit + 1)
                k_ring.load_from_shared(visit)
                k_ring.release(visit)
                fill(visit, bits)
                v_ring.release(visit)
                return after

            lax.fori_loop(0, visits, visit_one, bits_of(zero))

        @pl.when(there & (warpgroup < CONSUMERS))
        def _() -> None:
            plgpu.set_max_registers(registers[0], action="increase")

            @pl.when(work.tokens > warpgroup * each)
            def _() -> None:
                pl.run_scoped(attend, plgpu.ACC((ROWS, dim), jnp.float32))

            @pl.when(work.tokens <= warpgroup * each)
            def _() -> None:
                attend_none()

        @pl.when(there & (warpgroup == CONSUMERS))
        def _() -> None:
            plgpu.set_max_registers(registers[1], action="decrease")
            produce()

    kernel = warpgroup_kernel(
        body,
        (
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct((call.tiles, call.kv_heads, CONSUMERS, ROWS), jnp.float32),
        ),
        plan.scratch(),
        call.places * call.kv_heads,
        CONSUMERS + 1,
    )
    return kernel(query, key, value, table, bits, work)
