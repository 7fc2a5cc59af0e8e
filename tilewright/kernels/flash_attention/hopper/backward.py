"""The backward pass on Hopper up to head_dim 128: dK, dV and dQ in one kernel, or dQ by ``backward_query``.

A work item is a tile of 128 keys of a key head. A CTA (a Pallas program) is persistent and has two consumer
warpgroups, which own 64 keys of dK and dV each, a producer warpgroup, and a dQ warpgroup (``backward_dq``). A step is a
tile of ``block_q`` queries that attend to the keys, of one of the query heads that share them.

S and dP are computed transposed, ``[keys, queries]``, so that P and dS are register operands of the MMAs for dV and dK.
Only dS goes through shared memory, to the dQ warpgroup, which computes dQ without delaying the consumers and adds it by
TMA reductions in float32, in the order in which CTAs finish. Without it (``deterministic``) ``query_kernel`` computes
dQ in a fixed order.

======  ====================================================  ============================  ============================
symbol  meaning                                               shape                         where it lives
======  ====================================================  ============================  ============================
K, V    keys and values of a work item                        [128, ·_dim]                  shared, ``k``, ``v``
Q, dO   queries and gradient of the output, of a step         [block_q, ·_dim]              shared, ``q``, ``d_out``
lse     log-sum-exp of the rows; −lse starts S                [block_q] float32             shared, ``statistics``
delta   rowsum(dO ∘ O) − d_lse; −delta starts dP              [block_q] float32             shared, ``statistics``
S       KQᵀ − lse, in the unit of ``options.multiplier``      [64, block_q] float32         registers, accumulator
P       exp2(multiplier · S), 0 where masked                  [64, block_q]                 registers, operand A of dV
dP      VdOᵀ − delta                                          [64, 64] float32              registers, accumulator
dS      P ∘ dP, for 64 queries at a time                      [64, 64]                      registers, operand A of dK;
                                                                                            shared, ``ds``
dV      sum of P·dO over the steps                            [64, value_dim] float32       registers, accumulator
dK      sum of dS·Q over the steps                            [64, head_dim] float32        registers, accumulator
dQ      dSᵀ·K of a step                                       [64, ≤ 64] float32            registers, accumulator;
                                                                                            shared, ``dq``
        its sum, the dQ accumulator                           ``dq_accumulator_shape``      global
======  ====================================================  ============================  ============================

Step i, with ``block_q`` 64; time runs to the right, and what stands below each other overlaps::

    producer        Q(i+1) lse dO(i+1)  (as far ahead as the rings have stages)
    consumer, MMA   ... S(i)         dP(i) dV(i)          dK(i) S(i+1)            dP(i+1) dV(i+1)  ...
    consumer, ALU           P(i)           dS(i)          dS(i) -> ds     P(i+1)         dS(i+1)
    dQ warpgroup    ... add dQ(i-2)     dQ(i-1) -> dq, add dQ(i-1)     dQ(i) -> dq, add dQ(i)  ...

dS waits only for dP, so it is computed beside the MMA for dV. Where registers do not suffice for S of the next step
beside dK (``KeyValueContext.overlaps_next_s``), S is computed at the beginning of its step, with nothing beside it.
With a bias or a soft cap −lse is added behind them instead; with dropout, −delta behind its scale.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.backward_context import (
    ConversionOperands,
    KeyValueContext,
    KeyValueOperands,
    QueryStep,
    over_query_steps,
)
from tilewright.kernels.flash_attention.hopper.backward_dq import accumulate_dq_of_item
from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient, BiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall, ConversionResults, KeyValueResults
from tilewright.kernels.flash_attention.hopper.d_query import OverlappedConversion
from tilewright.kernels.flash_attention.hopper.delta import MINUS_DELTA, MINUS_LSE
from tilewright.kernels.flash_attention.hopper.dropout import draw_kept, zero_dropped
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS, HopperBackwardParams
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan, KeyValueScratch
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    TileCoord,
    biased_and_capped,
    initial_scores,
    transposed,
    visible,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.panels import mma, store_tile
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import operands_of, run_warpgroup
from tilewright.kernels.hopper.tiles import ROWS, column_layout, opaque_zero, store_unoptimised
from tilewright.kernels.pallas_types import Ref, Scalar


def key_value_kernel(
    call: BackwardCall[HopperBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: tuple[np.ndarray, np.ndarray],
    interleaved_at_once: int = 0,
    dq_accumulator: jax.Ref | None,
    d_bias: jax.Ref | None = None,
    bias_gradient: AnyBiasGradient | None = None,
    conversion: OverlappedConversion | None = None,
    counters: jax.Ref | None = None,
) -> KeyValueResults[jax.Array]:
    """Computes dK and dV, adds to ``dq_accumulator``, and converts as much of it as ``conversion`` plans.

    Args:
      lists: of ``program_lists``, over tiles of keys.
      interleaved_at_once: of the function of that name.
      dq_accumulator: float32 of ``dq_accumulator_shape``; None if deterministic.
      d_bias: a reference to zeros, the array of ``bias_gradient``; None if the steps store all of it.
      counters: with ``conversion``, a reference to float32 zeros, ``[batch, kv_heads, *COUNTER_SHAPE]``.
    """
    batch, head_dim = call.query.shape[0], call.query.shape[3]
    kv_length, kv_heads, value_dim = call.value.shape[1:]
    dtype, options = call.query.dtype, call.options
    plan = BackwardPlan(
        call.params, *call.padded_dims, dtype, bias_gradient, call.panelled, call.parts.parts > 1, call.bias_dtype
    )
    operands: KeyValueOperands[object] = KeyValueOperands(
        *call.operands, call.statistics, dq_accumulator, d_bias, operands_of(lists),
        None if conversion is None else ConversionOperands(jnp.asarray(conversion.items), counters),
        tables, transposed(call.arrays, plan.stages_bias),
    )  # fmt: skip
    # Gradients in registers are stored as whole tiles; TMA stores stop at the end of the array.
    whole = plan.stores_from_registers
    rows = schedule.extent.row_tiles * call.params.block_k if whole else kv_length
    dims = call.padded_dims if whole else (head_dim, value_dim)
    shapes = ((batch, rows, kv_heads * call.parts.parts, dim) for dim in dims)
    d_key, d_value = (jax.ShapeDtypeStruct(shape, plan.gradient_dtype) for shape in shapes)
    results = KeyValueResults(d_key, d_value)
    if conversion is not None:
        d_query = jax.ShapeDtypeStruct(call.query.shape, dtype)
        done = jax.ShapeDtypeStruct(lists[1].shape, jnp.int32)
        results = results._replace(conversion=ConversionResults(d_query, done))
    if bias_gradient is not None and d_bias is None:
        results = results._replace(d_bias=jax.ShapeDtypeStruct(bias_gradient.shape, bias_gradient.dtype))

    def body(
        operands: KeyValueOperands[Ref], results: KeyValueResults[Ref], scratch: KeyValueScratch[Ring, Ref]
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        ctx = KeyValueContext(
            plan, options, schedule, kv_heads, call.parts, operands, results, scratch, warpgroup, interleaved_at_once
        )
        run = functools.partial(run_warpgroup, operands.item_lists)
        registers, has_dq = plan.registers, plan.has_dq_warpgroup
        consume, load = functools.partial(consume_item, ctx), functools.partial(load_item, ctx)
        # The consumers' setmaxnreg blocks until the other warpgroups have given up their registers: all roles must run
        # theirs.
        pl.when(warpgroup < CONSUMERS)(functools.partial(run, consume, registers.consumer, "increase"))
        if has_dq:
            add_dq = functools.partial(accumulate_dq_of_item, ctx)
            pl.when(warpgroup == CONSUMERS)(functools.partial(run, add_dq, registers.dq, "decrease"))
        pl.when(warpgroup == CONSUMERS + has_dq)(functools.partial(run, load, registers.producer, "decrease"))

    num_ctas, warpgroups = len(lists[0]) - 1, CONSUMERS + 1 + plan.has_dq_warpgroup
    scratch = plan.scratch(conversion is not None)
    return run_kernel(body, operands, results, scratch, role="d_key_value", num_ctas=num_ctas, warpgroups=warpgroups)


# Each role does one work item: ``after = role(ctx, item_index, item, first)`` counts the steps of the CTA.


def load_item(ctx: KeyValueContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Producer: loads K and V of a work item, and Q, dO and the statistics of its steps."""
    b, key_part, kv_tile = ctx.decode(item)
    kv_head, kv_rows = ctx.parts.key_head(key_part), pl.ds(kv_tile * ctx.block_k, ctx.block_k)
    refs, rings = ctx.operands, ctx.scratch

    def load_step(step: QueryStep, _: None) -> None:
        rows = pl.ds(step.q_tile * ctx.block_q, ctx.block_q)
        # In the order of use: the statistics start S, Q is its operand, and dP comes a softmax later.
        rings.statistics.load_from_dram(step.index, refs.statistics.at[b, step.head, :, rows])
        rings.q.load_from_dram(step.index, refs.query.at[b, rows, step.head])
        rings.d_out.load_from_dram(step.index, refs.d_out.at[b, rows, step.head])
        if ctx.bias_tiles is not None:
            # Last: its stage is free only when P of the step before is computed.
            for consumer in range(CONSUMERS):
                kv_start = kv_tile * ctx.block_k + consumer * ROWS
                coord = TileCoord(b, step.head, step.q_tile * ctx.block_q, kv_start, (ctx.block_q, ROWS), 0)
                ctx.bias_tiles.load(step.index, consumer, refs.arrays.bias, coord)

    # K and V have one stage: the producer waits here until those of the item before are released, and loads queries of
    # this item only then.
    rings.k.load_from_dram(item_index, refs.key.at[b, kv_rows, kv_head])
    rings.v.load_from_dram(item_index, refs.value.at[b, kv_rows, kv_head])
    return over_query_steps(ctx, item, first, load_step, None)


def consume_item(ctx: KeyValueContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Consumer: computes dK and dV of its 64 keys of a work item, and stores them."""
    b, key_part, kv_tile = ctx.decode(item)
    own_rows = pl.ds(ctx.warpgroup * ROWS, ROWS)
    kv_start = kv_tile * ctx.block_k + ctx.warpgroup * ROWS
    tile = KeyTile(ctx, item_index, item, b, key_part, kv_start, own_rows)
    dk, dv, after = pl.run_scoped(
        functools.partial(accumulate_dk_dv, tile, first),
        plgpu.ACC((ROWS, ctx.plan.head_dim), jnp.float32),
        plgpu.ACC((ROWS, ctx.plan.value_dim), jnp.float32),
    )
    store_dk_dv(tile, dk, dv)
    clear_skipped(ctx, item, after)
    return after


@dataclasses.dataclass(frozen=True, slots=True)
class KeyTile:
    """The 64 keys of a work item that a consumer owns.

    Attributes:
      kv_start: its first key.
      own_rows: its rows of the item's tiles of K and V.
    """

    ctx: KeyValueContext
    item_index: Scalar
    item: Scalar
    batch: Scalar
    key_part: Scalar
    kv_start: Scalar
    own_rows: pl.Slice

    def operand(self, ring: Ring, step: Scalar) -> Ref:
        """This consumer's rows of K or V, as an operand of an MMA of a step."""
        # An opaque zero of the step: else the compiler hoists wgmma's descriptors out of the loop, and spills.
        return ring.smem.at[opaque_zero(step + self.item), self.own_rows]


def accumulate_dk_dv(tile: KeyTile, first: Scalar, dk: Ref, dv: Ref) -> tuple[jax.Array, jax.Array, Scalar]:
    """Sums dK and dV over the steps of an item; returns them and the index of the next step.

    dK lacks its scale, dV that of dropout.
    """
    ctx = tile.ctx
    # Once an item, not once a step: each phase of these barriers is an item.
    ctx.scratch.k.load_from_shared(tile.item_index)
    ctx.scratch.v.load_from_shared(tile.item_index)
    s = None
    # An item has one step at least (``Steps.total``), so its first S is always wanted.
    if ctx.overlaps_next_s:
        s = pl.run_scoped(functools.partial(compute_s, tile, first), plgpu.ACC(ctx.s_shape, jnp.float32))

    def one(step: QueryStep, s: jax.Array | None) -> jax.Array | None:
        return consume_step(tile, step, s, dk, dv)

    after = over_query_steps(ctx, tile.item, first, one, s)
    # Every step has waited for its MMAs, also for the S computed ahead, so nothing reads K and V any more.
    ctx.scratch.k.release(tile.item_index)
    ctx.scratch.v.release(tile.item_index)
    return dk[...], dv[...], after


@dataclasses.dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of a step that a consumer works on."""

    keys: KeyTile
    step: QueryStep
    coord: TileCoord  # of S
    zero: Scalar  # unknown to the compiler
    q: Ref
    d_out: Ref

    @property
    def ctx(self) -> KeyValueContext:
        return self.keys.ctx


def consume_step(tile: KeyTile, step: QueryStep, s: jax.Array | None, dk: Ref, dv: Ref) -> jax.Array | None:
    """Adds a step's dV = P·dO and dK = dS·Q, and hands dS to the dQ warpgroup.

    Args:
      s: S of this step if it has been computed beside dK of the step before, else None.

    Returns:
      S of the next step, or None.
    """
    ctx, rings = tile.ctx, tile.ctx.scratch
    zero = opaque_zero(step.index + tile.item)
    coord = TileCoord(tile.batch, step.head, step.q_tile * ctx.block_q, tile.kv_start, ctx.s_shape, 1)
    q, d_out = rings.q.get_mma_tile(step.index), rings.d_out.get_mma_tile(step.index)
    tiles = StepTiles(tile, step, coord, zero, q, d_out)
    bits = None
    if s is None:
        compute = functools.partial(compute_s_and_bits, tile, step.index, coord)
        s, bits = pl.run_scoped(compute, plgpu.ACC(ctx.s_shape, jnp.float32))
    p = softmax_tile(tiles, s, bits)
    # Waited for as late as that: neither S nor P needs dO.
    rings.d_out.load_from_shared(step.index)
    # dP and dS in sub-tiles of 64 queries: those of 128 queries would spill.
    ds = [
        pl.run_scoped(functools.partial(compute_ds, tiles, p, dv, begin), plgpu.ACC((ROWS, ROWS), jnp.float32))
        for begin in range(0, ctx.block_q, ROWS)
    ]
    # With dropout P·dO is issued last and still in flight: dO is released with Q, in `accumulate_dk`.
    if bits is None:
        rings.d_out.release(step.index)
    finish = functools.partial(accumulate_dk, tiles, ds, dk)
    return pl.run_scoped(finish, plgpu.ACC(ctx.s_shape, jnp.float32)) if ctx.overlaps_next_s else finish(None)


# S.


def load_statistic(ctx: KeyValueContext, step: Scalar, row: int, begin: int, size: int) -> jax.Array:
    """Loads −lse or −delta of ``size`` of the step's queries, as a tile ``[64, size]``."""
    ring = ctx.scratch.statistics
    values = plgpu.load(ring.smem.at[ring.slot(step), row, pl.ds(begin, size)], layout=column_layout())
    return lax.broadcast_in_dim(values, (ROWS, size), [1])


def wait_queries(ctx: KeyValueContext, step: Scalar) -> None:
    """Waits for the statistics and Q of a step."""
    ctx.scratch.statistics.load_from_shared(step)
    ctx.scratch.q.load_from_shared(step)


def initialize_s(ctx: KeyValueContext, step: Scalar, coord: TileCoord | None, s: Ref) -> None:
    """Starts the accumulator from −lse and a bias of positions, so that adding them costs nothing.

    Args:
      coord: of S; None if it is computed beside dK, which it is only without such a bias.
    """
    start = None if coord is None else initial_scores(ctx.options, ctx.operands.arrays, lambda: coord)
    if ctx.options.plain:
        minus_lse = load_statistic(ctx, step, MINUS_LSE, 0, ctx.block_q)
        start = minus_lse if start is None else start + minus_lse
    if start is not None:
        s[...] = start


def issue_s(tile: KeyTile, step: Scalar, s: Ref) -> None:
    """Issues the MMA S += KQᵀ."""
    k = tile.operand(tile.ctx.scratch.k, step)
    mma(s, k, tile.ctx.scratch.q.get_mma_tile(step, transposed=True))


def compute_s(tile: KeyTile, step: Scalar, s: Ref) -> jax.Array:
    """Computes S of a step, with no other MMA in flight."""
    return compute_s_and_bits(tile, step, None, s)[0]


def compute_s_and_bits(
    tile: KeyTile, step: Scalar, coord: TileCoord | None, s: Ref
) -> tuple[jax.Array, jax.Array | None]:
    """Computes S of a step, and beside it the dropout's bits of its tile ``coord``, if there is any."""
    ctx = tile.ctx
    wait_queries(ctx, step)
    initialize_s(ctx, step, coord, s)
    issue_s(tile, step, s)
    bits = None if coord is None else draw_kept(ctx.options, ctx.operands.arrays, coord)
    return plgpu.wgmma_accumulator_load(s, wait_n=0), bits


# P and dS.


class ProbabilityTiles(NamedTuple):
    """P as a factor of two products, which differ by dropout and the derivative of the soft cap.

    Attributes:
      dv: operand of dV = ``dv``·dO, before the dropout.
      ds: factor of dS = ``ds`` ∘ (dP − delta), where dP is scaled or dropped.
      bits: of ``draw_kept``, the elements of dP that dropout keeps.
    """

    dv: jax.Array
    ds: jax.Array
    bits: jax.Array | None


def softmax_tile(tiles: StepTiles, s: jax.Array, bits: jax.Array | None) -> ProbabilityTiles:
    """Computes P from S."""
    ctx, step, coord = tiles.ctx, tiles.step, tiles.coord
    options, arrays, may_mask = ctx.options, ctx.operands.arrays, ctx.schedule.may_mask
    tanh = None
    if not options.plain:
        bias = None
        if ctx.bias_tiles is not None:
            bias = ctx.bias_tiles.read(step.index, ctx.warpgroup, transposed=True)
        s, tanh = biased_and_capped(s, options, arrays, coord, bias)
        s = s + load_statistic(ctx, step.index, MINUS_LSE, 0, ctx.block_q)

    def exponentials(s: jax.Array, masked: bool) -> jax.Array:
        s = s * options.multiplier
        if masked:
            s = jnp.where(visible(options, arrays, coord), s, -jnp.inf)
        return jnp.exp2(s)

    # Where nothing is masked the branch is never taken. Without one ptxas moves the exponentials behind the next MMA,
    # whose accumulator then leaves them too few registers.
    p = lax.cond(
        step.masked if may_mask else tiles.zero != 0,
        functools.partial(exponentials, masked=True) if may_mask else (lambda x: x * 0.0),
        functools.partial(exponentials, masked=False),
        s,
    )

    def rounded(factor: jax.Array) -> jax.Array:
        # Before the next MMA is issued: ptxas serialises wgmma if a register operand is written while one is in flight.
        return lax.optimization_barrier(factor.astype(ctx.plan.dtype))

    # Only tanh lives until here: with 1 − tanh² computed beside it the fused kernel spilled 52 bytes at head_dim 128
    # instead of 40 (docs/notes/hopper_attention.md).
    # The derivative of c · tanh(x / c) is 1 − tanh²: a factor of dS, not of dV.
    p_slope = p if tanh is None else p * (1 - tanh * tanh)
    # Softmax comes before dropout: the factor of dS is P before it.
    p_dv = rounded(p)
    p_ds = p_dv if tanh is None else rounded(p_slope)
    return ProbabilityTiles(p_dv, p_ds, bits)


def compute_ds(tiles: StepTiles, p: ProbabilityTiles, dv: Ref, begin: int, dp: Ref) -> jax.Array:
    """Computes dS of 64 queries, ``begin`` and following, and adds their part of dV beside it."""
    ctx, step, d_out = tiles.ctx, tiles.step, tiles.d_out
    columns = pl.ds(begin, ROWS)
    sub_tile = dataclasses.replace(tiles.coord, q_start=tiles.coord.q_start + begin, shape=(ROWS, ROWS))
    if ctx.block_q != ROWS:
        p = ProbabilityTiles(p.dv[:, begin : begin + ROWS], p.ds[:, begin : begin + ROWS], p.bits)
    # With dropout the accumulator of dP is rescaled, which −delta must not be.
    if not ctx.options.dropout_prob:
        dp[...] = load_statistic(ctx, step.index, MINUS_DELTA, begin, ROWS)
    # dP before dV: dS waits for the older of both, and dV runs beside the arithmetic for dS.
    mma(dp, tiles.keys.operand(ctx.scratch.v, step.index), d_out.at[columns].T)
    if p.bits is None:
        mma(dv, p.dv, d_out.at[columns])
        # MMAs complete in the order of their issue: all but the last one is dP, and dV goes on beside the next lines.
        dp_tile = plgpu.wgmma_accumulator_load(dp, wait_n=1)
    else:
        # dV waits for dS: there are not enough registers to keep P both with and without dropout.
        dp_tile = zero_dropped(plgpu.wgmma_accumulator_load(dp, wait_n=0), p.bits, sub_tile, begin)
        dp_tile = dp_tile * (1 / (1 - ctx.options.dropout_prob))
        dp_tile = dp_tile + load_statistic(ctx, step.index, MINUS_DELTA, begin, ROWS)
    ds = p.ds.astype(jnp.float32) * dp_tile
    # Before dS is rounded below: the rounded registers are the operand of dK (see ``rounded`` in `softmax_tile`).
    plgpu.wgmma_wait(0)
    if ctx.bias_gradient is not None:
        d_bias, staging, bias_tile = ctx.d_bias, ctx.scratch.d_bias, sub_tile
        assert d_bias is not None
        if ctx.options.positions is not None:
            # Behind an opaque zero: else the compiler keeps the distances from the start of S until here.
            bias_tile = dataclasses.replace(sub_tile, q_start=sub_tile.q_start + tiles.zero)
        ctx.bias_gradient.store(d_bias, None if staging is None else staging.at[ctx.warpgroup], ds, bias_tile)
    ds = ds.astype(ctx.plan.dtype)
    if p.bits is not None:
        ds, p_dv = lax.optimization_barrier((ds, zero_dropped(p.dv, p.bits, sub_tile, begin)))
        mma(dv, p_dv, d_out.at[columns])
    return ds


def accumulate_dk(tiles: StepTiles, ds: list[jax.Array], dk: Ref, next_s: Ref | None) -> jax.Array | None:
    """Adds dK = dS·Q; stores dS to shared memory and, with an accumulator for it, computes the next S beside it."""
    ctx, rings, step = tiles.ctx, tiles.ctx.scratch, tiles.step
    if next_s is not None:
        # Behind the last step of an item nothing is loaded: S is then computed from a stale tile, and not used.
        pl.when(step.more)(functools.partial(wait_queries, ctx, step.index + 1))
        initialize_s(ctx, step.index + 1, None, next_s)
    # dK before the next S: the wait below leaves one group in flight, which must be the one that does not read this Q.
    for sub_tile, ds_tile in enumerate(ds):
        mma(dk, ds_tile, tiles.q.at[pl.ds(sub_tile * ROWS, ROWS)])
    if next_s is not None:
        # Worth its spills: 28 to 36 bytes at head_dim 128, addresses that are loaded again once or twice in a step, and
        # 2091 µs instead of 2118 for 4 × 4096 queries (docs/notes/hopper_attention.md).
        issue_s(tiles.keys, step.index + 1, next_s)
    if rings.ds is not None:
        # Beside the MMA for dK, which has dS in registers; the dQ warpgroup has it from shared memory.
        rings.ds.copy_to_shared(step.index, ds, rows=tiles.keys.own_rows)
    else:
        plgpu.commit_smem()
    # Only behind an async-proxy fence, which both branches have: threads have read the statistics, and TMA writes the
    # slot next, through the async proxy.
    rings.statistics.release(step.index)
    # All but the MMA for the next S, which does not read this step's Q.
    plgpu.wgmma_wait(int(ctx.overlaps_next_s))
    rings.q.release(step.index)
    if ctx.options.dropout_prob:
        rings.d_out.release(step.index)
    return None if next_s is None else plgpu.wgmma_accumulator_load(next_s, wait_n=0)


def clear_skipped(ctx: KeyValueContext, item: Scalar, after: Scalar) -> None:
    """Stores zeros where the gradient of a bias has tiles without a step, unless the array has been cleared.

    Args:
      after: the index of the step behind the item.
    """
    bias_gradient = ctx.bias_gradient
    if not isinstance(bias_gradient, BiasGradient) or ctx.operands.d_bias is not None:
        return
    # Decoded anew, as if the item were another: kept over its steps, the values would be spilled.
    b, key_part, kv_tile = ctx.decode(item + opaque_zero(after + item))
    d_bias, staging = ctx.d_bias, ctx.scratch.d_bias
    assert d_bias is not None
    assert staging is not None
    first_head, num_heads = ctx.parts.query_heads(key_part)

    def one(member: Scalar, _: None) -> None:
        kv_start = kv_tile * ctx.block_k + ctx.warpgroup * ROWS
        coord = TileCoord(b, first_head + member, 0, kv_start, (ROWS, ROWS), 1)
        bias_gradient.clear_skipped(d_bias, staging.at[ctx.warpgroup], ctx.schedule, kv_tile, coord)

    lax.fori_loop(0, num_heads, one, None)


def store_dk_dv(tile: KeyTile, dk: jax.Array, dv: jax.Array) -> None:
    """Stores the gradients of a consumer's keys, by TMA where there are buffers."""
    ctx, scratch, results = tile.ctx, tile.ctx.scratch, tile.ctx.results
    rows, dtype = pl.ds(tile.kv_start, ROWS), ctx.plan.gradient_dtype
    if ctx.options.dropout_prob:
        # P lacks the dropout's factor: it is applied to the sum once, not to every tile.
        dv = dv * (1 / (1 - ctx.options.dropout_prob))
    # Without buffers there is no TMA store to wait for; writes beyond the end go to padded rows.
    if ctx.plan.stores_from_registers:
        store_unoptimised(results.d_value.at[tile.batch, rows, tile.key_part], dv.astype(dtype))
        store_unoptimised(results.d_key.at[tile.batch, rows, tile.key_part], (dk * ctx.options.scale).astype(dtype))
        return
    dv_buffer = scratch.d_bias if ctx.plan.memory.shares_d_bias else scratch.dv
    assert dv_buffer is not None
    # With one buffer each store waits for the one before: dV and dK pass through it one after another.
    dk_buffer, in_flight = dv_buffer, [0, 0]
    if scratch.dk is not None:
        # With a buffer for each, the store before is of the other one, which TMA may still read.
        dk_buffer, in_flight = scratch.dk, [each.copies for each in reversed(ctx.plan.output_tiles)]
    gradients = (dv_buffer, dv, results.d_value), (dk_buffer, dk * ctx.options.scale, results.d_key)
    pieces = [
        (number, begin)
        for number, (buffer, gradient, _) in enumerate(gradients)
        for begin in range(0, gradient.shape[1], buffer.shape[-1])
    ]
    if scratch.dk is not None:  # in turn
        pieces.sort(key=lambda piece: piece[1] // gradients[piece[0]][0].shape[-1])
    for number, begin in pieces:
        buffer, gradient, target = gradients[number]
        own, width = buffer.at[ctx.warpgroup], buffer.shape[-1]
        plgpu.wait_smem_to_gmem(in_flight[number], wait_read_only=True)  # the last store of it has read the buffer
        own[...] = gradient[:, begin : begin + width].astype(dtype)
        plgpu.commit_smem()
        store_tile(own, target.at[tile.batch, rows, tile.key_part], begin)
