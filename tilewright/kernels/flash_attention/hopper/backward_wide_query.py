"""The gradient of queries on Hopper where a head dim is beyond 128, by a kernel of its own, in a fixed order."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.call import BackwardCall
from tilewright.kernels.flash_attention.hopper.delta import completed, statistic_of_rows, sums_of_products
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS, WideBackwardParams
from tilewright.kernels.flash_attention.hopper.plans import WIDE_SHAPE, WideBackwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import Steps, Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    TileCoord,
)
from tilewright.kernels.flash_attention.hopper.wide_scores import (
    again,
    probabilities,
    score_gradients,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import Ring, bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.tiles import opaque_zero, store_unoptimised
from tilewright.kernels.hopper.types import Condition, Ref, Scalar


def wide_query_kernel(
    call: BackwardCall[WideBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    order: jax.Array,
) -> Any:
    """``d_query`` by a schedule over the keys, in a fixed order.

    Each of two warpgroups holds 64 rows of dQ. The schedule has rows of ``query_rows`` and columns of ``block_k``.
    """
    query, _, value, _ = call.operands
    params, options = call.params, call.options
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    group = heads // kv_heads
    dtype, block_q = query.dtype, params.query_rows
    plan = WideBackwardPlan(params, head_dim, value_dim, dtype)
    q_tiles = schedule.extent.row_tiles
    # What else is done to a tile takes the registers that a second tile in flight would need.
    light = options.plain and not options.dropout_prob
    accumulator = plgpu.ACC(WIDE_SHAPE, jnp.float32)
    operands = (*call.operands, call.out, call.statistics, order, tables, call.arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Ref) -> None:
        q_ref, k_ref, v_ref, do_ref, out_ref, stat_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        dq_ref, *scratch = refs[len(leaves) :]
        (q_ring, do_ring, k_ring, v_ring), _ = bind_rings(plan.query_rings, scratch)
        # The rows of ``out`` come first, by a ring that has both stages at once where they fit.
        if head_dim == value_dim:
            out_ring, k_ring = k_ring, dataclasses.replace(k_ring, offset=CONSUMERS)
        else:
            out_ring, v_ring = v_ring, dataclasses.replace(v_ring, offset=CONSUMERS)
        warpgroup = lax.axis_index("warpgroup")

        def current_item() -> Any:
            return order_ref[lax.axis_index("program")]

        def program(item: Scalar) -> tuple[Any, Any, Any, Steps]:
            """Batch element, head, first query and visits."""
            b, h, q_tile = decode_tile_index(item, q_tiles, heads)
            return b, h, q_tile * block_q, schedule.steps(table_refs, b, h, q_tile)

        def consume() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            steps = program(item)[-1]

            def needs_mask(step: Scalar) -> Any:
                return step < program(again(item, step))[-1].masked if schedule.may_mask else False

            def statistic(row: int, item: Scalar) -> Any:
                b, h, q_start, _ = program(item)
                rows = pl.ds(q_start + warpgroup * BLOCK, BLOCK)
                return statistic_of_rows(stat_ref, b, h, row, rows)

            def spread(x: jax.Array) -> Any:
                return lax.broadcast_in_dim(x, WIDE_SHAPE, [0])

            def complete_statistics() -> None:
                """Stores the gradient of lse less the row sums of this warpgroup."""
                do_ring.load_from_shared(warpgroup)
                for i in range(CONSUMERS):
                    out_ring.load_from_shared(i)

                    def store(i: int = i) -> None:
                        b, h, q_start, _ = program(item)
                        outs = out_ring.smem.at[out_ring.slot(i)]
                        sums = sums_of_products(outs, do_ring.smem.at[i], do_ring.plan.tile)
                        minus_delta = completed(statistic(0, item), statistic(1, item), sums)
                        store_unoptimised(stat_ref.at[b, h, 1, pl.ds(q_start + i * BLOCK, BLOCK)], minus_delta)

                    pl.when(warpgroup == i)(store)
                    plgpu.commit_smem()  # threads have read what TMA writes next
                    out_ring.release(i)

            complete_statistics()
            # Read again in each step where registers are short.
            of_rows = (statistic(0, item) * options.multiplier, statistic(1, item)) if light else None

            def shift(step: Scalar) -> Any:
                return spread(of_rows[0] if of_rows else statistic(0, again(item, step)) * options.multiplier)

            def minus_delta(step: Scalar) -> Any:
                return spread(of_rows[1] if of_rows else statistic(1, again(item, step)))

            def issue_scores(scores: Ref, step: Scalar) -> None:
                k_ring.load_from_shared(step)
                queries = q_ring.smem.at[warpgroup + opaque_zero(step + item)]
                plgpu.wgmma(scores, queries, k_ring.get_mma_tile(step, transposed=True))

            def issue_dp(dp: Ref, step: Scalar) -> None:
                v_ring.load_from_shared(step)
                d_outs = do_ring.smem.at[warpgroup + opaque_zero(step + item)]
                plgpu.wgmma(dp, d_outs, v_ring.get_mma_tile(step, transposed=True))

            def weigh(logits: jax.Array, step: Scalar, masked: Condition) -> Any:
                b, h, q_start, steps = program(again(item, step))
                place = TileCoord(b, h, q_start + warpgroup * BLOCK, steps.tile(step) * BLOCK, WIDE_SHAPE, 0)
                return probabilities(logits, shift(step), options, array_refs, place, masked, dtype)[1]

            def together(
                step: Scalar, scores: Ref, dp: Ref, *, masked: Condition, other: Callable[[], None] | None = None
            ) -> Any:
                """dS with both products at once; ``other`` issues one that is still in flight afterwards."""
                dp[...] = minus_delta(step)
                issue_scores(scores, step)
                issue_dp(dp, step)
                if other is not None:
                    other()
                behind = 0 if other is None else 1
                factors = weigh(plgpu.wgmma_accumulator_load(scores, wait_n=behind + 1), step, masked)
                d_probabilities = plgpu.wgmma_accumulator_load(dp, wait_n=behind)
                v_ring.release(step)
                return factors * d_probabilities

            def in_turn(step: Scalar, masked: Condition) -> Any:
                def first(scores: Ref) -> Any:
                    issue_scores(scores, step)
                    return weigh(scores[...], step, masked)

                def second(dp: Ref) -> Any:
                    if not options.dropout_prob:
                        dp[...] = minus_delta(step)
                    issue_dp(dp, step)
                    d_probabilities = dp[...]
                    v_ring.release(step)
                    return d_probabilities

                factors = pl.run_scoped(first, accumulator)
                dp = pl.run_scoped(second, accumulator)
                return score_gradients(factors, dp, minus_delta(step) if options.dropout_prob else None, options)

            def accumulate(dq: Ref) -> Any:
                def issue_dq(step: Scalar, ds: jax.Array) -> None:
                    plgpu.wgmma(dq, ds, k_ring.get_mma_tile(step))

                def alone(step: Scalar, masked: Condition) -> Any:
                    # Two products at once want more registers than a mask leaves.
                    if not light or masked:
                        return in_turn(step, masked).astype(dtype)
                    both = functools.partial(together, step, masked=masked)
                    return pl.run_scoped(both, accumulator, accumulator).astype(dtype)

                def one(step: Scalar, _: None, masked: Condition) -> None:
                    issue_dq(step, alone(step, masked))
                    plgpu.wgmma_wait(0)
                    k_ring.release(step)

                def one_ahead(step: Scalar, ds: jax.Array) -> Any:
                    other = functools.partial(issue_dq, step, ds)
                    both = functools.partial(together, step + 1, masked=False, other=other)
                    following = pl.run_scoped(both, accumulator, accumulator)
                    plgpu.wgmma_wait(0)
                    k_ring.release(step)
                    # Not before that wait: ptxas serialises wgmma where a later one's operand in registers is made
                    # while one is in flight (C7513).
                    return following.astype(dtype)

                q_ring.load_from_shared(warpgroup)
                if not light:
                    lax.fori_loop(0, steps.total, lambda step, _: one(step, _, needs_mask(step)), None)
                    return dq[...]
                begin: Any = jnp.int32(0)
                if schedule.may_mask:
                    # One after another: overlapped, they would need more registers than there are.
                    begin = jnp.maximum(steps.masked - 1, 0)
                    lax.fori_loop(0, begin, functools.partial(one, masked=True), None)
                ds = alone(begin, schedule.may_mask)
                ds = lax.fori_loop(begin, steps.total - 1, one_ahead, ds)
                issue_dq(steps.total - 1, ds)
                plgpu.wgmma_wait(0)
                k_ring.release(steps.total - 1)
                return dq[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, head_dim), jnp.float32)) * options.scale
            stage = q_ring.smem.at[warpgroup]
            stage[...] = dq.astype(dtype)
            plgpu.commit_smem()
            b, h, q_start, _ = program(again(item, steps.total))
            rows = pl.ds(q_start + warpgroup * BLOCK, BLOCK)
            plgpu.copy_smem_to_gmem(stage, dq_ref.at[b, rows, h])
            plgpu.wait_smem_to_gmem(0)

        def produce() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][1], action="decrease")
            b, h, q_start, steps = program(current_item())
            kv_head = lax.div(h, jnp.int32(group))

            def load_rows(ring: Ring, ref: Ref) -> None:
                for i in range(CONSUMERS):
                    ring.load_from_dram(i, ref.at[b, pl.ds(q_start + i * BLOCK, BLOCK), h])

            def load(step: Scalar, _: None) -> None:
                columns = pl.ds(steps.tile(step) * BLOCK, BLOCK)
                k_ring.load_from_dram(step, k_ref.at[b, columns, kv_head])
                v_ring.load_from_dram(step, v_ref.at[b, columns, kv_head])

            load_rows(do_ring, do_ref)
            load_rows(out_ring, out_ref)
            load_rows(q_ring, q_ref)
            lax.fori_loop(0, steps.total, load, None)

        pl.when(warpgroup < CONSUMERS)(consume)
        pl.when(warpgroup == CONSUMERS)(produce)

    out_type, programs = jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), dtype), batch * heads * q_tiles
    kernel = warpgroup_kernel(body, out_type, ring_scratch(plan.query_rings), programs, CONSUMERS + 1)
    return kernel(*leaves)
