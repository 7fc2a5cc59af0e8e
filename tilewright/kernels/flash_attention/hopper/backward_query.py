"""dQ on Hopper up to head_dim 128 by a kernel of its own, in a fixed order: the deterministic backward pass.

A work item is a tile of 128 queries of a head; a step is a KV iteration, ``block_k`` keys. A CTA is persistent and has
two consumer warpgroups, which own 64 queries each, and a producer. The kernel also computes delta where dO is at hand,
and stores it for the kernel for dK and dV, which runs afterwards.

======  =============================================  ========================  ======================================
symbol  meaning                                        shape                     where it lives
======  =============================================  ========================  ======================================
Q, dO   queries and gradient of the output             [128, ·_dim]              shared, ``q``, ``d_out``
O       output, for delta                              [128, value_dim]          shared, stages of ``v``
lse     log-sum-exp of the rows, negated               [64] float32              shared, ``statistics``; registers
delta   rowsum(dO ∘ O) − d_lse, negated                [64] float32              registers, global ``statistics``
K, V    keys and values of a step                      [block_k, ·_dim]          shared, ``k``, ``v``
S       QKᵀ                                            [64, block_k] float32     registers, accumulator
P       exp2(multiplier · (S − lse)), 0 where masked   [64, block_k] float32     registers
dP      dO·Vᵀ                                          [64, block_k] float32     registers, accumulator
dS      P ∘ (dP − delta)                               [64, block_k]             registers, operand A of dQ
dQ      sum of dS·K over the steps                     [64, head_dim] float32    registers, accumulator; shared, ``dq``
======  =============================================  ========================  ======================================

An item of T steps; time runs to the right, and what stands below each other overlaps::

    producer        O lse dO Q    K0 V0 K1 V1 ...  (as far ahead as the rings have stages)
    consumer, MMA                 S0 dP0         dQ0    S1 dP1         dQ1  ...
    consumer, ALU   delta              P0   dS0              P1   dS1          dQ -> dq, TMA store

P is computed beside the MMA for dP. The two consumers are not synchronised, so MMAs of one run beside the exponentials
of the other.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.call import BackwardCall, QueryOperands
from tilewright.kernels.flash_attention.hopper.delta import (
    MINUS_DELTA,
    MINUS_LSE,
    minus_delta_of,
    rowsum_of_products,
)
from tilewright.kernels.flash_attention.hopper.dropout import draw_kept, zero_dropped
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS, HopperBackwardParams
from tilewright.kernels.flash_attention.hopper.schedule import Steps, Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    BiasTiles,
    ScoreOptions,
    TileCoord,
    bias_ring,
    biased_and_capped,
    initial_scores,
    masked_logits,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.panels import mma, store_tile
from tilewright.kernels.hopper.ring import Ring, RingPlan
from tilewright.kernels.hopper.schedule import decode_tile_index, operands_of, run_warpgroup
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, row_layout, store_unoptimised
from tilewright.kernels.pallas_types import Ref, Scalar

NUM_STAGES = 2  # of the rings of K and V


class QueryScratch[R, M](NamedTuple):
    """Shared memory of the kernel that computes only dQ: plans of rings and a type or, in the kernel, what they bind.

    Attributes:
      q, d_out, statistics: tiles of a work item.
      k, v: tiles of a step. The ring of V also brings the rows of O, which delta is computed from.
      bias: tiles of a step, of each consumer; None unless the bias passes through shared memory.
      dq: a buffer for each consumer, where its dQ waits for its TMA store.
    """

    q: R
    d_out: R
    statistics: R
    k: R
    v: R
    bias: R | None
    dq: M


@dataclasses.dataclass(frozen=True, slots=True)
class QueryPlan:
    """The shared memory of the kernel that computes only dQ: 128 queries per work item, ``block_k`` keys per step.

    Attributes:
      bias_dtype: of a bias that passes through shared memory, or None.
    """

    block_k: int
    num_stages: int
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    panelled: bool = False
    bias_dtype: DTypeLike | None = None

    @property
    def block_q(self) -> int:
        return CONSUMERS * ROWS

    def _tile(self, rows: int, columns: int) -> SharedTile:
        return SharedTile((rows, columns), self.dtype, panelled=self.panelled)

    def _ring(self, rows: int, columns: int, stages: int) -> RingPlan:
        return RingPlan(self._tile(rows, columns), stages, CONSUMERS)

    def scratch(self) -> QueryScratch[RingPlan, object]:
        """The rings, and the scratch type of the buffer."""
        bias_dtype = self.bias_dtype
        return QueryScratch(
            q=self._ring(self.block_q, self.head_dim, 1),
            d_out=self._ring(self.block_q, self.value_dim, 1),
            statistics=RingPlan(SharedTile((2, self.block_q), jnp.float32, 0), 1, CONSUMERS),
            k=self._ring(self.block_k, self.head_dim, self.num_stages),
            v=self._ring(self.block_k, self.value_dim, self.num_stages),
            bias=None if bias_dtype is None else bias_ring(ROWS, self.block_k, bias_dtype, 1, CONSUMERS),
            dq=self._tile(ROWS, self.head_dim).stack(CONSUMERS),
        )

    @property
    def out_steps(self) -> int:
        """Loads that bring an item's rows of O, through the ring of V."""
        return self.block_q // self.block_k


@dataclasses.dataclass(frozen=True, slots=True)
class QueryContext:
    """All that the roles of the kernel share.

    Attributes:
      group: query heads of a key head.
      d_query: the result.
      warpgroup: index of the calling warpgroup; those of the consumers come first.
    """

    plan: QueryPlan
    options: ScoreOptions
    schedule: TileSchedule
    heads: int
    group: int
    operands: QueryOperands[Ref, tuple[Ref, Ref]]
    d_query: Ref
    scratch: QueryScratch[Ring, Ref]
    warpgroup: Scalar

    @property
    def bias_tiles(self) -> BiasTiles | None:
        """The tiles of a bias that passes through shared memory."""
        return None if self.scratch.bias is None else BiasTiles(self.scratch.bias, CONSUMERS)

    @property
    def s_shape(self) -> tuple[int, int]:
        """Shape of a consumer's tile of S, ``[queries, keys]``."""
        return ROWS, self.plan.block_k

    def decode(self, item: Scalar) -> tuple[jax.Array, jax.Array, jax.Array, Steps]:
        """Batch element, head, tile of queries and steps of a work item."""
        b, h, q_tile = decode_tile_index(item, self.schedule.extent.row_tiles, self.heads)
        return b, h, q_tile, self.schedule.steps(self.operands.tables, b, h, q_tile)

    def v_ring_step(self, item_index: Scalar, first: Scalar, number: Scalar) -> Scalar:
        """Index of a load in the ring of V: before it ``item_index`` items loaded O, and their steps ``first`` tiles.

        Args:
          number: of the load among those of O, or, with the index of the next item, the step within this one.
        """
        return first + item_index * self.plan.out_steps + number


def query_kernel(
    call: BackwardCall[HopperBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: tuple[np.ndarray, np.ndarray],
    block_k: int,
) -> jax.Array:
    """Computes dQ, and completes ``call.statistics``; ``lists`` are over tiles of 128 queries."""
    heads, kv_heads = call.query.shape[2], call.value.shape[2]
    plan = QueryPlan(block_k, NUM_STAGES, *call.padded_dims, call.query.dtype, call.panelled, call.bias_dtype)
    options = call.options
    operands = QueryOperands[object, object](
        *call.operands, call.out, call.statistics, operands_of(lists), tables, call.arrays
    )

    def body(operands: QueryOperands[Ref, tuple[Ref, Ref]], d_query: Ref, scratch: QueryScratch[Ring, Ref]) -> None:
        warpgroup, group = lax.axis_index("warpgroup"), heads // kv_heads
        ctx = QueryContext(plan, options, schedule, heads, group, operands, d_query, scratch, warpgroup)
        run = functools.partial(run_warpgroup, operands.items)
        consume, load = functools.partial(consume_item, ctx), functools.partial(load_item, ctx)
        # The producer's setmaxnreg must run, too: the consumers' increase blocks until it has given up registers.
        registers = REGISTERS[CONSUMERS]
        pl.when(warpgroup < CONSUMERS)(functools.partial(run, consume, registers.consumer, "increase"))
        pl.when(warpgroup == CONSUMERS)(functools.partial(run, load, registers.producer, "decrease"))

    out_type = jax.ShapeDtypeStruct(call.query.shape, call.query.dtype)
    return run_kernel(
        body, operands, out_type, plan.scratch(), role="d_query", num_ctas=len(lists[0]) - 1, warpgroups=CONSUMERS + 1
    )


# Each role does one work item: ``after = role(ctx, item_index, item, first)`` counts the steps of the CTA.


def load_item(ctx: QueryContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Producer: loads O, the statistics, dO and Q of a work item, and K and V of its steps."""
    b, h, q_tile, steps = ctx.decode(item)
    kv_head = lax.div(h, jnp.int32(ctx.group))
    block_q, block_k, refs, rings = ctx.plan.block_q, ctx.plan.block_k, ctx.operands, ctx.scratch
    rows = pl.ds(q_tile * block_q, block_q)
    # In the order in which the consumers need them: O, the statistics and dO for delta, then Q.
    for number in range(ctx.plan.out_steps):
        out_rows = pl.ds(q_tile * block_q + number * block_k, block_k)
        rings.v.load_from_dram(ctx.v_ring_step(item_index, first, number), refs.out.at[b, out_rows, h])
    rings.statistics.load_from_dram(item_index, refs.statistics.at[b, h, :, rows])
    rings.d_out.load_from_dram(item_index, refs.d_out.at[b, rows, h])
    rings.q.load_from_dram(item_index, refs.query.at[b, rows, h])

    def load_step(number: Scalar, _: None) -> None:
        kv_rows = pl.ds(steps.tile(number) * block_k, block_k)
        rings.k.load_from_dram(first + number, refs.key.at[b, kv_rows, kv_head])
        v_step = ctx.v_ring_step(item_index + 1, first, number)
        rings.v.load_from_dram(v_step, refs.value.at[b, kv_rows, kv_head])
        if ctx.bias_tiles is not None:
            for consumer in range(CONSUMERS):
                q_start = q_tile * block_q + consumer * ROWS
                coord = TileCoord(b, h, q_start, steps.tile(number) * block_k, ctx.s_shape, 0)
                ctx.bias_tiles.load(first + number, consumer, refs.arrays.bias, coord)

    lax.fori_loop(0, steps.total, load_step, None)
    return first + steps.total


def consume_item(ctx: QueryContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Consumer: computes dQ of its 64 queries of a work item, and stores it."""
    b, h, q_tile, steps = ctx.decode(item)
    own_rows = pl.ds(ctx.warpgroup * ROWS, ROWS)
    q_start = q_tile * ctx.plan.block_q + ctx.warpgroup * ROWS
    tile = QueryTile(ctx, item_index, item, first, b, h, q_start, own_rows, steps)
    accumulator = plgpu.ACC((ROWS, ctx.plan.head_dim), jnp.float32)
    dq = pl.run_scoped(functools.partial(accumulate_dq, tile), accumulator)
    buffer = ctx.scratch.dq.at[ctx.warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the item before has read the buffer
    buffer[...] = (dq * ctx.options.scale).astype(ctx.plan.dtype)
    plgpu.commit_smem()
    # Behind that async-proxy fence: threads have read the slot, and TMA writes it next.
    ctx.scratch.statistics.release(item_index)
    store_tile(buffer, ctx.d_query.at[b, pl.ds(q_start, ROWS), h])
    return first + steps.total


@dataclasses.dataclass(frozen=True, slots=True)
class QueryTile:
    """The 64 queries of a work item that a consumer owns."""

    ctx: QueryContext
    item_index: Scalar
    item: Scalar
    first: Scalar  # the item's first step, among all of the CTA
    batch: Scalar
    head: Scalar
    q_start: Scalar
    own_rows: pl.Slice  # in the item's tiles of Q and dO
    steps: Steps


def complete_delta(tile: QueryTile, minus_lse: jax.Array, d_lse: jax.Array) -> jax.Array:
    """Computes −delta of a consumer's rows, and stores it for the kernel for dK and dV."""
    ctx, v_ring, d_out_ring = tile.ctx, tile.ctx.scratch.v, tile.ctx.scratch.d_out
    # Each consumer has to release every stage, although it may read only one.
    steps = [ctx.v_ring_step(tile.item_index, tile.first, number) for number in range(ctx.plan.out_steps)]
    for step in steps:
        v_ring.load_from_shared(step)
    if ctx.plan.out_steps == 1:
        out = v_ring.smem.at[v_ring.slot(steps[0]), tile.own_rows]
    else:  # a load brings 64 rows: those of one consumer
        out = v_ring.smem.at[v_ring.slot(ctx.v_ring_step(tile.item_index, tile.first, ctx.warpgroup))]
    rowsum = rowsum_of_products(out, d_out_ring.smem.at[0, tile.own_rows], d_out_ring.plan.tile)
    minus_delta = minus_delta_of(minus_lse, d_lse, rowsum)
    plgpu.commit_smem()  # an async-proxy fence: threads have read the stages of O, and TMA writes them next
    for step in steps:
        v_ring.release(step)
    rows = pl.ds(tile.q_start, ROWS)
    store_unoptimised(ctx.operands.statistics.at[tile.batch, tile.head, MINUS_DELTA, rows], minus_delta)
    return minus_delta


def accumulate_dq(tile: QueryTile, dq: Ref) -> jax.Array:
    """Sums dQ over the steps of a work item; returns it without the scale."""
    ctx, rings = tile.ctx, tile.ctx.scratch
    rings.statistics.load_from_shared(tile.item_index)
    rings.d_out.load_from_shared(tile.item_index)
    minus_lse, d_lse = (
        plgpu.load(rings.statistics.smem.at[0, row, tile.own_rows], layout=row_layout())
        for row in (MINUS_LSE, MINUS_DELTA)
    )
    minus_delta = complete_delta(tile, minus_lse, d_lse)
    statistics = StatisticTiles(*(lax.broadcast_in_dim(row, ctx.s_shape, [0]) for row in (minus_lse, minus_delta)))
    # Q last: delta needs O and dO only, and is computed while Q is on its way.
    rings.q.load_from_shared(tile.item_index)

    def one(number: Scalar, _: None) -> None:
        k_step = tile.first + number
        v_step = ctx.v_ring_step(tile.item_index + 1, tile.first, number)
        zero = opaque_zero(k_step + tile.item)
        kv_start = tile.steps.tile(number) * ctx.plan.block_k
        coord = TileCoord(tile.batch, tile.head, tile.q_start, kv_start, ctx.s_shape, 0)
        compute = functools.partial(compute_ds, tile, KeyStep(number, k_step, v_step, zero, coord), statistics)
        accumulator = plgpu.ACC(ctx.s_shape, jnp.float32)
        ds = pl.run_scoped(compute, accumulator, accumulator)
        # No other MMA of this consumer runs beside it. The two consumers are not in step, so the other's arithmetic
        # does.
        mma(dq, ds, rings.k.get_mma_tile(k_step))
        # K is an operand of S and of dQ, so its stage is free only after both.
        plgpu.wgmma_wait(0)
        rings.k.release(k_step)

    lax.fori_loop(0, tile.steps.total, one, None)
    rings.q.release(tile.item_index)
    rings.d_out.release(tile.item_index)
    return dq[...]


class StatisticTiles(NamedTuple):
    """The statistics of a consumer's rows as tiles ``[64, block_k]``."""

    minus_lse: jax.Array
    minus_delta: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class KeyStep:
    """A step of a work item: one tile of keys."""

    number: Scalar  # within the item
    k_step: Scalar  # in the ring of K
    v_step: Scalar  # in the ring of V
    zero: Scalar  # unknown to the compiler
    coord: TileCoord  # of S


def compute_ds(tile: QueryTile, step: KeyStep, statistics: StatisticTiles, s: Ref, dp: Ref) -> jax.Array:
    """Computes dS of a step, P beside the MMA for dP."""
    ctx, options, rings = tile.ctx, tile.ctx.options, tile.ctx.scratch
    # Indexed by an opaque zero: else the compiler hoists wgmma's descriptors for Q and dO out of the loop, and spills.
    q, d_out = rings.q.smem.at[step.zero, tile.own_rows], rings.d_out.smem.at[step.zero, tile.own_rows]
    start = initial_scores(options, ctx.operands.arrays, lambda: step.coord)
    if start is not None:
        s[...] = start
    rings.k.load_from_shared(step.k_step)
    mma(s, q, rings.k.get_mma_tile(step.k_step, transposed=True))
    rings.v.load_from_shared(step.v_step)
    mma(dp, d_out, rings.v.get_mma_tile(step.v_step, transposed=True))
    # Waits only for S: P is computed while the MMA for dP is in flight.
    bits = draw_kept(options, ctx.operands.arrays, step.coord)
    logits, tanh = plgpu.wgmma_accumulator_load(s, wait_n=1), None
    if not options.plain:
        bias = None if ctx.bias_tiles is None else ctx.bias_tiles.read(step.k_step, ctx.warpgroup)
        logits, tanh = biased_and_capped(logits, options, ctx.operands.arrays, step.coord, bias)
    logits = (logits + statistics.minus_lse) * options.multiplier
    # A fully masked row has −lse = −∞, so its P is 0 in steps without a mask, too.
    masked = step.number < tile.steps.masked if ctx.schedule.may_mask else False
    logits = masked_logits(logits, masked, options, ctx.operands.arrays, step.coord)
    p = jnp.exp2(logits)
    dp_tile = plgpu.wgmma_accumulator_load(dp, wait_n=0)
    rings.v.release(step.v_step)
    # Applied to dP, not to P: softmax comes before the dropout.
    if bits is not None:
        dp_tile = zero_dropped(dp_tile, bits, step.coord) * (1 / (1 - options.dropout_prob))
    ds = p * (dp_tile + statistics.minus_delta)
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)
    return ds.astype(ctx.plan.dtype)
