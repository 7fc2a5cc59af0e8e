"""The gradient of queries on Hopper up to head_dim 128 by a kernel of its own, in a fixed order."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.call import BackwardCall
from tilewright.kernels.flash_attention.hopper.delta import completed, sums_of_products
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS, HopperBackwardParams
from tilewright.kernels.flash_attention.hopper.plans import QueryPlan
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    TileCoord,
    biased_and_capped,
    kept,
    masked_logits,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index, operands_of, run_warpgroup
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, store_unoptimised, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar


def query_kernel(
    call: BackwardCall[HopperBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: tuple[np.ndarray, np.ndarray],
    block_k: int,
) -> Any:
    """``d_query`` by a schedule over the keys, in a fixed order; ``lists`` over tiles of 128 queries."""
    query, _, value, _ = call.operands
    options = call.options
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    group = heads // kv_heads
    dtype, block_q = query.dtype, CONSUMERS * ROWS
    plan = QueryPlan(block_k, 2, head_dim, value_dim, dtype)
    q_tiles = schedule.extent.row_tiles
    shape = (ROWS, block_k)
    operands = (*call.operands, call.out, call.statistics, operands_of(lists), tables, call.arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Ref) -> None:
        q_ref, k_ref, v_ref, do_ref, out_ref, stat_ref, list_refs, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        dq_ref, *scratch = refs[len(leaves) :]
        (q_ring, do_ring, stat_ring, k_ring, v_ring), (outputs,) = bind_rings(plan.rings, scratch)
        warpgroup = lax.axis_index("warpgroup")

        def out_step(item_index: Scalar, first: Scalar, number: Scalar) -> Any:
            """Where a load is in the ring of the values, which has brought ``first`` tiles of these."""
            return first + item_index * plan.out_steps + number

        def gradients(item_index: Scalar, item: Scalar, first: Scalar) -> Any:
            b, h, q_tile = decode_tile_index(item, q_tiles, heads)
            steps = schedule.steps(table_refs, b, h, q_tile)
            own = pl.ds(warpgroup * ROWS, ROWS)
            q_start = q_tile * block_q + warpgroup * ROWS

            def complete(shift: jax.Array, d_lse: jax.Array) -> Any:
                """The second statistic of this warpgroup's rows, which is stored for the kernel for dK and dV."""
                steps_of_out = [out_step(item_index, first, i) for i in range(plan.out_steps)]
                for step in steps_of_out:
                    v_ring.load_from_shared(step)
                if plan.out_steps == 1:
                    outs = v_ring.smem.at[v_ring.slot(steps_of_out[0]), own]
                else:
                    outs = v_ring.smem.at[v_ring.slot(out_step(item_index, first, warpgroup))]
                sums = sums_of_products(outs, do_ring.smem.at[0, own], do_ring.plan.tile)
                minus_delta = completed(shift, d_lse, sums)
                plgpu.commit_smem()  # threads have read what TMA writes next
                for step in steps_of_out:
                    v_ring.release(step)
                store_unoptimised(stat_ref.at[b, h, 1, pl.ds(q_start, ROWS)], minus_delta)
                return minus_delta

            def accumulate(dq: Ref) -> Any:
                stat_ring.load_from_shared(item_index)
                do_ring.load_from_shared(item_index)
                rows = [plgpu.load(stat_ring.smem.at[0, row, own], layout=tile_layout().reduce(1)) for row in range(2)]
                lse, delta = (lax.broadcast_in_dim(row, shape, [0]) for row in (rows[0], complete(*rows)))
                q_ring.load_from_shared(item_index)

                def one(number: Scalar, _: None) -> None:
                    step, v_step = first + number, out_step(item_index + 1, first, number)
                    zero = opaque_zero(step + item)
                    q_own, do_own = q_ring.smem.at[zero, own], do_ring.smem.at[zero, own]
                    place = TileCoord(b, h, q_start, steps.tile(number) * block_k, shape, 0)

                    def of_scores(scores: Ref, d_probabilities: Ref) -> Any:
                        k_ring.load_from_shared(step)
                        plgpu.wgmma(scores, q_own, k_ring.get_mma_tile(step, transposed=True))
                        v_ring.load_from_shared(v_step)
                        plgpu.wgmma(d_probabilities, do_own, v_ring.get_mma_tile(v_step, transposed=True))
                        logits, tanh = plgpu.wgmma_accumulator_load(scores, wait_n=1), None
                        if not options.plain:
                            logits, tanh = biased_and_capped(logits, options, array_refs, place)
                        logits = (logits + lse) * options.multiplier
                        masked = number < steps.masked if schedule.may_mask else False
                        logits = masked_logits(logits, masked, options, array_refs, place)
                        p = jnp.exp2(logits)
                        dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=0)
                        v_ring.release(v_step)
                        if options.dropout_prob:
                            keep = kept(options, array_refs, place)
                            dp = jnp.where(keep, dp * (1 / (1 - options.dropout_prob)), 0.0)
                        ds = p * (dp + delta)
                        if tanh is not None:
                            ds = ds * (1 - tanh * tanh)
                        return ds.astype(dtype)

                    accumulator = plgpu.ACC(shape, jnp.float32)
                    ds = pl.run_scoped(of_scores, accumulator, accumulator)
                    plgpu.wgmma(dq, ds, k_ring.get_mma_tile(step))
                    plgpu.wgmma_wait(0)
                    k_ring.release(step)

                lax.fori_loop(0, steps.total, one, None)
                q_ring.release(item_index)
                do_ring.release(item_index)
                return dq[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS, head_dim), jnp.float32))
            output = outputs.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            output[...] = (dq * options.scale).astype(dtype)
            plgpu.commit_smem()
            stat_ring.release(item_index)  # behind a fence, as in the kernel for dK and dV
            plgpu.copy_smem_to_gmem(output, dq_ref.at[b, pl.ds(q_start, ROWS), h])
            return first + steps.total

        def load(item_index: Scalar, item: Scalar, first: Scalar) -> Any:
            b, h, q_tile = decode_tile_index(item, q_tiles, heads)
            steps = schedule.steps(table_refs, b, h, q_tile)
            kv_head = lax.div(h, jnp.int32(group))
            rows = pl.ds(q_tile * block_q, block_q)
            for i in range(plan.out_steps):
                part = pl.ds(q_tile * block_q + i * block_k, block_k)
                v_ring.load_from_dram(out_step(item_index, first, i), out_ref.at[b, part, h])
            stat_ring.load_from_dram(item_index, stat_ref.at[b, h, :, rows])
            do_ring.load_from_dram(item_index, do_ref.at[b, rows, h])
            q_ring.load_from_dram(item_index, q_ref.at[b, rows, h])

            def one(number: Scalar, carry: Any) -> None:
                columns = pl.ds(steps.tile(number) * block_k, block_k)
                k_ring.load_from_dram(first + number, k_ref.at[b, columns, kv_head])
                v_ring.load_from_dram(out_step(item_index + 1, first, number), v_ref.at[b, columns, kv_head])

            lax.fori_loop(0, steps.total, one, None)
            return first + steps.total

        registers, run = REGISTERS[CONSUMERS], functools.partial(run_warpgroup, list_refs)
        pl.when(warpgroup < CONSUMERS)(functools.partial(run, gradients, registers[0], "increase"))
        pl.when(warpgroup == CONSUMERS)(functools.partial(run, load, registers[1], "decrease"))

    kernel = warpgroup_kernel(
        body,
        jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), dtype),
        [
            *ring_scratch(plan.rings),
            plan.output.scratch(CONSUMERS),
        ],
        len(lists[0]) - 1,
        CONSUMERS + 1,
    )
    return kernel(*leaves)
