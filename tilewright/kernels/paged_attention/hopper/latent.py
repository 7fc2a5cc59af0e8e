"""Attention over pages of latents on Hopper: what TMA brings once is the keys of one product and the values of another.

A program has 64 query rows and a tile of 64 latents at a time. An output of 64 × 512 does not fit one warpgroup's
registers, so two share it by columns. The first computes the logits of all columns and the softmax, and leaves the
probabilities and what scales earlier sums in shared memory for the second, which only adds up its half. The logits of
the next tile and the first half of this one's output are in flight together (Shah et al., "FlashAttention-3", 2024,
section 3.2), so that exponentials are computed beside products of both warpgroups. A tile lies in shared memory in
three parts, each of which is loaded anew as soon as its last product is done.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import Ring, bind_rings
from tilewright.kernels.hopper.softmax import initial_statistics, normaliser, online_softmax, row_lse, split_scale
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, row_layout, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar
from tilewright.kernels.paged_attention.hopper.latent_work import (
    HALF,
    KEYS,
    SIZES,
    STAGES,
    VALUE_DIM,
    LatentCall,
    LatentPlan,
    work_of_program,
)

VISIT_BITS = 24
"""Bits of the number of a tile's visit; lengths have 30."""

CHUNK = 64
"""Columns that are read and written at once where rows are cleared."""

FIRST, SECOND, PRODUCER = range(WARPGROUPS := 3)
"""The warpgroups: logits and the first half of the output, the second half, loads."""


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

    def body(q_ref: Ref, pages_ref: Ref, table_ref: Ref, lengths_ref: Ref, *refs: Ref) -> None:
        out_ref, lse_ref, *scratch = refs
        (*queries, left, right, rest), (scales, ready, finished) = bind_rings(plan.rings, scratch)
        work = work_of_program(call, lax.axis_index("program"), lengths_ref)
        warpgroup = lax.axis_index("warpgroup")
        my_rows = pl.ds(work.row_tile * ROWS, ROWS)
        zero = warpgroup * 0  # no constant: JAX 0.12 refuses a slice that it sees to hang over the end of an array

        def page_of(visit: Scalar) -> Any:
            """The number that the table has for a visit's tile, or for the last tile behind it."""
            tile = work.first + lax.min(visit, work.total - 1)
            column = lax.min(lax.div(tile, jnp.int32(tiles_per_page)), jnp.int32(call.columns - 1))
            return table_ref[work.sequence * call.columns + column]

        def row_of(visit: Scalar) -> Any:
            """The tile's first row in its page."""
            return lax.rem(work.first + visit, jnp.int32(tiles_per_page)) * KEYS

        def exists(page: Scalar) -> Any:
            return (page >= 0) & (page < call.num_pages)

        def produce() -> None:
            def load(visit: Scalar, page: Scalar, ring: Ring, columns: pl.Slice) -> None:
                page = jnp.where(exists(page), page, 0)
                ring.load_from_dram(visit, pages_ref.at[page, pl.ds(row_of(visit), KEYS), columns])

            def prefetch(visit: Scalar) -> None:
                # A slot is handed back shortly before its next tile is needed: too late for device memory. Programs
                # of the same sequence go side by side, so the first alone does it.
                page, row = page_of(visit), row_of(visit)
                wanted = exists(page) & (visit < work.total) & (work.row_tile == 0)
                page = jnp.where(wanted, page, 0)
                for part in columns:
                    plgpu.async_prefetch(pages_ref.at[page, pl.ds(row, KEYS), part], predicate=wanted)

            def load_all(visit: Scalar, page: Scalar) -> Any:
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

        def seen_until(visit: Scalar, page: Scalar) -> Any:
            """One past the tile's last row that some query sees, counted from its first."""
            return jnp.where(exists(page), work.highest - (work.first + visit) * KEYS, 0)

        def clear(ring: Ring, visit: Scalar, page: Scalar) -> None:
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

        def masks(visit: Scalar, page: Scalar) -> Any:
            """Whether a tile has keys that not all rows see."""
            return (seen_until(visit, page) < KEYS) | (work.lowest - (work.first + visit) * KEYS < KEYS)

        def visible(visit: Scalar, page: Scalar) -> Any:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=tile_layout())
            end = seen_until(visit, page)
            if call.right is None or call.q_length == 1:
                return key < end
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 0, layout=tile_layout())
            token = lax.div(row + work.row_tile * ROWS, jnp.int32(call.heads))
            start = (work.first + visit) * KEYS
            return (key < end) & (key <= token + (work.position + call.right - start))

        def softmax(
            products: jax.Array, visit: Scalar, page: Scalar, m: jax.Array, total: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Probabilities, what scales earlier ones, and the new statistics."""
            logits = products if early == 1.0 else products * early
            logits = lax.cond(
                masks(visit, page), lambda x: jnp.where(visible(visit, page), x, -jnp.inf), lambda x: x, logits
            )
            p, scale, m, total = online_softmax(logits, multiplier, m, total)
            return p.astype(dtype), scale, m, total

        def logits_of(scores: Ref, visit: Scalar) -> None:
            # The left part comes last: its slot was the last to be handed back. Each product's operands have addresses
            # of their own; those of the queries do not change from tile to tile, and kept in registers they are
            # spilled. So they hang on the visit, of which there are not so many.
            none = opaque_zero(visit, VISIT_BITS)
            for query, ring in ((queries[1], right), (queries[2], rest), (queries[0], left)):
                ring.load_from_shared(visit)
                plgpu.wgmma(scores, query.smem.at[none], ring.get_mma_tile(visit, transposed=True))

        def weights_of(visit: Scalar) -> Any:
            """Probabilities lie where the rest of their keys was."""
            return rest.get_mma_tile(visit)

        def hand_over(visit: Scalar, p: jax.Array, scale: jax.Array) -> None:
            slot = right.slot(visit)
            scales[slot, :] = scale
            weights_of(visit)[...] = p
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])

        def first_logits(page: Scalar) -> tuple[Any, Any]:
            def alone(scores: Ref) -> Any:
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

        def attend_first(acc: Ref) -> None:
            def visit_one(visit: Scalar, carry: Any) -> Any:
                m, total, page = carry
                after = page_of(visit + 1)

                def overlapped(scores: Ref) -> Any:
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

        def attend_second(acc: Ref) -> None:
            def visit_one(visit: Scalar, page: Scalar) -> Any:
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

        def store(out: jax.Array, start: int, smem: Ref) -> None:
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
