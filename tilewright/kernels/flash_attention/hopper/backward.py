"""The backward pass on Hopper up to head_dim 128: dK and dV of a tile of keys in registers, dQ added up in global
memory or by a kernel of its own.

``key_value_kernel`` works on tiles of 128 keys, 64 for each of two warpgroups, and walks the queries that see them.
Scores are computed transposed, so that probabilities and their gradients are already the register operands of the
products for dV and dK. Only dS goes through shared memory, to a third warpgroup, which computes dQ without holding up
the others; its parts are added in float32 by TMA reductions, in the order in which programs finish. Without those
(``deterministic``) ``query_kernel`` computes dQ in a fixed order.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall
from tilewright.kernels.flash_attention.hopper.d_query import (
    COUNTER,
    EARLY_TILES,
    PIECE,
    ROW,
    STRIP,
    EarlyConversions,
    store_strips,
    sums_of,
)
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS, HopperBackwardParams
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    TileCoord,
    biased_and_capped,
    kept,
    transposed,
    visible,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.ring import Ring, bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index, operands_of, run_warpgroup
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, store_unoptimised, tile_layout
from tilewright.kernels.hopper.types import Condition, Ref, Scalar


def key_value_kernel(
    call: BackwardCall[HopperBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: tuple[np.ndarray, np.ndarray],
    d_query: jax.Ref | None,
    d_bias: jax.Ref | None = None,
    bias_gradient: BiasGradient | None = None,
    early: EarlyConversions | None = None,
    counters: jax.Ref | None = None,
) -> tuple[Any, ...]:
    """``(d_key, d_value)``; adds to ``d_query``, a float32 reference of ``d_query_shape``, or None.

    With ``early`` also dQ itself, and for each work item whether its rows of it are there, int32.

    Args:
      counters: with ``early``, a reference to float32 zeros, ``[batch, heads, *COUNTER]``.
      d_bias: a reference to zeros as ``bias_gradient`` wants them. If ``added``, results have whole tiles of keys.
      lists: of ``program_lists``, over tiles of keys.
    """
    query, _, value, _ = call.operands
    params, options, arrays = call.params, call.options, transposed(call.arrays)
    batch, _, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    group = heads // kv_heads
    dtype, block_q, block_k = query.dtype, params.block_q, params.block_k
    plan = BackwardPlan(params, head_dim, value_dim, dtype, bias_gradient)
    kv_tiles = schedule.extent.row_tiles
    fused = d_query is not None
    shape, part = (ROWS, block_q), (ROWS, ROWS)
    of_columns = tile_layout().reduce(0)
    rows_of_step = block_q * head_dim // ROW
    ahead = plan.ahead and options.plain and not options.dropout_prob  # what else is done to scores takes registers
    tasks = None if early is None else (jnp.asarray(early.items), counters)
    operands = (*call.operands, call.statistics, d_query, d_bias, operands_of(lists), tasks, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)
    rings = plan.rings if early is None else (*plan.rings, plan.count)
    rows = kv_tiles * block_k if bias_gradient is not None and bias_gradient.added else kv_length
    out_type = [jax.ShapeDtypeStruct((batch, rows, kv_heads, dim), dtype) for dim in (head_dim, value_dim)]
    if early is not None:
        out_type += [jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct(lists[1].shape, jnp.int32)]

    def body(*refs: Ref) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, dq_ref, d_bias_ref, list_refs, task_refs, table_refs, array_refs = (
            jax.tree.unflatten(structure, refs[: len(leaves)])
        )
        scratch = refs[len(leaves) + len(out_type) :]
        dk_ref, dv_ref, *converted_refs = refs[len(leaves) : len(leaves) + len(out_type)]
        bound, others = bind_rings(rings, scratch)
        k_ring, v_ring, q_ring, do_ring, stat_ring, *optional = bound
        some: list[Any] = [*optional, None, None]  # not all kernels have these
        ds_ring, count_ring = some[:2]
        outputs = others[: len(plan.outputs)]
        staging, bias_staging = scratch[-1], None if outputs else scratch[-2]
        warpgroup = lax.axis_index("warpgroup")

        def over_steps(item: Scalar, first: Scalar, one: Callable[..., Any], carry: Any = None) -> Any:
            """Calls ``carry = one(step, head, q_tile, masked, more, carry)`` for every query tile of every head."""
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)

            def of_head(member: Scalar, state: Any) -> Any:
                first, carry = state
                head = kv_head * group + member
                steps = schedule.steps(table_refs, b, head, kv_tile)

                def visit(number: Scalar, carry: Any) -> Any:
                    more = number + 1 < steps.total
                    more = more if group == 1 else more | (member + 1 < group)
                    return one(first + number, head, steps.tile(number), number < steps.masked, more, carry)

                carry = lax.fori_loop(0, steps.total, visit, carry)
                return first + steps.total, carry

            state = first, carry
            return (of_head(0, state) if group == 1 else lax.fori_loop(0, group, of_head, state))[0]

        def gradients(item_index: Scalar, item: Scalar, first: Scalar) -> Any:
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)
            own = pl.ds(warpgroup * ROWS, ROWS)
            kv_start = kv_tile * block_k + warpgroup * ROWS

            def accumulate(dk: Ref, dv: Ref) -> tuple[Any, Any, Any]:
                k_ring.load_from_shared(item_index)
                v_ring.load_from_shared(item_index)

                def statistic(step: Scalar, row: int, begin: int, size: int) -> Any:
                    values = plgpu.load(
                        stat_ring.smem.at[stat_ring.slot(step), row, pl.ds(begin, size)], layout=of_columns
                    )
                    return lax.broadcast_in_dim(values, (ROWS, size), [1])

                def operand(ring: Ring, step: Scalar) -> Any:
                    return ring.smem.at[opaque_zero(step + item), own]

                def wait_for_queries(step: Scalar) -> None:
                    stat_ring.load_from_shared(step)
                    q_ring.load_from_shared(step)

                def prepare_scores(scores: Ref, step: Scalar) -> None:
                    if options.plain:
                        scores[...] = statistic(step, 0, 0, block_q)

                def issue_scores(scores: Ref, step: Scalar) -> None:
                    plgpu.wgmma(scores, operand(k_ring, step), q_ring.get_mma_tile(step, transposed=True))

                def scores_alone(scores: Ref, step: Scalar) -> Any:
                    wait_for_queries(step)
                    prepare_scores(scores, step)
                    issue_scores(scores, step)
                    return plgpu.wgmma_accumulator_load(scores, wait_n=0)

                def one(
                    step: Scalar,
                    head: Scalar,
                    q_tile: Scalar,
                    masked: Condition,
                    more: Condition,
                    logits: jax.Array | None,
                ) -> Any:
                    zero = opaque_zero(step + item)
                    place = TileCoord(b, head, q_tile * block_q, kv_start, shape, 1)
                    queries, d_outs = q_ring.get_mma_tile(step), do_ring.get_mma_tile(step)

                    def probabilities(logits: jax.Array) -> tuple[Any, Any, Any]:
                        """What d_out, dP and delta are multiplied by: P, but for dropout and soft cap."""
                        tanh = None
                        if not options.plain:
                            logits, tanh = biased_and_capped(logits, options, array_refs, place)
                            logits = logits + statistic(step, 0, 0, block_q)

                        def exponentials(logits: jax.Array, hidden: bool) -> Any:
                            logits = logits * options.multiplier
                            if hidden:
                                logits = jnp.where(visible(options, array_refs, place), logits, -jnp.inf)
                            return jnp.exp2(logits)

                        # A branch that is never taken where nothing is masked: without one ptxas puts the exponentials
                        # off until after the next product has its registers, which then are too few.
                        p = lax.cond(
                            masked if schedule.may_mask else zero != 0,
                            functools.partial(exponentials, hidden=True) if schedule.may_mask else (lambda x: x * 0.0),
                            functools.partial(exponentials, hidden=False),
                            logits,
                        )

                        def rounded(weight: jax.Array) -> Any:
                            # Before the next product is on its way: an operand made meanwhile would serialise it.
                            return lax.optimization_barrier(weight.astype(dtype))

                        slopes = p if tanh is None else p * (1 - tanh * tanh)
                        if not options.dropout_prob:
                            for_d_out = rounded(p)
                            for_dp = for_d_out if tanh is None else rounded(slopes)
                            return for_d_out, for_dp, for_dp
                        keep, weight = kept(options, array_refs, place), 1 / (1 - options.dropout_prob)
                        for_d_out = rounded(jnp.where(keep, p * weight, 0.0))
                        for_dp = for_d_out if tanh is None else rounded(jnp.where(keep, slopes * weight, 0.0))
                        return for_d_out, for_dp, rounded(slopes)

                    if not ahead:
                        logits = pl.run_scoped(
                            functools.partial(scores_alone, step=step), plgpu.ACC(shape, jnp.float32)
                        )
                    assert logits is not None
                    weights = probabilities(logits)

                    def d_scores(d_probabilities: Ref, begin: int) -> Any:
                        columns = pl.ds(begin, ROWS)
                        for_d_out, for_dp, for_delta = (
                            one if block_q == ROWS else one[:, begin : begin + ROWS] for one in weights
                        )
                        if not options.dropout_prob:
                            d_probabilities[...] = statistic(step, 1, begin, ROWS)
                        plgpu.wgmma(d_probabilities, operand(v_ring, step), d_outs.at[columns].T)
                        plgpu.wgmma(dv, for_d_out, d_outs.at[columns])
                        dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=1)
                        ds = for_dp.astype(jnp.float32) * dp
                        if options.dropout_prob:
                            ds = ds + for_delta.astype(jnp.float32) * statistic(step, 1, begin, ROWS)
                        plgpu.wgmma_wait(0)
                        if bias_gradient is not None:
                            part_place = dataclasses.replace(place, q_start=place.q_start + begin)
                            own_staging = None if bias_staging is None else bias_staging.at[warpgroup]
                            bias_gradient.store(d_bias_ref, own_staging, ds, part_place)
                        return ds.astype(dtype)

                    do_ring.load_from_shared(step)
                    # In parts of 64 queries: as many registers fewer as the tile has more.
                    parts = [
                        (begin, pl.run_scoped(functools.partial(d_scores, begin=begin), plgpu.ACC(part, jnp.float32)))
                        for begin in range(0, block_q, ROWS)
                    ]
                    do_ring.release(step)

                    def finish(scores: Ref | None = None) -> Any:
                        if scores is not None:  # after the last step of an item the scores are of a stale tile
                            pl.when(more)(functools.partial(wait_for_queries, step + 1))
                            prepare_scores(scores, step + 1)
                        for begin, ds in parts:
                            plgpu.wgmma(dk, ds, queries.at[pl.ds(begin, ROWS)])
                        if scores is not None:
                            issue_scores(scores, step + 1)
                        if fused:
                            ds_ring.copy_to_shared(step, [ds for _, ds in parts], rows=own)
                        else:
                            plgpu.commit_smem()
                        # Behind a fence: statistics were read by threads, and TMA writes the slot by another way.
                        stat_ring.release(step)
                        plgpu.wgmma_wait(int(ahead))
                        q_ring.release(step)
                        return plgpu.wgmma_accumulator_load(scores, wait_n=0) if ahead else None

                    return pl.run_scoped(finish, plgpu.ACC(shape, jnp.float32)) if ahead else finish()

                scores = None
                if ahead:
                    scores = pl.run_scoped(functools.partial(scores_alone, step=first), plgpu.ACC(shape, jnp.float32))
                last = over_steps(item, first, one, scores)
                k_ring.release(item_index)
                v_ring.release(item_index)
                return dk[...], dv[...], last

            dk, dv, last = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, head_dim), jnp.float32), plgpu.ACC((ROWS, value_dim), jnp.float32)
            )
            rows = pl.ds(kv_start, ROWS)
            if not outputs:
                store_unoptimised(dv_ref.at[b, rows, kv_head], dv.astype(dtype))
                store_unoptimised(dk_ref.at[b, rows, kv_head], (dk * options.scale).astype(dtype))
                return last
            for output, gradient, target in ((outputs[0], dv, dv_ref), (outputs[-1], dk * options.scale, dk_ref)):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                output.at[warpgroup][...] = gradient.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(output.at[warpgroup], target.at[b, rows, kv_head])
            return last

        def convert(item: Scalar, number: Scalar) -> None:
            """One piece of the rows of dQ that an item stands for."""
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)
            pieces, steps = jnp.int32(head_dim // PIECE), jnp.int32(EARLY_TILES)
            step, piece = lax.div(number, pieces), lax.rem(number, pieces)
            head, rows = kv_head * group + lax.div(step, steps), kv_tile * EARLY_TILES + lax.rem(step, steps)
            target = converted_refs[0].at[b, pl.ds(rows * ROWS, ROWS), head, pl.ds(piece * PIECE, PIECE)]
            sums = sums_of(dq_ref, b, head, rows, block_q, head_dim, piece)
            store_unoptimised(target, (sums * options.scale).astype(dtype))

        def d_queries(item_index: Scalar, item: Scalar, first: Scalar) -> Any:
            b, kv_head, _ = decode_tile_index(item, kv_tiles, kv_heads)
            pieces: Any = 0
            if early is not None:
                task = task_refs[0][list_refs[0][lax.axis_index("program")] + item_index]
                asked = jnp.where(task < 0, item, task)  # an item that is worked on is not complete
                other, other_head, _ = decode_tile_index(asked, kv_tiles, kv_heads)
                # Through shared memory: all threads must see one value, whatever other programs add meanwhile.
                count_ring.load_from_dram(item_index, task_refs[1].at[other, other_head, 0, pl.ds(0, ROW // 2)])
            k_ring.load_from_shared(item_index)
            if early is not None:
                count_ring.load_from_shared(item_index)
                complete = count_ring.smem[0, 0] == kv_tiles
                count_ring.release(item_index)
                converted_refs[1][asked] = complete.astype(jnp.int32)
                pieces = jnp.where(complete, group * EARLY_TILES * (head_dim // PIECE), 0)

            def one(step: Scalar, head: Scalar, q_tile: Scalar, masked: Condition, more: Condition, _: None) -> None:
                zero = opaque_zero(step + item)
                ds_ring.load_from_shared(step)
                for index, (row, column, columns) in enumerate(plan.d_query_parts):

                    def product(dq: Ref, row: int = row, column: int = column, columns: int = columns) -> Any:
                        keys = k_ring.smem.at[zero, :, pl.ds(column, columns)]
                        plgpu.wgmma(dq, ds_ring.get_mma_tile(step).at[:, pl.ds(row, ROWS)].T, keys)
                        return dq[...]

                    part = pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))
                    if index == len(plan.d_query_parts) - 1:
                        ds_ring.release(step)
                    if index == 0:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    store_strips(staging.at[pl.ds(column // STRIP, columns // STRIP), pl.ds(row, ROWS)], part)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    staging.reshape(rows_of_step, ROW),
                    dq_ref.at[b, head, pl.ds(q_tile * rows_of_step, rows_of_step)],
                    reduction_op="add",
                )
                if early is not None:
                    pl.when(step - first < pieces)(lambda: convert(asked, step - first))

            last = over_steps(item, first, one)
            k_ring.release(item_index)
            if early is not None:
                lax.fori_loop(last - first, pieces, lambda number, _: convert(asked, number), None)
                plgpu.wait_smem_to_gmem(0)  # the sums, not only what they are read from: now they may be counted
                ones = staging.at[0, pl.ds(0, ROWS)]
                ones[...] = plgpu.layout_cast(jnp.ones((ROWS, STRIP), jnp.float32), tile_layout())
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(ones.reshape(COUNTER), task_refs[1].at[b, kv_head], reduction_op="add")
            return last

        def load(item_index: Scalar, item: Scalar, first: Scalar) -> Any:
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)
            rows = pl.ds(kv_tile * block_k, block_k)

            def one(step: Scalar, head: Scalar, q_tile: Scalar, masked: Condition, more: Condition, _: None) -> None:
                rows = pl.ds(q_tile * block_q, block_q)
                stat_ring.load_from_dram(step, stat_ref.at[b, head, :, rows])
                q_ring.load_from_dram(step, q_ref.at[b, rows, head])
                do_ring.load_from_dram(step, do_ref.at[b, rows, head])

            k_ring.load_from_dram(item_index, k_ref.at[b, rows, kv_head])
            v_ring.load_from_dram(item_index, v_ref.at[b, rows, kv_head])
            return over_steps(item, first, one)

        run = functools.partial(run_warpgroup, list_refs)
        pl.when(warpgroup < CONSUMERS)(functools.partial(run, gradients, plan.registers[0], "increase"))
        if fused:
            pl.when(warpgroup == CONSUMERS)(functools.partial(run, d_queries, plan.registers[1], "decrease"))
        pl.when(warpgroup == CONSUMERS + fused)(functools.partial(run, load, plan.registers[-1], "decrease"))

    scratch = ring_scratch(rings)
    scratch += [output.scratch(CONSUMERS) for output in plan.outputs]
    if bias_gradient is not None and bias_gradient.added:
        scratch.append(bias_gradient.staging(CONSUMERS))
    if fused:
        scratch.append(plgpu.SMEM(plan.staging_shape, jnp.float32))
    kernel = warpgroup_kernel(body, tuple(out_type), scratch, len(lists[0]) - 1, CONSUMERS + 1 + fused)
    return kernel(*leaves)
