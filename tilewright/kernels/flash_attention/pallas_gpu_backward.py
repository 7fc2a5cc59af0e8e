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

from tilewright.kernels.flash_attention.pallas_gpu_row_sums import ROW, STRIP, BackwardParams
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
class HopperBackwardParams(BackwardParams):
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
        consumers = CONSUMERS + (not self.params.deterministic)
        return RingPlan((self.params.block_k, self.head_dim), self.dtype, 1, consumers)

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
    def d_scores(self) -> RingPlan:
        """dS on its way from the warpgroups that own dK to the one that computes dQ."""
        return RingPlan(
            (self.params.block_k, self.params.block_q), self.dtype, 2, 1, CONSUMERS, swizzle=self.queries.swizzle
        )

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        rings = self.keys, self.values, self.queries, self.d_outs, self.statistics
        return rings if self.params.deterministic else (*rings, self.d_scores)

    @property
    def d_query_parts(self) -> list[tuple[int, int, int]]:
        """First query, first column and number of columns of each product for a step's dQ: 32 registers at most."""
        return [
            (row, column, min(64, self.head_dim - column))
            for row in range(0, self.params.block_q, ROWS)
            for column in range(0, self.head_dim, 64)
        ]

    @property
    def registers(self) -> tuple[int, ...]:
        """Per thread, of those that own dK and dV, of the warpgroup for dQ if there is one, and of the producer.

        A block starts with all the registers of a multiprocessor, shared out evenly in multiples of 8: together these
        must not be more.
        """
        return REGISTERS if self.params.deterministic else (208, 72, 24)

    @property
    def staging_shape(self) -> tuple[int, int, int]:
        return self.head_dim // STRIP, self.params.block_q, STRIP

    @property
    def outputs(self) -> tuple[RingPlan, ...]:
        """Where a warpgroup's dV and dK wait for their stores: one after the other in one place if they are alike."""
        widths = dict.fromkeys((self.value_dim, self.head_dim))
        return tuple(RingPlan((ROWS, width), self.dtype, CONSUMERS, 1) for width in widths)

    @property
    def shared_bytes(self) -> int:
        rings = sum(ring.shared_bytes for ring in (*self.rings, *self.outputs))
        return rings + 1024 + (0 if self.params.deterministic else 4 * int(np.prod(self.staging_shape)))


def key_value_kernel(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    statistics: Any,
    d_query: Any,
    lists: tuple[np.ndarray, np.ndarray],
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    params: HopperBackwardParams,
) -> tuple[Any, Any]:
    """``(d_key, d_value)``; adds to ``d_query``, a float32 reference of ``d_query_shape``, or None.

    Args:
      lists: of ``program_lists``, over tiles of keys.
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
    fused = d_query is not None
    shape, part = (ROWS, block_q), (ROWS, ROWS)
    of_columns = TILE.reduce(0)
    rows_of_step = block_q * head_dim // ROW
    starts, items = (jnp.asarray(part) for part in (lists[0], np.append(lists[1], 0)))
    operands = (query, key, value, d_out, statistics, d_query, (starts, items), tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, dq_ref, list_refs, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        starts_ref, items_ref = list_refs
        dk_ref, dv_ref, *scratch = refs[len(leaves) :]
        k_ring, v_ring, q_ring, do_ring, stat_ring, *ds_rings = (
            ring.bind(*scratch[3 * i : 3 * i + 3]) for i, ring in enumerate(plan.rings)
        )
        outputs = scratch[3 * len(plan.rings) : 3 * len(plan.rings) + len(plan.outputs)]
        staging = scratch[-1]
        warpgroup = lax.axis_index("warpgroup")

        def over_items(one: Any) -> None:
            """Calls ``first = one(turn, item, first)`` for the items of this program; ``first`` counts its steps."""
            program = lax.axis_index("program")
            start, end = starts_ref[program], starts_ref[program + 1]

            def of_turn(turn: Any, state: Any) -> Any:
                first, item = state
                following = items_ref[turn + 1]  # on its way while this item is worked on
                return one(turn - start, item, first), following

            lax.fori_loop(start, end, of_turn, (jnp.int32(0), items_ref[start]))

        def place_of(item: Any) -> tuple[Any, Any, Any]:
            matrix, kv_tile = lax.div(item, jnp.int32(kv_tiles)), lax.rem(item, jnp.int32(kv_tiles))
            return lax.div(matrix, jnp.int32(kv_heads)), lax.rem(matrix, jnp.int32(kv_heads)), kv_tile

        def over_steps(item: Any, first: Any, one: Any) -> Any:
            """Calls ``one(step, head, q_tile, masked)`` for every query tile of every head of the group."""
            b, kv_head, kv_tile = place_of(item)

            def of_head(member: Any, first: Any) -> Any:
                head = kv_head * group + member
                steps = walk.steps(table_refs, b, head, kv_tile)

                def visit(number: Any, _: Any) -> None:
                    one(first + number, head, steps.tile(number), number < steps.masked)

                lax.fori_loop(0, steps.total, visit, None)
                return first + steps.total

            return of_head(0, first) if group == 1 else lax.fori_loop(0, group, of_head, first)

        def gradients(turn: Any, item: Any, first: Any) -> Any:
            b, kv_head, kv_tile = place_of(item)
            own = pl.ds(warpgroup * ROWS, ROWS)
            kv_start = kv_tile * block_k + warpgroup * ROWS

            def accumulate(dk: Any, dv: Any) -> tuple[Any, Any, Any]:
                k_ring.load_from_shared(turn)
                v_ring.load_from_shared(turn)

                def one(step: Any, head: Any, q_tile: Any, masked: Any) -> None:
                    # Always 0, which the compiler does not see: it would keep the 64-bit descriptors of all operand
                    # slices in registers over the loop (32 of them at head_dim 128) and spill others.
                    zero = lax.shift_right_logical(step + item, 30)
                    k_own, v_own = k_ring.smem.at[zero, own], v_ring.smem.at[zero, own]
                    place = Place(b, head, q_tile * block_q, kv_start, shape, 1)
                    queries, d_outs = q_ring.get_mma_tile(step), do_ring.get_mma_tile(step)

                    def statistic(row: int, begin: int, size: int) -> Any:
                        values = plgpu.load(
                            stat_ring.smem.at[stat_ring.slot(step), row, pl.ds(begin, size)], layout=of_columns
                        )
                        return lax.broadcast_in_dim(values, (ROWS, size), [1])

                    def probabilities(scores: Any) -> tuple[Any, Any, Any]:
                        """What d_out, dP and delta are multiplied by: P, but for dropout and soft cap."""
                        stat_ring.load_from_shared(step)
                        if options.plain:
                            scores[...] = statistic(0, 0, block_q)
                        q_ring.load_from_shared(step)
                        plgpu.wgmma(scores, k_own, queries.T)
                        logits, tanh = plgpu.wgmma_accumulator_load(scores, wait_n=0), None
                        if not options.plain:
                            logits, tanh = biased_and_capped(logits, options, array_refs, place)
                            logits = logits + statistic(0, 0, block_q)

                        def exponentials(logits: Any, hidden: bool) -> Any:
                            logits = logits * options.multiplier
                            if hidden:
                                logits = jnp.where(visible(options, array_refs, place), logits, -jnp.inf)
                            return jnp.exp2(logits)

                        # A branch that is never taken where nothing is masked: without one ptxas puts the exponentials
                        # off until after the next product has its registers, which then are too few.
                        p = lax.cond(
                            masked if walk.may_mask else zero != 0,
                            functools.partial(exponentials, hidden=True) if walk.may_mask else (lambda x: x * 0.0),
                            functools.partial(exponentials, hidden=False),
                            logits,
                        )

                        def rounded(weight: Any) -> Any:
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

                    weights = pl.run_scoped(probabilities, plgpu.ACC(shape, jnp.float32))

                    def d_scores(d_probabilities: Any, begin: int) -> Any:
                        columns = pl.ds(begin, ROWS)
                        for_d_out, for_dp, for_delta = (
                            one if block_q == ROWS else one[:, begin : begin + ROWS] for one in weights
                        )
                        if not options.dropout_prob:
                            d_probabilities[...] = statistic(1, begin, ROWS)
                        plgpu.wgmma(d_probabilities, v_own, d_outs.at[columns].T)
                        plgpu.wgmma(dv, for_d_out, d_outs.at[columns])
                        dp = plgpu.wgmma_accumulator_load(d_probabilities, wait_n=1)
                        ds = for_dp.astype(jnp.float32) * dp
                        if options.dropout_prob:
                            ds = ds + for_delta.astype(jnp.float32) * statistic(1, begin, ROWS)
                        plgpu.wgmma_wait(0)
                        return ds.astype(dtype)

                    do_ring.load_from_shared(step)
                    # In parts of 64 queries: as many registers fewer as the tile has more.
                    parts = [
                        (begin, pl.run_scoped(functools.partial(d_scores, begin=begin), plgpu.ACC(part, jnp.float32)))
                        for begin in range(0, block_q, ROWS)
                    ]
                    do_ring.release(step)
                    for begin, ds in parts:
                        plgpu.wgmma(dk, ds, queries.at[pl.ds(begin, ROWS)])
                    if fused:
                        ds_rings[0].copy_to_shared(step, [ds for _, ds in parts], rows=own)
                    else:
                        plgpu.commit_smem()
                    # Behind a fence: statistics were read by threads, and TMA writes the slot by another way.
                    stat_ring.release(step)
                    plgpu.wgmma_wait(0)
                    q_ring.release(step)

                last = over_steps(item, first, one)
                k_ring.release(turn)
                v_ring.release(turn)
                return dk[...], dv[...], last

            dk, dv, last = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, head_dim), jnp.float32), plgpu.ACC((ROWS, value_dim), jnp.float32)
            )
            rows = pl.ds(kv_start, ROWS)
            for output, gradient, target in ((outputs[0], dv, dv_ref), (outputs[-1], dk * options.scale, dk_ref)):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                output.at[warpgroup][...] = gradient.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(output.at[warpgroup], target.at[b, rows, kv_head])
            return last

        def d_queries(turn: Any, item: Any, first: Any) -> Any:
            b, _, _ = place_of(item)
            ds_ring = ds_rings[0]
            k_ring.load_from_shared(turn)

            def one(step: Any, head: Any, q_tile: Any, masked: Any) -> None:
                zero = lax.shift_right_logical(step + item, 30)
                ds_ring.load_from_shared(step)
                for index, (row, column, columns) in enumerate(plan.d_query_parts):

                    def product(dq: Any, row: int = row, column: int = column, columns: int = columns) -> Any:
                        keys = k_ring.smem.at[zero, :, pl.ds(column, columns)]
                        plgpu.wgmma(dq, ds_ring.get_mma_tile(step).at[:, pl.ds(row, ROWS)].T, keys)
                        return dq[...]

                    part = pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))
                    if index == len(plan.d_query_parts) - 1:
                        ds_ring.release(step)
                    if index == 0:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for at in range(0, columns, STRIP):
                        strip = staging.at[(column + at) // STRIP, pl.ds(row, ROWS)]
                        strip[...] = part[:, at : at + STRIP]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    staging.reshape(rows_of_step, ROW),
                    dq_ref.at[b, head, pl.ds(q_tile * rows_of_step, rows_of_step)],
                    reduction_op="add",
                )

            last = over_steps(item, first, one)
            k_ring.release(turn)
            return last

        def load(turn: Any, item: Any, first: Any) -> Any:
            b, kv_head, kv_tile = place_of(item)
            rows = pl.ds(kv_tile * block_k, block_k)

            def one(step: Any, head: Any, q_tile: Any, masked: Any) -> None:
                rows = pl.ds(q_tile * block_q, block_q)
                stat_ring.load_from_dram(step, stat_ref.at[b, head, :, rows])
                q_ring.load_from_dram(step, q_ref.at[b, rows, head])
                do_ring.load_from_dram(step, do_ref.at[b, rows, head])

            k_ring.load_from_dram(turn, k_ref.at[b, rows, kv_head])
            v_ring.load_from_dram(turn, v_ref.at[b, rows, kv_head])
            return over_steps(item, first, one)

        def play(role: Any, registers: int, action: Any) -> None:
            plgpu.set_max_registers(registers, action=action)
            over_items(role)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(warpgroup < CONSUMERS)(functools.partial(play, gradients, plan.registers[0], "increase"))
        if fused:
            pl.when(warpgroup == CONSUMERS)(functools.partial(play, d_queries, plan.registers[1], "decrease"))
        pl.when(warpgroup == CONSUMERS + fused)(functools.partial(play, load, plan.registers[-1], "decrease"))

    scratch: list[Any] = [part for ring in plan.rings for part in ring.scratch()]
    scratch += [plgpu.SMEM((CONSUMERS, *output.tile), dtype, transforms=output.transforms) for output in plan.outputs]
    if fused:
        scratch.append(plgpu.SMEM(plan.staging_shape, jnp.float32))
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, value_dim), dtype),
        ),
        scratch_types=scratch,
        grid=(len(lists[0]) - 1,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1 + fused,
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
