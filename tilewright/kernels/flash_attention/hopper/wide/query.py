"""dQ on Hopper where a head dim is beyond 128, by a kernel of its own, in a fixed order: the deterministic backward.

A work item, one per CTA, is a tile of 128 queries of a head; a step is a KV iteration, 64 keys. Two consumer warpgroups
own 64 queries each; the third is the producer. The kernel also computes delta where dO is at hand, and stores it for
the kernel for dK and dV, which runs afterwards.

======  ============================================  =======================  =========================================
symbol  meaning                                       shape                    where it lives
======  ============================================  =======================  =========================================
Q, dO   queries and gradient of the output            [64, ·_dim]              shared, ``q`` and ``d_out``: a stage for
                                                                               each consumer
O       output, for delta                             [64, value_dim]          shared, stages of ``k`` or ``v``
lse     log-sum-exp of the rows, negated              [64] float32             global; registers if they suffice
delta   rowsum(dO ∘ O) − d_lse, negated               [64] float32             global; registers if they suffice
K, V    keys and values of a step                     [64, ·_dim]              shared, ``k``, ``v``
S       QKᵀ                                           [64, 64] float32         registers, accumulator
P       exp2(multiplier · (S − lse)), 0 where masked  [64, 64]                 registers
dP      dO·Vᵀ − delta                                 [64, 64] float32         registers, accumulator
dS      P ∘ dP                                        [64, 64]                 registers, operand A of dQ
dQ      sum of dS·K over the steps                    [64, head_dim] float32   registers, accumulator; shared, ``q``
======  ============================================  =======================  =========================================

Step i without mask, bias, soft cap and dropout (``WideQueryContext.overlaps``); what stands below each other overlaps::

    producer        K(i+2) V(i+2)     (as far ahead as the rings have stages)
    consumer, MMA   S(i+1) dP(i+1)    dQ(i)             S(i+2) dP(i+2)    dQ(i+1)  ...
    consumer, ALU                     P(i+1) dS(i+1)                      P(i+2) dS(i+2)

All three MMAs are in flight at once; P waits only for S, dS for S and dP. Steps that need a mask have no MMA of
another step beside them. With bias, soft cap or dropout S and dP come one after the other, in the same registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.call import BackwardCall, QueryOperands
from tilewright.kernels.flash_attention.hopper.delta import (
    MINUS_DELTA,
    MINUS_LSE,
    load_row_statistic,
    minus_delta_of,
    rowsum_of_products,
)
from tilewright.kernels.flash_attention.hopper.dropout import draw_kept
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS, WideBackwardParams
from tilewright.kernels.flash_attention.hopper.schedule import Steps, Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import BiasTiles, ScoreOptions, TileCoord, initial_scores
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE, WideBackwardPlan, WideQueryScratch
from tilewright.kernels.flash_attention.hopper.wide.scores import ds_tile, item_in_step, softmax_tile
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.panels import mma, store_tile
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.tiles import opaque_zero, store_unoptimised
from tilewright.kernels.pallas_types import Condition, Ref, Scalar


class WideQueryRings(NamedTuple):
    """The rings as the roles use them; ``out`` has the stages of ``k`` or ``v``, for the loads before those."""

    q: Ring
    d_out: Ring
    out: Ring
    k: Ring
    v: Ring
    bias: BiasTiles | None


class WideQueryItem(NamedTuple):
    """A decoded work item: a tile of 128 queries of a head."""

    batch: Scalar
    head: Scalar
    q_start: Scalar
    steps: Steps


@dataclasses.dataclass(frozen=True, slots=True)
class WideQueryContext:
    """All that the roles of the kernel share.

    Attributes:
      group: query heads of a key head.
      d_query: the result.
      warpgroup: index of the calling warpgroup; those of the consumers come first.
    """

    plan: WideBackwardPlan
    options: ScoreOptions
    schedule: TileSchedule
    heads: int
    group: int
    operands: QueryOperands[Ref, Ref]
    d_query: Ref
    rings: WideQueryRings
    warpgroup: Scalar

    @property
    def overlaps(self) -> bool:
        """True if S and dP are in flight together: bias, soft cap and dropout take the registers of a second tile."""
        return self.options.plain and not self.options.dropout_prob

    @property
    def s_accumulator(self) -> object:
        """The type of the accumulator of S or dP."""
        return plgpu.ACC(WIDE_TILE, jnp.float32)

    def current_item(self) -> jax.Array:
        """The work item of the CTA."""
        return self.operands.items[lax.axis_index("program")]

    def decode(self, item: Scalar) -> WideQueryItem:
        """Decodes a work item: anew in each step where that saves registers (`item_in_step`)."""
        b, h, q_tile = decode_tile_index(item, self.schedule.extent.row_tiles, self.heads)
        q_start = q_tile * self.plan.params.query_rows
        return WideQueryItem(b, h, q_start, self.schedule.steps(self.operands.tables, b, h, q_tile))


def wide_query_kernel(
    call: BackwardCall[WideBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    order: jax.Array,
) -> jax.Array:
    """Computes dQ, and completes ``call.statistics``.

    Args:
      schedule: of rows of ``query_rows`` and columns of ``block_k``.
      order: ``program_order`` over tiles of ``query_rows``.
    """
    batch, _, heads, _ = call.query.shape
    kv_heads, options = call.value.shape[2], call.options
    plan = WideBackwardPlan(
        call.params, *call.padded_dims, call.query.dtype, panelled=call.panelled, bias_dtype=call.bias_dtype
    )
    operands = QueryOperands[object, object](*call.operands, call.out, call.statistics, order, tables, call.arrays)

    def body(operands: QueryOperands[Ref, Ref], d_query: Ref, scratch: WideQueryScratch[Ring]) -> None:
        rings = bind_out_ring(scratch)
        warpgroup, group = lax.axis_index("warpgroup"), heads // kv_heads
        ctx = WideQueryContext(plan, options, schedule, heads, group, operands, d_query, rings, warpgroup)
        # One item for each CTA: persistent CTAs would gain 0.7 µs an item (docs/notes/hopper_attention.md).
        pl.when(warpgroup < CONSUMERS)(functools.partial(compute_dq, ctx))
        pl.when(warpgroup == CONSUMERS)(functools.partial(load_tiles, ctx))

    out_type = jax.ShapeDtypeStruct(call.query.shape, call.query.dtype)
    num_ctas = batch * heads * schedule.extent.row_tiles
    return run_kernel(
        body, operands, out_type, plan.query_scratch(), role="d_query", num_ctas=num_ctas, warpgroups=CONSUMERS + 1
    )


def bind_out_ring(scratch: WideQueryScratch[Ring]) -> WideQueryRings:
    """Lets O come first through the ring of K, which has two stages at least, or of V if only that has its shape."""
    q, d_out, k, v, bias = scratch
    tiles = None if bias is None else BiasTiles(bias, CONSUMERS)
    if k.plan.tile == v.plan.tile:
        # The loads of O count as the first ones of the ring, so the steps of K or V begin behind them.
        return WideQueryRings(q, d_out, k, dataclasses.replace(k, offset=CONSUMERS), v, tiles)
    return WideQueryRings(q, d_out, v, k, dataclasses.replace(v, offset=CONSUMERS), tiles)


def load_tiles(ctx: WideQueryContext) -> None:
    """Role of the producer: loads dO, O and Q of the item, and K and V of its steps."""
    plgpu.set_max_registers(REGISTERS[CONSUMERS].producer, action="decrease")
    b, h, q_start, steps = ctx.decode(ctx.current_item())
    kv_head = lax.div(h, jnp.int32(ctx.group))
    rings, refs = ctx.rings, ctx.operands

    def load_rows(ring: Ring, ref: Ref) -> None:
        for i in range(CONSUMERS):
            ring.load_from_dram(i, ref.at[b, pl.ds(q_start + i * BLOCK, BLOCK), h])

    def load_step(step: Scalar, _: None) -> None:
        kv_rows = pl.ds(steps.tile(step) * BLOCK, BLOCK)
        rings.k.load_from_dram(step, refs.key.at[b, kv_rows, kv_head])
        rings.v.load_from_dram(step, refs.value.at[b, kv_rows, kv_head])
        if rings.bias is not None:
            for consumer in range(CONSUMERS):
                coord = TileCoord(b, h, q_start + consumer * BLOCK, steps.tile(step) * BLOCK, WIDE_TILE, 0)
                rings.bias.load(step, consumer, refs.arrays.bias, coord)

    # In the order in which the consumers need them: dO and O for delta, then Q.
    load_rows(rings.d_out, refs.d_out)
    load_rows(rings.out, refs.out)
    load_rows(rings.q, refs.query)
    lax.fori_loop(0, steps.total, load_step, None)


def compute_dq(ctx: WideQueryContext) -> None:
    """Role of a consumer: delta and dQ of its 64 queries."""
    plgpu.set_max_registers(REGISTERS[CONSUMERS].consumer, action="increase")
    item = ctx.current_item()
    steps = ctx.decode(item).steps
    # Before Q is waited for: delta needs O and dO only.
    complete_delta(ctx, item)
    # In registers where these suffice; with bias, cap or dropout they are loaded again in each step.
    statistics = None
    if ctx.overlaps:
        minus_lse = load_own_statistic(ctx, MINUS_LSE, item) * ctx.options.multiplier
        statistics = RowStatistics(minus_lse, load_own_statistic(ctx, MINUS_DELTA, item))
    accumulate = functools.partial(DqWarpgroup(ctx, item, statistics).accumulate, steps)
    dq = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, ctx.plan.head_dim), jnp.float32)) * ctx.options.scale
    # Through the stage of Q, which no MMA reads any more.
    stage = ctx.rings.q.smem.at[ctx.warpgroup]
    stage[...] = dq.astype(ctx.plan.dtype)
    plgpu.commit_smem()
    b, h, q_start, _ = ctx.decode(item_in_step(item, steps.total))
    rows = pl.ds(q_start + ctx.warpgroup * BLOCK, BLOCK)
    store_tile(stage, ctx.d_query.at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)


def load_own_statistic(ctx: WideQueryContext, row: int, item: Scalar) -> jax.Array:
    """Loads a statistic of a consumer's queries from global memory."""
    b, h, q_start, _ = ctx.decode(item)
    rows = pl.ds(q_start + ctx.warpgroup * BLOCK, BLOCK)
    return load_row_statistic(ctx.operands.statistics, b, h, row, rows)


def complete_delta(ctx: WideQueryContext, item: Scalar) -> None:
    """Computes −delta of a consumer's rows, and stores it."""
    rings = ctx.rings
    rings.d_out.load_from_shared(ctx.warpgroup)
    # Both consumers pass both stages of O, because each has to release every stage; it reads only its own.
    for i in range(CONSUMERS):
        rings.out.load_from_shared(i)

        def store(i: int = i) -> None:
            b, h, q_start, _ = ctx.decode(item)
            out = rings.out.smem.at[rings.out.slot(i)]
            rowsum = rowsum_of_products(out, rings.d_out.smem.at[i], rings.d_out.plan.tile)
            minus_lse, d_lse = (load_own_statistic(ctx, row, item) for row in (MINUS_LSE, MINUS_DELTA))
            minus_delta = minus_delta_of(minus_lse, d_lse, rowsum)
            rows = pl.ds(q_start + i * BLOCK, BLOCK)
            store_unoptimised(ctx.operands.statistics.at[b, h, MINUS_DELTA, rows], minus_delta)

        pl.when(ctx.warpgroup == i)(store)
        plgpu.commit_smem()  # an async-proxy fence: threads have read the stage, and TMA writes it next
        rings.out.release(i)


class RowStatistics(NamedTuple):
    """The statistics of a consumer's rows, in registers."""

    minus_lse: jax.Array  # in base 2
    minus_delta: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class DqWarpgroup:
    """A consumer on its work item."""

    ctx: WideQueryContext
    item: Scalar
    statistics: RowStatistics | None  # None where registers are short: they are loaded in each step instead

    def accumulate(self, steps: Steps, dq: Ref) -> jax.Array:
        """Sums dQ over all steps; returns it without the scale."""
        may_mask, k_ring = self.ctx.schedule.may_mask, self.ctx.rings.k
        self.ctx.rings.q.load_from_shared(self.ctx.warpgroup)
        if not self.ctx.overlaps:
            lax.fori_loop(0, steps.total, lambda step, _: self.one_step(dq, step, self.needs_mask(step)), None)
            return dq[...]
        begin: Scalar = jnp.int32(0)
        if may_mask:
            # Masked steps do not overlap: they would need more registers than there are.
            begin = jnp.maximum(steps.masked - 1, 0)
            lax.fori_loop(0, begin, lambda step, _: self.one_step(dq, step, True), None)
        # The last masked step, or else step 0, whose mask then masks nothing. No later step needs a mask.
        ds = self.ds_alone(begin, may_mask)
        ds = lax.fori_loop(begin, steps.total - 1, functools.partial(self.one_step_ahead, dq), ds)
        # The last dQ has no next step to run beside.
        self.issue_dq(steps.total - 1, ds, dq)
        plgpu.wgmma_wait(0)
        k_ring.release(steps.total - 1)
        return dq[...]

    def one_step(self, dq: Ref, step: Scalar, masked: Condition) -> None:
        """dS, then dQ of one step."""
        self.issue_dq(step, self.ds_alone(step, masked), dq)
        plgpu.wgmma_wait(0)
        self.ctx.rings.k.release(step)

    def one_step_ahead(self, dq: Ref, step: Scalar, ds: jax.Array) -> jax.Array:
        """dQ of a step, and beside it dS of the next one, which is not masked."""
        issue_dq = functools.partial(self.issue_dq, step, ds, dq)
        overlapped = functools.partial(self.compute_ds, step + 1, False, issue_dq)
        next_ds = pl.run_scoped(overlapped, self.ctx.s_accumulator, self.ctx.s_accumulator)
        plgpu.wgmma_wait(0)
        self.ctx.rings.k.release(step)
        # Not before that wait: ptxas serialises wgmma where a later one's operand in registers is made while one is in
        # flight (C7513).
        return next_ds.astype(self.ctx.plan.dtype)

    def needs_mask(self, step: Scalar) -> Condition:
        """True if a step's tile needs the mask."""
        if not self.ctx.schedule.may_mask:
            return False
        return step < self.ctx.decode(item_in_step(self.item, step)).steps.masked

    def ds_alone(self, step: Scalar, masked: Condition) -> jax.Array:
        """dS of a step, with no MMA of another step in flight."""
        # S and dP at once want more registers than a mask leaves.
        if not self.ctx.overlaps or masked:
            return self.compute_ds_in_turn(step, masked).astype(self.ctx.plan.dtype)
        compute = functools.partial(self.compute_ds, step, masked, None)
        return pl.run_scoped(compute, self.ctx.s_accumulator, self.ctx.s_accumulator).astype(self.ctx.plan.dtype)

    def compute_ds(
        self, step: Scalar, masked: Condition, issue_dq: Callable[[], None] | None, s: Ref, dp: Ref
    ) -> jax.Array:
        """Computes dS in float32, with the MMAs for S and dP in flight together.

        Args:
          issue_dq: issues another MMA, which is still in flight afterwards.
        """
        # −delta is added by the MMA, not behind it.
        dp[...] = self.load_minus_delta(step)
        self.issue_s(step, s)
        self.issue_dp(step, dp)
        if issue_dq is not None:
            issue_dq()
        # S first, then dP: P is computed while the MMAs for dP and dQ are in flight.
        behind = 0 if issue_dq is None else 1
        p = self.compute_p(plgpu.wgmma_accumulator_load(s, wait_n=behind + 1), None, step, masked)
        dp_tile = plgpu.wgmma_accumulator_load(dp, wait_n=behind)
        self.ctx.rings.v.release(step)
        return p * dp_tile

    def compute_ds_in_turn(self, step: Scalar, masked: Condition) -> jax.Array:
        """Computes dS in float32, with S and then dP in the same registers."""
        options = self.ctx.options

        def first(s: Ref) -> jax.Array:
            self.issue_s(step, s)
            bits = draw_kept(options, self.ctx.operands.arrays, self.coord(step))
            return self.compute_p(s[...], bits, step, masked)

        def second(dp: Ref) -> jax.Array:
            if not options.dropout_prob:
                dp[...] = self.load_minus_delta(step)
            self.issue_dp(step, dp)
            dp_tile = dp[...]
            self.ctx.rings.v.release(step)
            return dp_tile

        p = pl.run_scoped(first, self.ctx.s_accumulator)
        dp = pl.run_scoped(second, self.ctx.s_accumulator)
        return ds_tile(p, dp, self.load_minus_delta(step) if options.dropout_prob else None, options)

    def issue_s(self, step: Scalar, s: Ref) -> None:
        """Issues the MMA S = QKᵀ."""
        ctx, rings = self.ctx, self.ctx.rings
        start = initial_scores(ctx.options, ctx.operands.arrays, functools.partial(self.coord, step))
        if start is not None:
            s[...] = start
        rings.k.load_from_shared(step)
        q = rings.q.smem.at[self.ctx.warpgroup + opaque_zero(step + self.item)]
        mma(s, q, rings.k.get_mma_tile(step, transposed=True))

    def issue_dp(self, step: Scalar, dp: Ref) -> None:
        """Issues the MMA dP += dO·Vᵀ."""
        rings = self.ctx.rings
        rings.v.load_from_shared(step)
        d_out = rings.d_out.smem.at[self.ctx.warpgroup + opaque_zero(step + self.item)]
        mma(dp, d_out, rings.v.get_mma_tile(step, transposed=True))

    def issue_dq(self, step: Scalar, ds: jax.Array, dq: Ref) -> None:
        """Issues the MMA dQ += dS·K."""
        mma(dq, ds, self.ctx.rings.k.get_mma_tile(step))

    def coord(self, step: Scalar) -> TileCoord:
        """Coordinates of S of a step."""
        b, h, q_start, steps = self.ctx.decode(item_in_step(self.item, step))
        return TileCoord(b, h, q_start + self.ctx.warpgroup * BLOCK, steps.tile(step) * BLOCK, WIDE_TILE, 0)

    def compute_p(self, s: jax.Array, bits: jax.Array | None, step: Scalar, masked: Condition) -> jax.Array:
        """Computes P from S, as a factor of dS."""
        ctx, coord, minus_lse = self.ctx, self.coord(step), self.load_minus_lse(step)
        bias = None if ctx.rings.bias is None else ctx.rings.bias.read(step, ctx.warpgroup)
        arrays, dtype = ctx.operands.arrays, ctx.plan.dtype
        return softmax_tile(s, bits, minus_lse, ctx.options, arrays, coord, masked, dtype, bias).ds

    def load_minus_lse(self, step: Scalar) -> jax.Array:
        """−lse in base 2, as a tile."""
        if self.statistics is not None:
            return _as_tile(self.statistics.minus_lse)
        minus_lse = load_own_statistic(self.ctx, MINUS_LSE, item_in_step(self.item, step))
        return _as_tile(minus_lse * self.ctx.options.multiplier)

    def load_minus_delta(self, step: Scalar) -> jax.Array:
        """−delta, as a tile."""
        if self.statistics is not None:
            return _as_tile(self.statistics.minus_delta)
        return _as_tile(load_own_statistic(self.ctx, MINUS_DELTA, item_in_step(self.item, step)))


def _as_tile(rows: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(rows, WIDE_TILE, [0])
