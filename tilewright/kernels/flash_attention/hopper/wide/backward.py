"""The backward pass on Hopper where a head dim is beyond 128: dK and dV of 64 keys per work item, in two warpgroups.

At head_dim 256 an accumulator of 64 rows takes 128 registers of a thread, so one warpgroup holds either dK or dV. A
work item is a tile of 64 keys of a key head. A CTA (a Pallas program) is persistent, unless it adds up dQ, and has
three warpgroups: one computes S, P and dV, one dP, dS and dK, and one is the producer. P and dS go from one to the
other through rings in shared memory. Each of the first two computes a part of the columns of dQ and adds it in global
memory by TMA reductions; or (``deterministic``) ``wide_query_kernel`` computes dQ. A step is a Q iteration: a tile of
64 queries of one of the heads with these keys.

======  ===============================================  ==========================  ===================================
symbol  meaning                                          shape                       where it lives
======  ===============================================  ==========================  ===================================
K, V    keys and values of an item                       [64, ·_dim]                 shared, ``k``, ``v``
Q, dO   queries and gradient of the output, of a step    [64, ·_dim]                 shared, ``q``, ``d_out``
lse     log-sum-exp of the rows; −lse starts S           [64] float32                shared, ``minus_lse``
delta   rowsum(dO ∘ O) − d_lse; −delta starts dP         [64] float32                shared, ``minus_delta``
S       KQᵀ − lse                                        [64, 64] float32            registers, accumulator
P       exp2(multiplier · S), 0 where masked             [64, 64]                    shared, ``p`` (and ``p_dv``), or
                                                                                     registers; operand A of dV
dP      VdOᵀ − delta                                     [64, 64] float32            registers, accumulator
dS      P ∘ dP                                           [64, 64]                    shared, ``ds``, or registers
                                                                                     (deterministic); operand A of dK
dV      sum of P·dO over the steps                       [64, value_dim] float32     registers of the dV warpgroup
dK      sum of dS·Q over the steps                       [64, head_dim] float32      registers of the dK warpgroup
dQ      dSᵀ·K of a step, a part of the columns           [64, ≤ head_dim] float32    registers; shared, ``dq``
        its sum, the dQ accumulator                      ``dq_accumulator_shape``    global
======  ===============================================  ==========================  ===================================

Step i with two stages of dO; time runs to the right, and what stands below each other overlaps::

    producer       lse Q(i+2)  delta dO(i+2)   (as far ahead as the rings have stages)
    dV warpgroup   MMA  S(i+1)   dV(i)           dQ(i)[:, :split]
                   ALU          P(i+1) -> p                      dQ -> dq, add
    dK warpgroup   MMA  dP(i+1)  dK(i)           dQ(i)[:, split:]
                   ALU           dS(i+1)                         dS(i+1) -> ds; dQ -> dq, add

P(i+1) is computed beside the MMA for dV(i), dS(i+1) beside that for dK(i). With one stage of dO the dK warpgroup does
one step after another, and the dV warpgroup releases dO before it computes P. With a bias or a soft cap −lse is added
behind them instead; with dropout, −delta behind its scale.

dV and dK leave through the stages of dO and Q of an item's last step. Their warpgroups release these in the next item,
beside its first MMA, when TMA has read them; the producer loads K, V and the first Q and dO of that item before.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient, BiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall, KeyValueResults
from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.delta import MINUS_DELTA, MINUS_LSE
from tilewright.kernels.flash_attention.hopper.dropout import draw_kept
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS, WideBackwardParams
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import TileCoord, initial_scores, transposed
from tilewright.kernels.flash_attention.hopper.wide.context import WideContext, WideKeyValueOperands
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE, WideBackwardPlan, WideKeyValueScratch
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    ProbabilityTiles,
    QueryIteration,
    QueryIterations,
    ds_tile,
    has_separate_ds_factor,
    item_in_step,
    softmax_tile,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.panels import mma, store_tile
from tilewright.kernels.hopper.ring import Ring, when
from tilewright.kernels.hopper.schedule import ItemLists, operands_of, programs_of, run_warpgroup
from tilewright.kernels.hopper.tiles import column_layout, opaque_zero, store_unoptimised, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar

DV_WARPGROUP, DK_WARPGROUP, PRODUCER = range(CONSUMERS + 1)
"""Indices of the warpgroups."""


def wide_key_value_kernel(
    call: BackwardCall[WideBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: ItemLists[np.ndarray],
    dq_accumulator: jax.Ref | None,
    d_bias: jax.Ref | None = None,
    bias_gradient: AnyBiasGradient | None = None,
) -> KeyValueResults[jax.Array]:
    """Computes dK and dV, and adds to ``dq_accumulator``.

    Args:
      lists: over tiles of keys.
      dq_accumulator: float32 of ``dq_accumulator_shape``; None if deterministic.
      d_bias: a reference to zeros, the array of ``bias_gradient``; None if the steps store all of it.
    """
    params, options, dtype = call.params, call.options, call.query.dtype
    batch, head_dim = call.query.shape[0], call.query.shape[3]
    kv_length, kv_heads, value_dim = call.value.shape[1:]
    plan = WideBackwardPlan(params, *call.padded_dims, dtype, bias_gradient, call.panelled, call.bias_dtype)
    if params.deterministic != (dq_accumulator is None):
        raise ValueError(f"a dQ accumulator is for kernels that are not deterministic, got {params.deterministic=}")
    if plan.reason:
        raise ValueError(f"{params} {plan.reason}")
    if call.parts.group % call.parts.parts:
        raise ValueError(f"parts of wide heads are all of one size, got {call.parts}")
    operands = WideKeyValueOperands[object](
        *call.operands,
        call.statistics,
        dq_accumulator,
        d_bias,
        operands_of(lists),
        tables,
        transposed(call.arrays, plan.stages_bias),
    )
    dims, rows = (head_dim, value_dim), kv_length
    if call.parts.parts > 1:
        # Stored from registers, as whole tiles: a stage of the rings has no place for float32.
        dims, rows, dtype = call.padded_dims, schedule.extent.row_tiles * BLOCK, jnp.dtype(jnp.float32)
    d_key, d_value = (jax.ShapeDtypeStruct((batch, rows, kv_heads * call.parts.parts, dim), dtype) for dim in dims)
    results = KeyValueResults(d_key, d_value)
    if bias_gradient is not None and d_bias is None:
        results = results._replace(d_bias=jax.ShapeDtypeStruct(bias_gradient.shape, bias_gradient.dtype))

    def body(
        operands: WideKeyValueOperands[Ref], results: KeyValueResults[Ref], scratch: WideKeyValueScratch[Ring, Ref]
    ) -> None:
        ctx = WideContext(plan, options, schedule, kv_heads, call.parts, operands, results, scratch)
        run, registers = functools.partial(run_warpgroup, operands.item_lists), REGISTERS[CONSUMERS]

        def consume(role: Callable[..., Scalar], output: Ring) -> None:
            work = functools.partial(role, ctx)
            run(work, registers.consumer, "increase", lambda steps: release_last_stage(output.after(steps)))

        warpgroup, load = lax.axis_index("warpgroup"), functools.partial(load_item, ctx)
        pl.when(warpgroup == DV_WARPGROUP)(functools.partial(consume, compute_dv, scratch.d_out))
        pl.when(warpgroup == DK_WARPGROUP)(functools.partial(consume, compute_dk, scratch.q))
        pl.when(warpgroup == PRODUCER)(functools.partial(run, load, registers.producer, "decrease"))

    scratch = plan.scratch(has_separate_ds_factor(options))
    return run_kernel(body, operands, results, scratch, num_ctas=programs_of(lists), warpgroups=CONSUMERS + 1)


# Each role does one work item: ``after = role(ctx, item_index, item, first)`` counts the steps of the CTA.


def load_item(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the producer: loads K and V of a work item, and Q, dO and the statistics of its steps."""
    ctx, work = ctx.in_item(item_index, first), ctx.decode(item)
    b, iterations, refs, rings = work.batch, work.iterations, ctx.operands, ctx.scratch
    kv_head, kv_rows = ctx.parts.key_head(work.key_part), pl.ds(work.kv_start, BLOCK)
    rings.k.load_from_dram(0, refs.key.at[b, kv_rows, kv_head])

    def load_step(step: Scalar, iteration: QueryIteration) -> QueryIteration:
        head, rows = iterations.head(iteration), pl.ds(iterations.q_start(iteration), BLOCK)
        rings.minus_lse.load_from_dram(step, refs.statistics.at[b, head, MINUS_LSE, rows])
        rings.q.load_from_dram(step, refs.query.at[b, rows, head])

        @pl.when(step == 0)
        def _() -> None:
            # Behind K and the first Q, which S needs earlier.
            rings.v.load_from_dram(0, refs.value.at[b, kv_rows, kv_head])

        rings.minus_delta.load_from_dram(step, refs.statistics.at[b, head, MINUS_DELTA, rows])
        rings.d_out.load_from_dram(step, refs.d_out.at[b, rows, head])
        if ctx.bias_tiles is not None:
            coord = TileCoord(b, head, iterations.q_start(iteration), work.kv_start, WIDE_TILE, 0)
            ctx.bias_tiles.load(step, 0, refs.arrays.bias, coord)
        return iterations.after(iteration)

    steps = iterations.total
    lax.fori_loop(0, steps, load_step, iterations.first)
    return first + steps


# Shared by both consumers.


def load_statistic(ring: Ring, step: Scalar) -> jax.Array:
    """Waits for −lse or −delta of a step's queries, and loads it as a tile.

    An async-proxy fence (``commit_smem``) must come before the release of the stage: TMA writes it next.
    """
    ring.load_from_shared(step)
    values = plgpu.load(ring.smem.at[ring.slot(step)], layout=column_layout())
    return lax.broadcast_in_dim(values, WIDE_TILE, [1])


def add_to_dq(
    ctx: WideContext, item: Scalar, iteration: QueryIteration, warpgroup: int, begin: int, dq: jax.Array
) -> None:
    """Adds columns of a step's dQ, from ``begin`` on, to the accumulator by TMA reductions."""
    params, staging, accumulator = ctx.plan.params, ctx.scratch.dq, ctx.operands.dq_accumulator
    assert staging is not None
    assert accumulator is not None
    b, _, _, iterations = ctx.decode(item)
    head, strips = iterations.head(iteration), params.d_query_columns // STRIP
    # In rows of the accumulator, of which a strip of 64 queries takes two.
    first = lax.div(iterations.q_start(iteration) * ctx.plan.head_dim, jnp.int32(ROW))
    count = strips * STRIP * BLOCK // ROW
    for column in range(begin, begin + dq.shape[1], params.d_query_columns):
        buffer = staging.at[warpgroup, column // params.d_query_columns % params.d_query_buffers]
        # The reduction that used this buffer has read it: only the later ones may still be in flight.
        plgpu.wait_smem_to_gmem(params.d_query_buffers - 1, wait_read_only=True)
        store_strips(buffer, dq[:, column - begin : column - begin + strips * STRIP])
        plgpu.commit_smem()
        target = accumulator.at[b, head, pl.ds(first + column * BLOCK // ROW, count)]
        plgpu.copy_smem_to_gmem(buffer.reshape(count, ROW), target, reduction_op="add")


def store_gradient(ring: Ring, step: Scalar, gradient: jax.Array, target: Ref) -> None:
    """Stores dK or dV: by TMA through the stage of the item's last step, parts of sums from registers."""
    if target.dtype == jnp.float32:
        store_unoptimised(target, gradient)
        return
    stage = ring.smem.at[ring.slot(step)]
    stage[...] = gradient.astype(stage.dtype)
    plgpu.commit_smem()
    store_tile(stage, target)


def release_last_stage(ring: Ring) -> None:
    """Releases the stage from which `store_gradient` of the item before stores, when TMA has read it."""

    def release() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(-1)

    when(ring.offset > 0, release)  # unless there is no item before


# The dV warpgroup.


def compute_dv(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the dV warpgroup: S, P, dV and the first columns of dQ."""
    ctx, options = ctx.in_item(item_index, first), ctx.options
    iterations = ctx.decode(item).iterations
    steps = iterations.total
    warpgroup = DvWarpgroup(ctx, item)
    accumulate = functools.partial(warpgroup.accumulate, iterations, steps)
    dv = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, ctx.plan.value_dim), jnp.float32))
    if options.dropout_prob:
        # P lacks the dropout's factor: it is applied to the sum once, not to every tile.
        dv = dv * (1 / (1 - options.dropout_prob))
    # Once the dK warpgroup has released the last P, its last MMA with dO is over, and the stage of dO is free.
    ctx.scratch.p.wait_released(steps - 1)
    b, key_part, kv_start, _ = ctx.decode(item_in_step(item, steps))
    store_gradient(ctx.scratch.d_out, steps - 1, dv, ctx.results.d_value.at[b, pl.ds(kv_start, BLOCK), key_part])
    return first + steps


@dataclasses.dataclass(frozen=True, slots=True)
class DvWarpgroup:
    """The dV warpgroup on its work item.

    Between two steps it keeps ``p``: P as operand A of the next dV, or a 0 where the operand is in shared memory.
    """

    ctx: WideContext
    item: Scalar

    @property
    def hands_over_early(self) -> bool:
        """True if P goes to the dK warpgroup while the MMA for dV is in flight, whose operand is then elsewhere."""
        return self.ctx.p_in_registers or self.ctx.scratch.p_dv is not None

    def accumulate(self, iterations: QueryIterations, steps: Scalar, dv: Ref) -> jax.Array:
        """Sums dV over all steps; returns it without the scale of dropout, and leaves it the last stage of dO."""
        k_ring, fuses_dq = self.ctx.scratch.k, self.ctx.plan.fuses_dq
        k_ring.load_from_shared(0)
        first = pl.run_scoped(functools.partial(self.first_p, iterations), self.ctx.s_accumulator)
        # `compute_dv` has waited for the stage of P in the item before.
        if self.hands_over_early:
            self.hand_over_p(jnp.int32(0), first.ds, released=True)
        p = self.operand_of_dv(jnp.int32(0), first, released=True)
        one = functools.partial(self.one_step, dv)
        last, p = lax.fori_loop(0, steps - 1, one, (iterations.first, p))
        if not fuses_dq:
            k_ring.release(0)  # the last S is complete
        self.issue_dv(steps - 1, p, dv)
        self.add_own_dq(steps - 1, last)
        plgpu.wgmma_wait(0)
        if fuses_dq:
            k_ring.release(0)
        return dv[...]

    def one_step(
        self, dv: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dV and dQ of a step, and P of the next one."""
        iteration, p = carry
        following = self.ctx.decode(item_in_step(self.item, step)).iterations.after(iteration)
        next_p = pl.run_scoped(functools.partial(self.overlapped, step, following, p, dv), self.ctx.s_accumulator)
        if self.hands_over_early:
            # While the MMA for dV is in flight: the dK warpgroup waits for P.
            self.hand_over_p(step + 1, next_p.ds)
        plgpu.wgmma_wait(0)
        if self.ctx.overlaps_next_step:
            self.ctx.scratch.d_out.release(step)
        p = self.operand_of_dv(step + 1, next_p)
        self.add_own_dq(step, iteration)
        return following, p

    def overlapped(self, step: Scalar, following: QueryIteration, p: jax.Array, dv: Ref, s: Ref) -> ProbabilityTiles:
        """Issues S of the next step and dV of this one, and computes the next P beside dV."""
        if self.ctx.overlaps_next_step:
            self.issue_s(step + 1, following, s)
            self.issue_dv(step, p, dv)
            bits = self.draw_bits(step + 1, following)
            s_tile = plgpu.wgmma_accumulator_load(s, wait_n=1)
        else:
            # dV first: its stage of dO is the only one, and the producer waits for it.
            self.issue_dv(step, p, dv)
            self.issue_s(step + 1, following, s)
            bits = self.draw_bits(step + 1, following)
            plgpu.wgmma_wait(1)
            self.ctx.scratch.d_out.release(step)
            s_tile = s[...]
        return self.compute_p(step + 1, following, s_tile, bits)

    def first_p(self, iterations: QueryIterations, s: Ref) -> ProbabilityTiles:
        """P of the first step, with no other MMA in flight."""
        self.issue_s(jnp.int32(0), iterations.first, s)
        bits = self.draw_bits(jnp.int32(0), iterations.first)
        s_tile = s[...]
        release_last_stage(self.ctx.scratch.d_out)
        return self.compute_p(jnp.int32(0), iterations.first, s_tile, bits)

    def draw_bits(self, step: Scalar, iteration: QueryIteration) -> jax.Array | None:
        """The dropout's bits of a step, drawn while an MMA is in flight; None without dropout."""
        item = self.ctx.decode(item_in_step(self.item, step))
        return draw_kept(self.ctx.options, self.ctx.operands.arrays, item.coord(iteration))

    def issue_s(self, step: Scalar, iteration: QueryIteration, s: Ref) -> None:
        """Issues the MMA S = KQᵀ − lse, with a bias of positions."""
        rings, options = self.ctx.scratch, self.ctx.options

        def coord() -> TileCoord:
            return self.ctx.decode(item_in_step(self.item, step)).coord(iteration)

        start = initial_scores(options, self.ctx.operands.arrays, coord)
        if options.plain:
            minus_lse = load_statistic(rings.minus_lse, step)
            start = minus_lse if start is None else start + minus_lse
        if start is not None:
            s[...] = start
        rings.q.load_from_shared(step)
        k = rings.k.smem.at[opaque_zero(step + self.item)]
        mma(s, k, rings.q.get_mma_tile(step, transposed=True))

    def compute_p(
        self, step: Scalar, iteration: QueryIteration, s: jax.Array, bits: jax.Array | None
    ) -> ProbabilityTiles:
        """Computes P from S, possibly with an MMA in flight."""
        ctx, options, dtype = self.ctx, self.ctx.options, self.ctx.plan.dtype
        minus_lse = None
        if not options.plain:
            minus_lse = load_statistic(ctx.scratch.minus_lse, step) * options.multiplier
        item = ctx.decode(item_in_step(self.item, step))
        coord = item.coord(iteration)
        masked = item.iterations.masked(iteration) if ctx.schedule.may_mask else False
        bias = None if ctx.bias_tiles is None else ctx.bias_tiles.read(step, 0, transposed=True)
        p = softmax_tile(s, bits, minus_lse, options, ctx.operands.arrays, coord, masked, dtype, bias)
        # Registers that are an operand must not be written while an MMA is in flight: `one_step` says why.
        return ProbabilityTiles(p.dv if ctx.p_in_registers else p.dv.astype(dtype), p.ds.astype(dtype))

    def hand_over_p(self, step: Scalar, p: jax.Array, released: bool = False) -> None:
        """Stores P to shared memory, for the dK warpgroup.

        Args:
          released: whether the ring's stage is known to be.
        """
        self.ctx.scratch.p.copy_to_shared(step, p, released=released)
        # Behind the async-proxy fence of that store: threads have read −lse, and TMA writes the stage next.
        self.ctx.scratch.minus_lse.release(step)

    def operand_of_dv(self, step: Scalar, p: ProbabilityTiles, released: bool = False) -> jax.Array:
        """Operand A of dV, for the loop to carry; a 0 if it is in shared memory, where it is stored here for both.

        No MMA may be in flight: ptxas serialises wgmma where a later one's operand in registers is made while one is
        in flight (C7513), and in shared memory the one for dV reads what is written here.
        """
        dtype, buffer = self.ctx.plan.dtype, self.ctx.scratch.p_dv
        if self.ctx.p_in_registers:
            # Opaque: else the compiler takes the registers from which P was handed over, before the wait.
            return lax.optimization_barrier(p.dv).astype(dtype)
        if buffer is None:
            # The ring waits for the dK warpgroup alone; this one's MMA for dV has read the stage.
            self.hand_over_p(step, p.dv.astype(dtype), released)
        else:
            buffer[0] = p.dv.astype(dtype)
            plgpu.commit_smem()
        return jnp.int32(0)

    def issue_dv(self, step: Scalar, p: jax.Array, dv: Ref) -> None:
        """Issues the MMA dV += P·dO."""
        d_out_ring, p_ring, buffer = self.ctx.scratch.d_out, self.ctx.scratch.p, self.ctx.scratch.p_dv
        d_out_ring.load_from_shared(step)
        p_smem = (p_ring.smem if buffer is None else buffer).at[0]
        mma(dv, p if self.ctx.p_in_registers else p_smem, d_out_ring.get_mma_tile(step))

    def add_own_dq(self, step: Scalar, iteration: QueryIteration) -> None:
        """Adds the first columns of a step's dQ, unless another kernel computes dQ."""
        ds_ring, split = self.ctx.scratch.ds, self.ctx.plan.d_query_split
        if ds_ring is None:
            return
        ds_ring.load_from_shared(step)
        dq = pl.run_scoped(functools.partial(self.compute_dq, ds_ring, step), plgpu.ACC((BLOCK, split), jnp.float32))
        ds_ring.release(step)
        add_to_dq(self.ctx, item_in_step(self.item, step), iteration, DV_WARPGROUP, 0, dq)

    def compute_dq(self, ds_ring: Ring, step: Scalar, dq: Ref) -> jax.Array:
        """Computes the first columns of dQ = dSᵀ·K."""
        columns = pl.ds(0, self.ctx.plan.d_query_split)
        k = self.ctx.scratch.k.smem.at[opaque_zero(step + self.item), :, columns]
        mma(dq, ds_ring.get_mma_tile(step), k, transpose_a=True)
        return dq[...]


# The dK warpgroup.


def compute_dk(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the dK warpgroup: dP, dS, dK and the rest of dQ's columns."""
    ctx = ctx.in_item(item_index, first)
    iterations = ctx.decode(item).iterations
    steps = iterations.total
    accumulate = functools.partial(DkWarpgroup(ctx, item).accumulate, iterations, steps)
    dk = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, ctx.plan.head_dim), jnp.float32)) * ctx.options.scale
    b, key_part, kv_start, _ = ctx.decode(item_in_step(item, steps))
    # The last S was computed before the last dS: nothing reads the stage of Q any more.
    clear_skipped(ctx, item_in_step(item, steps))
    store_gradient(ctx.scratch.q, steps - 1, dk, ctx.results.d_key.at[b, pl.ds(kv_start, BLOCK), key_part])
    return first + steps


def clear_skipped(ctx: WideContext, item: Scalar) -> None:
    """Stores zeros where the gradient of a bias has tiles that are no steps, unless the array has been cleared."""
    bias_gradient, d_bias, staging = ctx.plan.bias_gradient, ctx.d_bias, ctx.scratch.d_bias
    if not isinstance(bias_gradient, BiasGradient) or ctx.operands.d_bias is not None:
        return
    assert d_bias is not None
    assert staging is not None
    b, _, kv_start, iterations = ctx.decode(item)

    def one(member: Scalar, _: None) -> None:
        coord = TileCoord(b, iterations.first_head + member, 0, kv_start, WIDE_TILE, 1)
        bias_gradient.clear_skipped(d_bias, staging.at[0], ctx.schedule, iterations.row_tile, coord)

    lax.fori_loop(0, iterations.group, one, None)


@dataclasses.dataclass(frozen=True, slots=True)
class DkWarpgroup:
    """The dK warpgroup on its work item.

    Between two steps it keeps ``ds``: dS as operand A of the next dK, or a 0 where the operand is in shared memory.
    """

    ctx: WideContext
    item: Scalar

    @property
    def fuses_dq(self) -> bool:
        return self.ctx.plan.fuses_dq

    @property
    def has_dq_columns(self) -> bool:
        """True if any columns of dQ are left to this warpgroup."""
        return self.fuses_dq and self.ctx.plan.d_query_split < self.ctx.plan.head_dim

    @property
    def dq_accumulator(self) -> object:
        """The type of the accumulator of this warpgroup's columns of dQ."""
        return plgpu.ACC((BLOCK, max(self.ctx.plan.head_dim - self.ctx.plan.d_query_split, 8)), jnp.float32)

    def after(self, step: Scalar, iteration: QueryIteration) -> QueryIteration:
        """The next iteration, from the item decoded anew."""
        return self.ctx.decode(item_in_step(self.item, step)).iterations.after(iteration)

    def after_for_bias(self, step: Scalar, iteration: QueryIteration) -> QueryIteration | None:
        """The next iteration, if the gradient of a bias needs its coordinates."""
        return None if self.ctx.plan.bias_gradient is None else self.after(step, iteration)

    def accumulate(self, iterations: QueryIterations, steps: Scalar, dk: Ref) -> jax.Array:
        """Sums dK over all steps; returns it without the scale, and leaves it the last stage of Q."""
        k_ring, v_ring = self.ctx.scratch.k, self.ctx.scratch.v
        v_ring.load_from_shared(0)
        if self.fuses_dq:
            k_ring.load_from_shared(0)
        if self.ctx.overlaps_next_step:
            first = functools.partial(self.first_ds, iterations)
            ds = self.store_ds_to_smem(jnp.int32(0), pl.run_scoped(first, self.ctx.s_accumulator), iterations.first)
            one_ahead = functools.partial(self.one_step_ahead, dk)
            last, ds = lax.fori_loop(0, steps - 1, one_ahead, (iterations.first, ds))
            v_ring.release(0)  # the last dP is complete
            self.dq_and_dk(steps - 1, last, ds, dk)
        else:
            release_last_stage(self.ctx.scratch.q)
            alone = functools.partial(self.one_step, steps, dk)
            lax.fori_loop(0, steps, alone, (iterations.first, jnp.int32(0)))
            v_ring.release(0)
        if self.fuses_dq:
            k_ring.release(0)
        return dk[...]

    def first_ds(self, iterations: QueryIterations, dp: Ref) -> jax.Array:
        """dS of the first step, with no other MMA in flight."""
        self.issue_dp(jnp.int32(0), dp)
        dp_tile = dp[...]
        release_last_stage(self.ctx.scratch.q)
        return self.compute_ds(jnp.int32(0), iterations.first, dp_tile)

    def one_step_ahead(
        self, dk: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dP of the next step and dK of this one; the next dS is computed beside the latter."""
        iteration, ds = carry
        overlapped = functools.partial(self.overlapped, step, iteration, ds, dk)
        next_ds = pl.run_scoped(overlapped, self.ctx.s_accumulator)
        plgpu.wgmma_wait(0)
        self.ctx.scratch.q.release(step)
        # Before the next dS is stored: the ring has one stage and waits for the dV warpgroup alone, not for this MMA.
        dq = pl.run_scoped(functools.partial(self.dq_alone, step), self.dq_accumulator) if self.has_dq_columns else None
        following = self.after_for_bias(step, iteration)
        ds = self.store_ds_to_smem(step + 1, next_ds, following)
        if dq is not None:
            self.add_own_dq(step, iteration, dq)
        return self.after(step, iteration), ds

    def overlapped(self, step: Scalar, iteration: QueryIteration, ds: jax.Array, dk: Ref, dp: Ref) -> jax.Array:
        """Issues dP of the next step and dK of this one, and computes the next dS beside dK."""
        self.issue_dp(step + 1, dp)
        self.issue_dk(step, ds, dk)
        following = self.after_for_bias(step, iteration)
        dp_tile = plgpu.wgmma_accumulator_load(dp, wait_n=1)
        return self.compute_ds(step + 1, following, dp_tile)

    def one_step(
        self, steps: Scalar, dk: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dP, then dQ and dK of one step; the last one leaves its stage of Q to dK."""
        iteration, _ = carry
        ds = pl.run_scoped(functools.partial(self.ds_alone, step, iteration), self.ctx.s_accumulator)
        self.dq_and_dk(step, iteration, self.store_ds_to_smem(step, ds, iteration), dk)
        pl.when(step < steps - 1)(functools.partial(self.ctx.scratch.q.release, step))
        return self.after(step, iteration), jnp.int32(0)

    def dq_and_dk(self, step: Scalar, iteration: QueryIteration, ds: jax.Array, dk: Ref) -> None:
        """dQ and dK of a step; columns of dQ are added beside the MMA for dK."""

        def overlapped(dq: Ref) -> jax.Array:
            self.issue_dq(step, dq)
            self.issue_dk(step, ds, dk)
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        if self.has_dq_columns:
            self.add_own_dq(step, iteration, pl.run_scoped(overlapped, self.dq_accumulator))
        else:
            self.issue_dk(step, ds, dk)
        plgpu.wgmma_wait(0)

    def issue_dp(self, step: Scalar, dp: Ref) -> None:
        """Issues the MMA dP = VdOᵀ − delta."""
        rings = self.ctx.scratch
        if not self.ctx.options.dropout_prob:
            dp[...] = load_statistic(rings.minus_delta, step)
        rings.d_out.load_from_shared(step)
        v = rings.v.smem.at[opaque_zero(step + self.item)]
        mma(dp, v, rings.d_out.get_mma_tile(step, transposed=True))

    def ds_alone(self, step: Scalar, iteration: QueryIteration, dp: Ref) -> jax.Array:
        """dS of a step, with no other MMA in flight."""
        self.issue_dp(step, dp)
        return self.compute_ds(step, iteration, dp[...])

    def compute_ds(self, step: Scalar, iteration: QueryIteration | None, dp: jax.Array) -> jax.Array:
        """Computes dS from dP, whose MMA is complete, and P; in float32 if deterministic, for the bias."""
        rings, options = self.ctx.scratch, self.ctx.options
        rings.d_out.release(step)
        minus_delta = load_statistic(rings.minus_delta, step) if options.dropout_prob else None
        if not self.fuses_dq:
            plgpu.commit_smem()  # an async-proxy fence between the load of delta and the release of its stage
            rings.minus_delta.release(step)
        rings.p.load_from_shared(step)
        p = plgpu.load(rings.p.smem.at[rings.p.slot(step)], layout=tile_layout()).astype(jnp.float32)
        ds = ds_tile(p, dp, minus_delta, options)
        # No fence: threads have read P, and the dV warpgroup's threads write it next.
        rings.p.release(step)
        if not self.fuses_dq:
            return ds
        self.store_d_bias(step, iteration, ds)
        return ds.astype(self.ctx.plan.dtype)

    def store_ds_to_smem(self, step: Scalar, ds: jax.Array, iteration: QueryIteration | None) -> jax.Array:
        """Stores dS to shared memory, for both MMAs for dQ; returns what the loop carries to dK."""
        ds_ring = self.ctx.scratch.ds
        if ds_ring is None:
            # Here, where no MMA is in flight: rounded for the bias, dS is the next one's operand, too.
            self.store_d_bias(step, iteration, ds)
            return ds.astype(self.ctx.plan.dtype)
        ds_ring.copy_to_shared(step, ds.astype(self.ctx.plan.dtype))
        self.ctx.scratch.minus_delta.release(step)  # behind the async-proxy fence of that store
        return jnp.int32(0)

    def store_d_bias(self, step: Scalar, iteration: QueryIteration | None, ds: jax.Array) -> None:
        """Stores or adds dS as the gradient of a bias, if there is one."""
        bias_gradient, d_bias, staging = self.ctx.plan.bias_gradient, self.ctx.d_bias, self.ctx.scratch.d_bias
        if bias_gradient is None or iteration is None:
            return
        assert d_bias is not None
        coord = self.ctx.decode(item_in_step(self.item, step)).coord(iteration)
        bias_gradient.store(d_bias, None if staging is None else staging.at[0], ds, coord)

    def issue_dk(self, step: Scalar, ds: jax.Array, dk: Ref) -> None:
        """Issues the MMA dK += dS·Q."""
        q_ring, ds_ring = self.ctx.scratch.q, self.ctx.scratch.ds
        q_ring.load_from_shared(step)
        mma(dk, ds if ds_ring is None else ds_ring.get_mma_tile(step), q_ring.get_mma_tile(step))

    def issue_dq(self, step: Scalar, dq: Ref) -> None:
        """Issues the MMA for this warpgroup's columns of dQ = dSᵀ·K."""
        ds_ring, split = self.ctx.scratch.ds, self.ctx.plan.d_query_split
        assert ds_ring is not None
        columns = pl.ds(split, self.ctx.plan.head_dim - split)
        k = self.ctx.scratch.k.smem.at[opaque_zero(step + self.item), :, columns]
        mma(dq, ds_ring.get_mma_tile(step), k, transpose_a=True)

    def dq_alone(self, step: Scalar, dq: Ref) -> jax.Array:
        """This warpgroup's columns of dQ, with no other MMA in flight."""
        self.issue_dq(step, dq)
        return dq[...]

    def add_own_dq(self, step: Scalar, iteration: QueryIteration, dq: jax.Array) -> None:
        """Adds this warpgroup's columns of dQ."""
        split = self.ctx.plan.d_query_split
        add_to_dq(self.ctx, item_in_step(self.item, step), iteration, DK_WARPGROUP, split, dq)
