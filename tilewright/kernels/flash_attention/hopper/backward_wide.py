"""The backward pass on Hopper where a head dim is beyond 128: dK and dV of one tile of keys in two warpgroups.

At head_dim 256 an accumulator of 64 rows takes 128 registers of a thread, so one warpgroup holds either dK or dV.
``wide_key_value_kernel`` splits its two consumers by role: one computes the probabilities and dV, the other the
gradients of the scores and dK; what they need of each other goes through rings in shared memory. dQ is added up in
global memory by both, a part of the columns each, or (``deterministic``) computed by ``wide_query_kernel``.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall
from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS, WideBackwardParams
from tilewright.kernels.flash_attention.hopper.plans import WIDE_SHAPE, WideBackwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    TileCoord,
    transposed,
)
from tilewright.kernels.flash_attention.hopper.wide_scores import (
    QueryVisits,
    Visit,
    again,
    has_unlike_factors,
    probabilities,
    score_gradients,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import Ring, bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.tiles import opaque_zero, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar


def wide_key_value_kernel(
    call: BackwardCall[WideBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    order: jax.Array,
    d_query: jax.Ref | None,
    d_bias: jax.Ref | None = None,
    bias_gradient: BiasGradient | None = None,
) -> tuple[Any, Any]:
    """``(d_key, d_value)``; adds to ``d_query``, a float32 reference of ``d_query_shape``, or None if deterministic.

    Args:
      d_bias: a reference to zeros as ``bias_gradient`` wants them.
    """
    query, _, value, _ = call.operands
    params, options, arrays = call.params, call.options, transposed(call.arrays)
    batch, _, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    group = heads // kv_heads
    dtype = query.dtype
    plan = WideBackwardPlan(params, head_dim, value_dim, dtype, bias_gradient)
    if params.deterministic != (d_query is None):
        raise ValueError(f"{params.deterministic=} and a place for dQ exclude each other")
    if plan.reason:
        raise ValueError(f"{params} {plan.reason}")
    fused, ahead, apart = not params.deterministic, params.d_out_stages > 1, has_unlike_factors(options)
    # Where it may be, an operand made on the way is one in registers, which the shared memory need not feed.
    in_registers = not fused and not apart
    split = plan.d_query_split
    kv_tiles = schedule.extent.row_tiles
    of_columns = tile_layout().reduce(0)
    accumulator = plgpu.ACC(WIDE_SHAPE, jnp.float32)
    operands = (*call.operands, call.statistics, d_query, d_bias, order, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Ref) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, dq_ref, d_bias_ref, order_ref, table_refs, array_refs = (
            jax.tree.unflatten(structure, refs[: len(leaves)])
        )
        dk_ref, dv_ref, *scratch = refs[len(leaves) :]
        rings, others = bind_rings(plan.rings, scratch)
        k_ring, v_ring, q_ring, do_ring, shift_ring, delta_ring, factor_ring = rings[:7]
        ds_ring = rings[-1]
        more = list(others)
        weights_smem = more.pop(0) if apart else factor_ring.smem
        staging_smem: Any = more.pop(0) if fused else None
        bias_smem: Any = more.pop(0) if bias_gradient is not None and bias_gradient.added else None

        def current_item() -> Any:
            return order_ref[lax.axis_index("program")]

        def program(item: Scalar) -> tuple[Any, Any, Any, QueryVisits]:
            """Batch element, kv head, first key and visits.

            Worked out anew by each role, and by the consumers in each step, where they would be spilled otherwise.
            """
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)
            nothing = opaque_zero(jnp.int32(0) + item)
            visits = QueryVisits.of(schedule, table_refs, b, kv_head * group, group, kv_tile, nothing)
            return b, kv_head, kv_tile * BLOCK, visits

        def row_statistic(ring: Ring, step: Scalar) -> Any:
            """A step's statistic of its queries, spread over the tile.

            Between reading it and its release comes a commit: TMA writes the stage next, and knows no other order.
            """
            ring.load_from_shared(step)
            values = plgpu.load(ring.smem.at[ring.slot(step)], layout=of_columns)
            return lax.broadcast_in_dim(values, WIDE_SHAPE, [1])

        def add_to_d_query(part: jax.Array, item: Scalar, visit: Visit, role: int, begin: int) -> None:
            b, _, _, visits = program(item)
            head, strips = visits.head(visit), params.d_query_columns // STRIP
            # Of the tile's rows of sums: a strip is two.
            first, count = lax.div(visits.q_start(visit) * head_dim, jnp.int32(ROW)), strips * STRIP * BLOCK // ROW
            for column in range(begin, begin + part.shape[1], params.d_query_columns):
                buffer = column // params.d_query_columns % params.d_query_buffers
                staging = staging_smem.at[role, buffer]
                plgpu.wait_smem_to_gmem(params.d_query_buffers - 1, wait_read_only=True)
                store_strips(staging, part[:, column - begin : column - begin + strips * STRIP])
                plgpu.commit_smem()
                target = dq_ref.at[b, head, pl.ds(first + column * BLOCK // ROW, count)]
                plgpu.copy_smem_to_gmem(staging.reshape(count, ROW), target, reduction_op="add")

        def value_role() -> None:
            """Scores, probabilities, dV and the first columns of dQ."""
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            _, _, _, visits = program(item)
            steps = visits.total

            def issue_scores(scores: Ref, step: Scalar) -> None:
                if options.plain:
                    scores[...] = row_statistic(shift_ring, step)
                q_ring.load_from_shared(step)
                keys = k_ring.smem.at[opaque_zero(step + item)]
                plgpu.wgmma(scores, keys, q_ring.get_mma_tile(step, transposed=True))

            def weigh(scores: jax.Array, step: Scalar, visit: Visit) -> tuple[Any, Any]:
                shift = None if options.plain else row_statistic(shift_ring, step) * options.multiplier
                b, _, kv_start, visits = program(again(item, step))
                place = TileCoord(b, visits.head(visit), visits.q_start(visit), kv_start, WIDE_SHAPE, 1)
                masked = visits.masked(visit) if schedule.may_mask else False
                weights, factors = probabilities(scores, shift, options, array_refs, place, masked, dtype)
                # Registers that are an operand must not be written while a product runs: see below.
                return weights if in_registers else weights.astype(dtype), factors.astype(dtype)

            def publish(step: Scalar, weights: jax.Array, factors: jax.Array) -> Any:
                """Hands over the factors; returns what the loop carries to the product for dV."""
                weights = weights.astype(dtype)
                if apart:
                    weights_smem[0] = weights
                factor_ring.copy_to_shared(step, factors if apart else weights)
                shift_ring.release(step)
                return weights if in_registers else jnp.int32(0)

            def accumulate(dv: Ref) -> Any:
                def issue_dv(step: Scalar, weights: jax.Array) -> None:
                    do_ring.load_from_shared(step)
                    plgpu.wgmma(dv, weights if in_registers else weights_smem.at[0], do_ring.get_mma_tile(step))

                def first(scores: Ref) -> tuple[Any, Any]:
                    issue_scores(scores, jnp.int32(0))
                    return weigh(scores[...], jnp.int32(0), visits.first)

                def d_query_part(step: Scalar, dq: Ref) -> Any:
                    keys = k_ring.smem.at[opaque_zero(step + item), :, pl.ds(0, split)]
                    plgpu.wgmma(dq, ds_ring.get_mma_tile(step, True), keys)
                    return dq[...]

                def add_own_columns(step: Scalar, visit: Visit) -> None:
                    if not fused:
                        return
                    ds_ring.load_from_shared(step)
                    part = functools.partial(d_query_part, step)
                    dq = pl.run_scoped(part, plgpu.ACC((BLOCK, split), jnp.float32))
                    ds_ring.release(step)
                    add_to_d_query(dq, again(item, step), visit, 0, 0)

                def one(step: Scalar, carry: Any) -> Any:
                    visit, weights = carry
                    following = program(again(item, step))[-1].after(visit)

                    def products(scores: Ref) -> Any:
                        if ahead:
                            issue_scores(scores, step + 1)
                            issue_dv(step, weights)
                            logits = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                        else:
                            # The only stage of d_out is wanted back.
                            issue_dv(step, weights)
                            issue_scores(scores, step + 1)
                            plgpu.wgmma_wait(1)
                            do_ring.release(step)
                            logits = scores[...]
                        return weigh(logits, step + 1, following)

                    made = pl.run_scoped(products, accumulator)
                    plgpu.wgmma_wait(0)
                    if ahead:
                        do_ring.release(step)
                    # Not before that wait: ptxas serialises wgmma where a later one's operand in registers is made
                    # while one is in flight (C7513).
                    weights = publish(step + 1, *made)
                    add_own_columns(step, visit)
                    return following, weights

                k_ring.load_from_shared(0)
                weights = publish(jnp.int32(0), *pl.run_scoped(first, accumulator))
                last, weights = lax.fori_loop(0, steps - 1, one, (visits.first, weights))
                issue_dv(steps - 1, weights)
                add_own_columns(steps - 1, last)
                plgpu.wgmma_wait(0)
                do_ring.release(steps - 1)
                return dv[...]

            dv = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, value_dim), jnp.float32))
            if options.dropout_prob:
                dv = dv * (1 / (1 - options.dropout_prob))
            # The other role has taken the last factors, so its last product with d_out is over.
            factor_ring.drain(steps - 1)
            b, kv_head, kv_start, _ = program(again(item, steps))
            store(do_ring, steps - 1, dv, dv_ref.at[b, pl.ds(kv_start, BLOCK), kv_head])

        def key_role() -> None:
            """Gradients of probabilities and scores, dK and the rest of dQ's columns."""
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            _, _, _, visits = program(item)
            steps = visits.total
            d_query_part = plgpu.ACC((BLOCK, max(head_dim - split, 8)), jnp.float32)
            own_columns = fused and split < head_dim

            def issue_dp(dp: Ref, step: Scalar) -> None:
                if not options.dropout_prob:
                    dp[...] = row_statistic(delta_ring, step)
                do_ring.load_from_shared(step)
                plgpu.wgmma(dp, v_ring.smem.at[opaque_zero(step + item)], do_ring.get_mma_tile(step, transposed=True))

            def store_bias(ds: jax.Array, step: Scalar, visit: Visit | None) -> None:
                if bias_gradient is None or visit is None:
                    return
                b, _, kv_start, visits = program(again(item, step))
                place = TileCoord(b, visits.head(visit), visits.q_start(visit), kv_start, WIDE_SHAPE, 1)
                bias_gradient.store(d_bias_ref, None if bias_smem is None else bias_smem.at[0], ds, place)

            def finish(dp: jax.Array, step: Scalar, visit: Visit | None) -> Any:
                """dS from dP, whose product is over."""
                do_ring.release(step)
                minus_delta = row_statistic(delta_ring, step) if options.dropout_prob else None
                if not fused:
                    plgpu.commit_smem()
                    delta_ring.release(step)
                factor_ring.load_from_shared(step)
                factors = plgpu.load(factor_ring.smem.at[factor_ring.slot(step)], layout=tile_layout()).astype(
                    jnp.float32
                )
                ds = score_gradients(factors, dp, minus_delta, options)
                factor_ring.release(step)
                if not fused:
                    return ds
                store_bias(ds, step, visit)
                return ds.astype(dtype)

            def alone(step: Scalar, visit: Visit, dp: Ref) -> Any:
                issue_dp(dp, step)
                return finish(dp[...], step, visit)

            def publish(step: Scalar, ds: jax.Array, visit: Visit | None) -> Any:
                """Hands dS to both products for dQ; returns what the loop carries to the one for dK."""
                if not fused:
                    # Here, where no product is in flight: rounded for the bias, dS is the next one's operand too.
                    store_bias(ds, step, visit)
                    return ds.astype(dtype)
                ds = ds.astype(dtype)
                ds_ring.copy_to_shared(step, ds)
                delta_ring.release(step)
                return jnp.int32(0)

            def issue_own_columns(dq: Ref, step: Scalar) -> None:
                rest = pl.ds(split, head_dim - split)
                plgpu.wgmma(dq, ds_ring.get_mma_tile(step, True), k_ring.smem.at[opaque_zero(step + item), :, rest])

            def accumulate(dk: Ref) -> Any:
                def issue_dk(step: Scalar, ds: jax.Array) -> None:
                    q_ring.load_from_shared(step)
                    plgpu.wgmma(dk, ds_ring.get_mma_tile(step) if fused else ds, q_ring.get_mma_tile(step))

                def one_ahead(step: Scalar, carry: Any) -> Any:
                    """dP of the next step and dK of this one; the next dS is made under the latter."""
                    visit, ds = carry

                    def products(dp: Ref) -> Any:
                        issue_dp(dp, step + 1)
                        issue_dk(step, ds)
                        next_visit = None if bias_gradient is None else program(again(item, step))[-1].after(visit)
                        return finish(plgpu.wgmma_accumulator_load(dp, wait_n=1), step + 1, next_visit)

                    def own(dq: Ref) -> Any:
                        issue_own_columns(dq, step)
                        return dq[...]

                    made = pl.run_scoped(products, accumulator)
                    plgpu.wgmma_wait(0)
                    q_ring.release(step)
                    dq: Any = pl.run_scoped(own, d_query_part) if own_columns else None
                    next_visit = None if bias_gradient is None else program(again(item, step))[-1].after(visit)
                    following = publish(step + 1, made, next_visit)
                    if own_columns:
                        add_to_d_query(dq, again(item, step), visit, 1, split)
                    return program(again(item, step))[-1].after(visit), following

                def one(step: Scalar, carry: Any) -> Any:
                    """dP, then dQ and dK of one step."""
                    visit, _ = carry
                    ds = publish(step, pl.run_scoped(functools.partial(alone, step, visit), accumulator), visit)
                    last_products(step, visit, ds)
                    q_ring.release(step)
                    return program(again(item, step))[-1].after(visit), jnp.int32(0)

                def last_products(step: Scalar, visit: Visit, ds: jax.Array) -> None:
                    def products(dq: Ref) -> Any:
                        issue_own_columns(dq, step)
                        issue_dk(step, ds)
                        return plgpu.wgmma_accumulator_load(dq, wait_n=1)

                    if own_columns:
                        add_to_d_query(pl.run_scoped(products, d_query_part), again(item, step), visit, 1, split)
                    else:
                        issue_dk(step, ds)
                    plgpu.wgmma_wait(0)

                v_ring.load_from_shared(0)
                if fused:
                    k_ring.load_from_shared(0)
                if not ahead:
                    lax.fori_loop(0, steps, one, (visits.first, jnp.int32(0)))
                    return dk[...]
                first = functools.partial(alone, jnp.int32(0), visits.first)
                ds = publish(jnp.int32(0), pl.run_scoped(first, accumulator), visits.first)
                last, ds = lax.fori_loop(0, steps - 1, one_ahead, (visits.first, ds))
                last_products(steps - 1, last, ds)
                q_ring.release(steps - 1)
                return dk[...]

            dk = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, head_dim), jnp.float32)) * options.scale
            b, kv_head, kv_start, _ = program(again(item, steps))
            # The last scores came before the last dS: nothing reads queries any more.
            store(q_ring, steps - 1, dk, dk_ref.at[b, pl.ds(kv_start, BLOCK), kv_head])

        def store(ring: Ring, step: Scalar, gradient: jax.Array, target: Ref) -> None:
            """Writes a gradient by way of a stage that is no longer needed."""
            stage = ring.smem.at[ring.slot(step)]
            stage[...] = gradient.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, target)
            plgpu.wait_smem_to_gmem(0)

        def producer_role() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][1], action="decrease")
            b, kv_head, kv_start, visits = program(current_item())
            kv_rows = pl.ds(kv_start, BLOCK)
            k_ring.load_from_dram(0, k_ref.at[b, kv_rows, kv_head])

            def load(step: Scalar, visit: Visit) -> Any:
                head, rows = visits.head(visit), pl.ds(visits.q_start(visit), BLOCK)
                shift_ring.load_from_dram(step, stat_ref.at[b, head, 0, rows])
                q_ring.load_from_dram(step, q_ref.at[b, rows, head])

                @pl.when(step == 0)
                def _() -> None:
                    v_ring.load_from_dram(0, v_ref.at[b, kv_rows, kv_head])

                delta_ring.load_from_dram(step, stat_ref.at[b, head, 1, rows])
                do_ring.load_from_dram(step, do_ref.at[b, rows, head])
                return visits.after(visit)

            lax.fori_loop(0, visits.total, load, visits.first)

        for warpgroup, role in enumerate((value_role, key_role, producer_role)):
            pl.when(lax.axis_index("warpgroup") == warpgroup)(role)

    scratch = ring_scratch(plan.rings)
    if apart:
        scratch.append(plan.weights.scratch(1))
    if fused:
        scratch.append(plgpu.SMEM(plan.staging_shape, jnp.float32))
    if bias_gradient is not None and bias_gradient.added:
        scratch.append(bias_gradient.staging(1))
    kernel = warpgroup_kernel(
        body,
        (
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, value_dim), dtype),
        ),
        scratch,
        batch * kv_heads * kv_tiles,
        CONSUMERS + 1,
    )
    return kernel(*leaves)
