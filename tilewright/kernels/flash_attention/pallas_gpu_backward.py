"""The backward pass on Hopper: dK and dV of a tile of keys in registers, dQ added up in global memory or by a kernel of
its own.

``key_value_kernel`` gives a program 128 keys, 64 to each of two warpgroups, and walks the queries that see them. Scores
are computed transposed, so that probabilities and their gradients are already the register operands of the products for
dV and dK; only dS goes through shared memory, for dQ, whose parts are added in float32 by TMA reductions in the order
in which programs finish. Without those (``deterministic``) ``query_kernel`` computes dQ in a fixed order.
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

from tilewright.kernels.flash_attention.pallas_gpu_scores import (
    TILE,
    Place,
    ScoreArrays,
    ScoreOptions,
    biased_and_capped,
    kept,
    visible,
)
from tilewright.kernels.flash_attention.pallas_gpu_walk import Walk
from tilewright.kernels.kv_buffer.ring import RingPlan

ROWS = 64
"""Keys (or, for dQ, queries) of a warpgroup: the M of its matrix instruction."""

CONSUMERS = 2
REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True, slots=True)
class HopperBackwardParams:
    """How the backward kernels are cut.

    Attributes:
      block_q: queries per step of the kernel for dK and dV.
      num_stages: tiles of queries, and of output gradients, in shared memory at once.
      deterministic: bitwise repeatable: dQ by a kernel of its own, two matrix products more.
    """

    block_q: int = 64
    num_stages: int = 2
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise ValueError(f"a step takes 64 or 128 queries, got {self.block_q=}")
        if self.num_stages < 1:
            raise ValueError(f"the rings need a stage, got {self.num_stages=}")

    @property
    def block_k(self) -> int:
        return CONSUMERS * ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The shared memory of the kernel for dK and dV."""

    params: HopperBackwardParams
    head_dim: int
    value_dim: int
    dtype: Any

    def _ring(self, rows: int, columns: int, stages: int) -> RingPlan:
        return RingPlan((rows, columns), self.dtype, stages, CONSUMERS)

    @property
    def keys(self) -> RingPlan:
        return self._ring(self.params.block_k, self.head_dim, 1)

    @property
    def values(self) -> RingPlan:
        return self._ring(self.params.block_k, self.value_dim, 1)

    @property
    def queries(self) -> RingPlan:
        return self._ring(self.params.block_q, self.head_dim, self.params.num_stages)

    @property
    def d_outs(self) -> RingPlan:
        return self._ring(self.params.block_q, self.value_dim, self.params.num_stages)

    @property
    def statistics(self) -> RingPlan:
        return RingPlan((2, self.params.block_q), jnp.float32, self.params.num_stages, CONSUMERS, swizzle=0)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        return self.keys, self.values, self.queries, self.d_outs, self.statistics

    @property
    def d_query_shape(self) -> tuple[int, int]:
        """Queries and head dims of a warpgroup's share of a step's dQ."""
        if self.params.block_q == CONSUMERS * ROWS:
            return ROWS, self.head_dim
        return self.params.block_q, self.head_dim // CONSUMERS

    @property
    def reason(self) -> str:
        """Why a warpgroup's share of dQ cannot be cut out of the keys' tile; empty if it can."""
        width = (self.keys.swizzle or 2) // 2
        if self.params.deterministic or self.d_query_shape[1] % width == 0:
            return ""
        return f"wants shares of {width} columns of dQ, got {self.d_query_shape[1]} at {self.head_dim=}"

    @property
    def shared_bytes(self) -> int:
        rings = sum(ring.shared_bytes for ring in self.rings)
        scores = self.params.block_k * self.params.block_q * np.dtype(self.dtype).itemsize
        d_query = 4 * CONSUMERS * int(np.prod(self.d_query_shape))
        return rings + 1024 + (0 if self.params.deterministic else 2 * scores + d_query)


def key_value_kernel(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    statistics: Any,
    d_query: Any,
    order: Any,
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    params: HopperBackwardParams,
) -> tuple[Any, Any]:
    """``(d_key, d_value)``; adds to ``d_query``, a float32 reference ``[batch, q_length, heads, head_dim]``, or None.

    Args:
      statistics: ``[batch, heads, 2, padded q_length]`` float32, what scores and the gradients of probabilities start
        from, so that to subtract it costs nothing: lse in the unit of ``ScoreOptions.multiplier``, −∞ where a row sees
        nothing or does not exist; and the row sums of ``d_out · out`` less the gradient of lse. Both negated.
    """
    batch, _, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    group = heads // kv_heads
    dtype, block_q, block_k = query.dtype, params.block_q, params.block_k
    plan = BackwardPlan(params, head_dim, value_dim, dtype)
    kv_tiles = walk.extent.row_tiles
    items = batch * kv_heads * kv_tiles
    fused = d_query is not None
    dq_rows, dq_columns = plan.d_query_shape
    shape = (ROWS, block_q)
    of_columns = TILE.reduce(0)
    operands = (query, key, value, d_out, statistics, d_query, order, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, dq_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        dk_ref, dv_ref, *scratch = refs[len(leaves) :]
        k_ring, v_ring, q_ring, do_ring, stat_ring = (
            ring.bind(*scratch[3 * i : 3 * i + 3]) for i, ring in enumerate(plan.rings)
        )
        warpgroup = lax.axis_index("warpgroup")
        item = order_ref[lax.axis_index("program")]
        matrix, kv_tile = lax.div(item, jnp.int32(kv_tiles)), lax.rem(item, jnp.int32(kv_tiles))
        b, kv_head = lax.div(matrix, jnp.int32(kv_heads)), lax.rem(matrix, jnp.int32(kv_heads))
        kv_start = kv_tile * block_k

        def over_steps(one: Any) -> None:
            """Calls ``one(step, head, q_start, masked)`` for every query tile of every head of the group."""

            def of_head(member: Any, first: Any) -> Any:
                head = kv_head * group + member
                steps = walk.steps(table_refs, b, head, kv_tile)

                def visit(number: Any, _: Any, masked: bool) -> None:
                    one(first + number, head, steps.tile(number) * block_q, masked)

                start = jnp.minimum(steps.masked, steps.total) if walk.may_mask else 0
                if walk.may_mask:
                    lax.fori_loop(0, start, functools.partial(visit, masked=True), None)
                lax.fori_loop(start, steps.total, functools.partial(visit, masked=False), None)
                return first + steps.total

            # The second term is 0, but not to the compiler, which would drop a loop of one round: see ``zero`` below.
            lax.fori_loop(0, group + jnp.minimum(item, 0), of_head, jnp.int32(0))

        def load(step: Any, head: Any, q_start: Any, masked: Any) -> None:
            rows = pl.ds(q_start, block_q)
            q_ring.load_from_dram(step, q_ref.at[b, rows, head])
            stat_ring.load_from_dram(step, stat_ref.at[b, head, :, rows])
            do_ring.load_from_dram(step, do_ref.at[b, rows, head])

        def accumulate(dk: Any, dv: Any) -> tuple[Any, Any]:
            own = pl.ds(warpgroup * ROWS, ROWS)
            k_ring.load_from_shared(0)
            v_ring.load_from_shared(0)

            def one(step: Any, head: Any, q_start: Any, masked: Any) -> None:
                # Always 0, which the compiler does not see: it would keep the 64-bit descriptors of all operand slices
                # in registers over the loop (32 of them at head_dim 128) and spill others.
                zero = (step * (step + 1)) & 1
                k_tile, v_tile = k_ring.smem.at[zero], v_ring.smem.at[zero]
                k_own, v_own = k_tile.at[own], v_tile.at[own]
                place = Place(b, head, q_start, kv_start + warpgroup * ROWS, shape, 1)
                queries, d_outs = q_ring.get_mma_tile(step), do_ring.get_mma_tile(step)

                def statistic(row: int) -> Any:
                    values = plgpu.load(stat_ring.smem.at[stat_ring.slot(step), row], layout=of_columns)
                    return lax.broadcast_in_dim(values, shape, [1])

                def gradients(scores: Any, d_probabilities: Any) -> Any:
                    stat_ring.load_from_shared(step)
                    # Both before the first product: registers set while one runs make ptxas wait for it (C7517).
                    if options.plain:
                        scores[...] = statistic(0)
                    if not options.dropout_prob:
                        d_probabilities[...] = statistic(1)
                    q_ring.load_from_shared(step)
                    plgpu.wgmma(scores, k_own, queries.T)
                    do_ring.load_from_shared(step)
                    plgpu.wgmma(d_probabilities, v_own, d_outs.T)
                    logits, tanh = plgpu.wgmma_accumulator_load(scores, wait_n=1), None
                    if not options.plain:
                        logits, tanh = biased_and_capped(logits, options, array_refs, place)
                        logits = logits + statistic(0)
                    logits = logits * options.multiplier
                    if masked:
                        logits = jnp.where(visible(options, array_refs, place), logits, -jnp.inf)
                    p = jnp.exp2(logits)
                    if options.dropout_prob:
                        keep = kept(options, array_refs, place)
                        kept_p = jnp.where(keep, p * (1 / (1 - options.dropout_prob)), 0.0)
                        plgpu.wgmma(dv, kept_p.astype(dtype), d_outs)
                        dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=1)
                        dp = jnp.where(keep, dp * (1 / (1 - options.dropout_prob)), 0.0) + statistic(1)
                    else:
                        plgpu.wgmma(dv, p.astype(dtype), d_outs)
                        dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=1)
                    ds = p * dp
                    if tanh is not None:
                        ds = ds * (1 - tanh * tanh)
                    stat_ring.release(step)
                    return ds.astype(dtype)

                accumulator = plgpu.ACC(shape, jnp.float32)
                ds = pl.run_scoped(gradients, accumulator, accumulator)
                if not fused:
                    plgpu.wgmma(dk, ds, queries)
                    plgpu.wgmma_wait(1)
                    do_ring.release(step)
                    plgpu.wgmma_wait(0)
                    q_ring.release(step)
                    return
                ds_smem, dq_smem, ds_ready = scratch[15:]
                # Two buffers: who writes one has passed the barrier of the step before, which the other warpgroup
                # reached after its product with this one's last content.
                buffer = lax.rem(step, jnp.int32(2))
                ds_smem[buffer, own] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_ready)
                plgpu.barrier_wait(ds_ready)

                def d_query_part(dq: Any) -> None:
                    if dq_columns == head_dim:
                        mine = pl.ds(warpgroup * dq_rows, dq_rows)
                        plgpu.wgmma(dq, ds_smem.at[buffer, :, mine].T, k_tile)
                        target = dq_ref.at[b, pl.ds(q_start + warpgroup * dq_rows, dq_rows), head]
                    else:
                        mine = pl.ds(warpgroup * dq_columns, dq_columns)
                        plgpu.wgmma(dq, ds_smem.at[buffer].T, k_tile.at[:, mine])
                        target = dq_ref.at[b, pl.ds(q_start, dq_rows), head, mine]
                    plgpu.wgmma(dk, ds, queries)
                    part = plgpu.wgmma_accumulator_load(dq, wait_n=1)
                    do_ring.release(step)
                    staging = dq_smem.at[warpgroup + zero]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staging[...] = part
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")
                    plgpu.wgmma_wait(0)
                    q_ring.release(step)

                pl.run_scoped(d_query_part, plgpu.ACC((dq_rows, dq_columns), jnp.float32))

            over_steps(one)
            return dk[...], dv[...]

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)
            dk, dv = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, head_dim), jnp.float32), plgpu.ACC((ROWS, value_dim), jnp.float32)
            )
            k_smem, v_smem = k_ring.smem.at[0, own], v_ring.smem.at[0, own]
            v_smem[...] = dv.astype(dtype)  # a warpgroup's own rows of V, which the other does not read
            if fused:  # all of K is operand of both warpgroups' dQ
                plgpu.barrier_arrive(scratch[17])
                plgpu.barrier_wait(scratch[17])
            k_smem[...] = (dk * options.scale).astype(dtype)
            plgpu.commit_smem()
            rows = pl.ds(kv_start + warpgroup * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(v_smem, dv_ref.at[b, rows, kv_head])
            plgpu.copy_smem_to_gmem(k_smem, dk_ref.at[b, rows, kv_head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            rows = pl.ds(kv_start, block_k)
            k_ring.load_from_dram(0, k_ref.at[b, rows, kv_head])
            v_ring.load_from_dram(0, v_ref.at[b, rows, kv_head])
            over_steps(load)

    scratch: list[Any] = [part for ring in plan.rings for part in ring.scratch()]
    if fused:
        scores = RingPlan((block_k, block_q), dtype, 2, CONSUMERS, swizzle=plan.queries.swizzle)
        staging = RingPlan((dq_rows, dq_columns), jnp.float32, CONSUMERS, 1)
        scratch += [
            plgpu.SMEM((2, block_k, block_q), dtype, transforms=scores.transforms),
            plgpu.SMEM((CONSUMERS, dq_rows, dq_columns), jnp.float32, transforms=staging.transforms),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ]
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, value_dim), dtype),
        ),
        scratch_types=scratch,
        grid=(items,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    return kernel(*leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class QueryPlan:
    """The shared memory of the kernel for dQ alone: 128 queries per program, ``block_k`` keys per step."""

    block_k: int
    num_stages: int
    head_dim: int
    value_dim: int
    dtype: Any

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        rows = CONSUMERS * ROWS
        return (
            RingPlan((rows, self.head_dim), self.dtype, 1, CONSUMERS),
            RingPlan((rows, self.value_dim), self.dtype, 1, CONSUMERS),
            RingPlan((self.block_k, self.head_dim), self.dtype, self.num_stages, CONSUMERS),
            RingPlan((self.block_k, self.value_dim), self.dtype, self.num_stages, CONSUMERS),
        )


def query_kernel(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    statistics: Any,
    order: Any,
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    block_k: int,
) -> Any:
    """``d_query`` by a walk over the keys, in a fixed order; arguments as for ``key_value_kernel``."""
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    group = heads // kv_heads
    dtype, block_q = query.dtype, CONSUMERS * ROWS
    plan = QueryPlan(block_k, 2, head_dim, value_dim, dtype)
    q_tiles = walk.extent.row_tiles
    shape = (ROWS, block_k)
    leaves, structure = jax.tree.flatten((query, key, value, d_out, statistics, order, tables, arrays))

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        dq_ref, *scratch = refs[len(leaves) :]
        q_ring, do_ring, k_ring, v_ring = (ring.bind(*scratch[3 * i : 3 * i + 3]) for i, ring in enumerate(plan.rings))
        warpgroup = lax.axis_index("warpgroup")
        item = order_ref[lax.axis_index("program")]
        matrix, q_tile = lax.div(item, jnp.int32(q_tiles)), lax.rem(item, jnp.int32(q_tiles))
        b, h = lax.div(matrix, jnp.int32(heads)), lax.rem(matrix, jnp.int32(heads))
        steps = walk.steps(table_refs, b, h, q_tile)

        def accumulate(dq: Any) -> Any:
            own = pl.ds(warpgroup * ROWS, ROWS)
            q_start = q_tile * block_q + warpgroup * ROWS
            q_ring.load_from_shared(0)
            do_ring.load_from_shared(0)
            q_own, do_own = q_ring.get_mma_tile(0).at[own], do_ring.get_mma_tile(0).at[own]

            def statistic(row: int) -> Any:
                return plgpu.load(stat_ref.at[b, h, row, pl.ds(q_start, ROWS)], layout=TILE.reduce(1), optimized=False)

            lse, delta = statistic(0), statistic(1)

            def one(step: Any, _: Any) -> None:
                place = Place(b, h, q_start, steps.tile(step) * block_k, shape, 0)

                def gradients(scores: Any, d_probabilities: Any) -> Any:
                    k_ring.load_from_shared(step)
                    plgpu.wgmma(scores, q_own, k_ring.get_mma_tile(step, transposed=True))
                    v_ring.load_from_shared(step)
                    plgpu.wgmma(d_probabilities, do_own, v_ring.get_mma_tile(step, transposed=True))
                    logits, tanh = plgpu.wgmma_accumulator_load(scores, wait_n=1), None
                    if not options.plain:
                        logits, tanh = biased_and_capped(logits, options, array_refs, place)
                    logits = (logits + lax.broadcast_in_dim(lse, shape, [0])) * options.multiplier
                    if walk.may_mask:
                        logits = lax.cond(
                            step < steps.masked,
                            lambda logits: jnp.where(visible(options, array_refs, place), logits, -jnp.inf),
                            lambda logits: logits,
                            logits,
                        )
                    p = jnp.exp2(logits)
                    dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=0)
                    v_ring.release(step)
                    if options.dropout_prob:
                        keep = kept(options, array_refs, place)
                        dp = jnp.where(keep, dp * (1 / (1 - options.dropout_prob)), 0.0)
                    ds = p * (dp + lax.broadcast_in_dim(delta, shape, [0]))
                    if tanh is not None:
                        ds = ds * (1 - tanh * tanh)
                    return ds.astype(dtype)

                accumulator = plgpu.ACC(shape, jnp.float32)
                ds = pl.run_scoped(gradients, accumulator, accumulator)
                plgpu.wgmma(dq, ds, k_ring.get_mma_tile(step))
                plgpu.wgmma_wait(0)
                k_ring.release(step)

            lax.fori_loop(0, steps.total, one, None)
            return dq[...]

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS, head_dim), jnp.float32))
            q_smem = q_ring.smem.at[0, pl.ds(warpgroup * ROWS, ROWS)]
            q_smem[...] = (dq * options.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, dq_ref.at[b, pl.ds(q_tile * block_q + warpgroup * ROWS, ROWS), h])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            kv_head = lax.div(h, jnp.int32(group))
            rows = pl.ds(q_tile * block_q, block_q)
            q_ring.load_from_dram(0, q_ref.at[b, rows, h])
            do_ring.load_from_dram(0, do_ref.at[b, rows, h])

            def load(step: Any, _: Any) -> None:
                columns = pl.ds(steps.tile(step) * block_k, block_k)
                k_ring.load_from_dram(step, k_ref.at[b, columns, kv_head])
                v_ring.load_from_dram(step, v_ref.at[b, columns, kv_head])

            lax.fori_loop(0, steps.total, load, None)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), dtype),
        scratch_types=[part for ring in plan.rings for part in ring.scratch()],
        grid=(batch * heads * q_tiles,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    return kernel(*leaves)
