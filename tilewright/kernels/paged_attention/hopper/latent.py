"""Multi-head latent attention over pages on Hopper: what TMA loads once is K of one MMA and V of another.

A work item is 64 query rows of a sequence (token by token, its heads) and a part of their keys; a step is a block of
64 latents. The blocks of all sequences are cut to equal ranges (`latent_ranges`), and a CTA (a Pallas program) goes
through the items of a range, one for each sequence that the range has blocks of. CTAs of one range and different rows
are neighbours, and read the same latents at any time: from the L2 cache for all but one, or as a cluster of two, each
of which loads a half of a latent for both. Items that have all keys of their rows store results, others float32 parts
of them, which `latent_combine` reads.

O of 64 × 512 does not fit the registers of one warpgroup, so two consumers share it by columns: the first computes the
scores of all columns, the softmax and the left half of O, and hands P and alpha through shared memory to the second,
which computes the right half. A third warpgroup is the producer.

=======  ==================================================  ===================  =====================================
symbol   meaning                                             shape                where it lives
=======  ==================================================  ===================  =====================================
Q        queries in three parts of columns, as C             [64, 576]            SMEM, ``q_left``, ``q_right``,
                                                                                  ``q_rest``
C        latents of a step: K are all columns, V the first   [64, 576]            SMEM, rings ``left`` (256 columns),
         512. In three parts, each of which is loaded anew                        ``right`` (256), ``rest`` (64)
         as soon as its last MMA is done
S        QCᵀ; scaled and masked: the logits                  [64, 64] float32     registers of the first consumer
P        exp2(logits · multiplier − m)                       [64, 64]             SMEM, in the stage of ``rest`` that S
                                                                                  has been computed from
m, l     running max of the logits in base 2, and sum of P   [64] float32         registers of the first consumer
alpha    exp2(m before the step − m): rescales l and O       [64] float32         registers; SMEM, ``scales``
O        PV: the left 256 columns, the right 256             2 × [64, 256] f32    registers of each consumer; before
                                                                                  its TMA store SMEM, in the last stage
                                                                                  of ``left`` and of ``right``
=======  ==================================================  ===================  =====================================

An item of T steps behind another; time runs to the right, and what stands below each other overlaps. L, R and r are
the parts of C, and what has a prime is of the next item::

    producer       R0 r0 L0  Q  R1 r1 L1   ...   R0' r0' L0'         Q'                   R1' r1' L1' ...
    first, MMA            S0        S1 P0·L0  ...  S(T-1) P(T-2)·L(T-2)   S0' P(T-1)·L(T-1)      S1' P0'·L0'
    first, ALU               P0           P1 · αO  ...           P(T-1) · αO           P0' · O / l -> store
    second, MMA                   P0·R0       P1·R1  ...                P(T-1)·R(T-1)         P0'·R0'
    second, ALU                           αO     ...                                 O / l -> store

S of a step and the left PV of the one before are issued together (Shah et al., "FlashAttention-3", 2024, section 3.2),
so that the softmax of a step runs beside MMAs of both consumers; also where the step before is the last one of another
item. The first latents of the next item are loaded while this one ends, and its Q when the last S is complete.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import NARROW_REGISTERS
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.softmax import (
    LOG2E,
    AttentionResults,
    SoftmaxTile,
    initial_statistics,
    normaliser,
    online_softmax,
    row_lse,
    split_scale,
)
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, row_layout, tile_layout
from tilewright.kernels.paged_attention.hopper.latent_context import (
    LEFT,
    REST,
    RIGHT,
    LatentContext,
    LatentKernel,
    LatentOperands,
    LatentResults,
    for_each_item,
)
from tilewright.kernels.paged_attention.hopper.latent_work import (
    BLOCK_K,
    CONSUMERS,
    HALF,
    NORMALISER,
    VALUE_DIM,
    LatentCall,
    LatentPlan,
    LatentRanges,
    LatentScratch,
    sequences_of_range,
)
from tilewright.kernels.pallas_types import Ref, Scalar

STEP_BITS = 24
"""Bits of the index of a step; lengths have 30, and a step has 64 keys."""

CHUNK = 64
"""Columns of V that are read and written at once where rows are cleared."""

FIRST, SECOND, PRODUCER = range(WARPGROUPS := CONSUMERS + 1)
"""The warpgroups: scores, softmax and the left half of O; the right half; loads."""

# The producer.


def run_producer(kernel: LatentKernel) -> None:
    """Loads Q and latents of all items of this CTA."""
    plgpu.set_max_registers(NARROW_REGISTERS.producer, action="decrease")
    _, count = sequences_of_range(kernel.call, kernel.operands.ranges)
    steps, _ = for_each_item(kernel, count, lambda ctx, _: produce_item(ctx), None)
    if kernel.call.cluster > 1:
        for ring in (kernel.scratch.right, kernel.scratch.rest, kernel.scratch.left):
            ring.drain(steps)


def produce_item(ctx: LatentContext) -> None:
    """Loads Q, and the latents of all steps of the item."""
    scratch, work = ctx.scratch, ctx.work

    def load_latents(step: Scalar, page: Scalar) -> jax.Array:
        next_page = ctx.page_of(step + 1)
        # Before the loads, which wait for slots.
        if ctx.call.prefetched:
            prefetch_latents(ctx, step + ctx.call.prefetched)
        # In the order in which the consumers release them.
        load_part(ctx, scratch.right, RIGHT, step, page)
        load_part(ctx, scratch.rest, REST, step, page)
        load_part(ctx, scratch.left, LEFT, step, page)
        return next_page

    if ctx.call.prefetched:  # while the item before still occupies the slots
        lax.fori_loop(0, ctx.call.prefetched, lambda step, _: prefetch_latents(ctx, step), None)
    page = load_latents(ctx.zero, ctx.page_of(ctx.zero))
    for ring, columns in ((scratch.q_rest, REST), (scratch.q_left, LEFT), (scratch.q_right, RIGHT)):
        ring.load_from_dram(0, ctx.operands.query.at[work.sequence, ctx.my_rows, columns])
    lax.fori_loop(1, work.total, load_latents, page)


def load_part(ctx: LatentContext, ring: Ring, columns: pl.Slice, step: Scalar, page: Scalar) -> None:
    """Loads a part of the latents of a step, whose entry of the page table is ``page``."""
    # For an entry that is not a page, page 0 is loaded, and masked: the barrier of the stage counts a copy in each
    # step.
    page = jnp.where(ctx.exists(page), page, 0)
    ring.load_from_dram(step, ctx.operands.pages.at[page, pl.ds(ctx.row_of(step), BLOCK_K), columns])


def prefetch_latents(ctx: LatentContext, step: Scalar) -> None:
    """Prefetches the latents of a step to the L2 cache.

    A slot is released shortly before its next latents are needed, too late for a load from device memory. CTAs of one
    range run side by side, so only the first one prefetches.
    """
    page, row = ctx.page_of(step), ctx.row_of(step)
    wanted = ctx.exists(page) & (step < ctx.work.total) & (ctx.work.row_tile == 0)
    page = jnp.where(wanted, page, 0)
    for columns in (LEFT, RIGHT, REST):
        plgpu.async_prefetch(ctx.operands.pages.at[page, pl.ds(row, BLOCK_K), columns], predicate=wanted)


# The first consumer.


def run_first_consumer(kernel: LatentKernel) -> None:
    """Computes the softmax, the left half of out, and lse."""
    plgpu.set_max_registers(NARROW_REGISTERS.consumer, action="increase")
    sequence, count = sequences_of_range(kernel.call, kernel.operands.ranges)

    def attend(acc: Ref) -> None:
        statistics = first_step(LatentContext.of_item(kernel, sequence, jnp.int32(0), jnp.int32(0)))
        steps, statistics = for_each_item(kernel, count - 1, functools.partial(attend_left, acc), statistics)
        attend_left_last(acc, LatentContext.of_item(kernel, sequence + count - 1, count - 1, steps), statistics)

    pl.when(count > 0)(lambda: pl.run_scoped(attend, plgpu.ACC((ROWS, HALF), jnp.float32)))


class Statistics(NamedTuple):
    """The running max and the sum of the rows of P, as `online_softmax` has them."""

    m: jax.Array
    row_sum: jax.Array


def first_step(ctx: LatentContext) -> Statistics:
    """S and softmax of the first step of the CTA, with no PV in flight."""
    scratch, zero = ctx.scratch, ctx.zero
    page = ctx.page_of(zero)

    def scores_alone(scores: Ref) -> jax.Array:
        wait_for_queries(ctx, zero)
        issue_scores(ctx, scores, zero)
        return scores[...]

    scores = pl.run_scoped(scores_alone, plgpu.ACC((ROWS, BLOCK_K), jnp.float32))
    # S has read it as K; the second consumer still reads it as V.
    scratch.right.release(zero)
    pl.when(ctx.work.total == 1)(lambda: release_queries(ctx, zero))
    tile = softmax_tile(ctx, scores, zero, page, *initial_statistics())
    store_p_to_smem(ctx, zero, tile)
    clear_masked_values(ctx, scratch.left, zero, page)
    return Statistics(tile.m, tile.row_sum)


def attend_left(acc: Ref, ctx: LatentContext, statistics: Statistics) -> Statistics:
    """All steps of the first consumer in an item but the first one, and the first one of the next item.

    So that is a step like all others, beside the last PV of this item. That saves a part of a step for each item; and
    where the body of the loop over items had wgmmas of its own, ptxas kept the descriptors of all in registers of
    threads (docs/notes/serving_attention.md).

    Args:
      acc: the left half of O.
    """
    total = ctx.work.total
    found = left_steps(ctx, ctx.with_first_of_next(), total + 1, acc, statistics)
    store_half(ctx, acc[...], total - 1, LEFT, ctx.scratch.left)
    acc[...] = jnp.zeros_like(acc)
    return found


def attend_left_last(acc: Ref, ctx: LatentContext, statistics: Statistics) -> None:
    """All steps of the first consumer in the last item of its CTA but the first one."""
    scratch, last = ctx.scratch, ctx.work.total - 1
    statistics = left_steps(ctx, lambda _: ctx, ctx.work.total, acc, statistics)
    plgpu.wgmma(acc, p_tile(ctx, last), scratch.left.get_mma_tile(last))
    hand_normaliser(ctx, last, statistics)
    out = acc[...]
    scratch.rest.release(last)
    store_half(ctx, out, last, LEFT, scratch.left)


def left_steps(
    own: LatentContext,
    context: Callable[[Scalar], LatentContext],
    end: Scalar,
    acc: Ref,
    statistics: Statistics,
) -> Statistics:
    """Steps of the first consumer from 1 on; ``context`` gives that of a step."""

    def one_step(step: Scalar, carry: tuple[Statistics, Scalar]) -> tuple[Statistics, Scalar]:
        statistics, page = carry
        ctx = context(step)
        next_page = context(step + 1).page_of(step + 1)
        return left_step(own, ctx, acc, step, page, statistics), next_page

    one = own.zero + 1
    found: Statistics
    found, _ = lax.fori_loop(1, end, one_step, (statistics, context(one).page_of(one)))
    return found


def left_step(
    own: LatentContext, ctx: LatentContext, acc: Ref, step: Scalar, page: Scalar, statistics: Statistics
) -> Statistics:
    """S and softmax of a step, beside the left PV of the one before.

    Args:
      own: the context of the item of the step before.
      ctx: that of the step's item, which may be the next one.
      page: the step's entry of the page table.
      statistics: of the item of the step before.
    """
    left, right, rest = ctx.scratch.left, ctx.scratch.right, ctx.scratch.rest
    begins = step == own.work.total
    item = jnp.asarray(begins, jnp.int32)

    def begun(statistics: Statistics) -> Statistics:
        hand_normaliser(own, step - 1, statistics)
        wait_for_queries(ctx, item)
        return Statistics(*initial_statistics())

    statistics = lax.cond(begins, begun, lambda statistics: statistics, statistics)

    def scores_beside_pv(scores: Ref) -> Statistics:
        issue_scores(ctx, scores, step)
        # P from shared memory, although this consumer had it in registers: as an operand in registers that is also
        # stored it made ptxas serialise the wgmmas (C7513, docs/notes/serving_attention.md).
        plgpu.wgmma(acc, p_tile(ctx, step - 1), left.get_mma_tile(step - 1))
        # wait_n=1: S is complete, PV may still run.
        s = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        right.release(step)
        pl.when(step == ctx.work.total - 1)(lambda: release_queries(ctx, item))
        tile = softmax_tile(ctx, s, step, page, *statistics)
        # Before the wait for this consumer's PV: the second one's PV may begin, and runs beside it.
        store_p_to_smem(ctx, step, tile)
        plgpu.wgmma_wait(0)
        # This consumer's PV has read P of the step before, which lay in this stage; the second one releases it for
        # itself.
        rest.release(step - 1)
        # O of an item that is complete leaves through this stage.
        pl.when(~begins)(lambda: left.release(step - 1))
        clear_masked_values(ctx, left, step, page)
        alpha = lax.cond(begins, jnp.ones_like, lambda alpha: alpha, tile.alpha)
        acc[...] = acc[...] * across(alpha, HALF)
        return Statistics(tile.m, tile.row_sum)

    return pl.run_scoped(scores_beside_pv, plgpu.ACC((ROWS, BLOCK_K), jnp.float32))


def wait_for_queries(ctx: LatentContext, item: Scalar) -> None:
    """Waits for Q of the item, 0, or of the next one, 1."""
    for ring in (ctx.scratch.q_left, ctx.scratch.q_right, ctx.scratch.q_rest):
        ring.load_from_shared(item)


def release_queries(ctx: LatentContext, item: Scalar) -> None:
    """Releases Q of the item, 0, or of the next one, 1: the last S with it is complete."""
    for ring in (ctx.scratch.q_left, ctx.scratch.q_right, ctx.scratch.q_rest):
        ring.release(item)


def hand_normaliser(ctx: LatentContext, last: Scalar, statistics: Statistics) -> None:
    """Stores lse of an item, and for both consumers the factor that normalises O."""
    scratch = ctx.scratch
    scale, lse = normalised(ctx, *statistics)
    # Threads write and read it: the barrier orders them, and no async-proxy fence is needed. That of the next item is
    # in the other slot, or later than the second consumer's release of this one.
    slot = scratch.left.slot(last)
    scratch.scales[NORMALISER + slot, :] = scale
    plgpu.barrier_arrive(scratch.finished.at[slot])

    def store(results: AttentionResults[Ref], index: Scalar) -> None:
        results.lse.at[index, ctx.my_rows][...] = lse

    by_kind(ctx, store)


def normalised(ctx: LatentContext, m: jax.Array, row_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factor that normalises O, and lse; with sinks if the item has all keys of its rows."""
    if ctx.operands.sinks is None:
        return normaliser(row_sum), row_lse(m, row_sum)
    sinks = plgpu.load(ctx.operands.sinks.at[ctx.my_rows], layout=row_layout(), optimized=False)
    # Those of parts are added when these are combined.
    sinks = sinks * LOG2E + jnp.where(ctx.part() < 0, 0.0, -jnp.inf)
    maximum = jnp.maximum(m, sinks)
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    factor = jnp.exp2(m - shift)
    total = row_sum * factor + jnp.exp2(sinks - shift)
    return factor * normaliser(total), row_lse(maximum, total)


def issue_scores(ctx: LatentContext, scores: Ref, step: Scalar) -> None:
    """Waits for each part of C of a step, and issues S = QCᵀ, summed over the parts."""
    scratch = ctx.scratch
    # The descriptors of Q do not change from step to step; the compiler would keep all of them in registers and spill
    # others: indexing Q by a zero that depends on the step has them recomputed.
    zero = opaque_zero(step, STEP_BITS)
    # The left part comes last: its slot was the last to be released.
    for query, ring in (
        (scratch.q_right, scratch.right),
        (scratch.q_rest, scratch.rest),
        (scratch.q_left, scratch.left),
    ):
        ring.load_from_shared(step)
        plgpu.wgmma(scores, query.smem.at[zero], ring.get_mma_tile(step, transposed=True))


def softmax_tile(
    ctx: LatentContext, scores: jax.Array, step: Scalar, page: Scalar, m: jax.Array, row_sum: jax.Array
) -> SoftmaxTile:
    """P of a step in the dtype of V, with alpha and the new m and l; ``scores`` is S."""
    early_scale, multiplier = split_scale(ctx.call.softmax_scale)
    logits = scores if early_scale == 1.0 else scores * early_scale
    logits = lax.cond(
        needs_mask(ctx, step, page), lambda x: jnp.where(visible(ctx, step, page), x, -jnp.inf), lambda x: x, logits
    )
    tile = online_softmax(logits, multiplier, m, row_sum)
    return tile._replace(p=tile.p.astype(ctx.dtype))


def needs_mask(ctx: LatentContext, step: Scalar, page: Scalar) -> jax.Array:
    """True where a step has keys that not all rows see."""
    end = ctx.visible_end(step, page)
    return (end < BLOCK_K) | (ctx.work.full_end - (ctx.work.first + step) * BLOCK_K < BLOCK_K)


def visible(ctx: LatentContext, step: Scalar, page: Scalar) -> jax.Array:
    """The mask of a step, ``[64, 64]``, True where a key is visible."""
    call, work = ctx.call, ctx.work
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK_K), 1, layout=tile_layout())
    end = ctx.visible_end(step, page)
    if call.right is None or call.q_length == 1:
        return key < end
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=row_layout())
    # Rows are token by token, its heads: the token gives the position of a row. Bounds of rows take two registers; of
    # differences the compiler would keep every element.
    token = lax.div(row + work.row_tile * ROWS, jnp.int32(call.heads))
    start = (work.first + step) * BLOCK_K
    return key < across(jnp.minimum(token + (work.position + (call.right + 1) - start), end), BLOCK_K)


def p_tile(ctx: LatentContext, step: Scalar) -> Ref:
    """P of a step in shared memory: in the stage of ``rest`` that its S has been computed from."""
    return ctx.scratch.rest.get_mma_tile(step)


def store_p_to_smem(ctx: LatentContext, step: Scalar, tile: SoftmaxTile) -> None:
    """Stores P and alpha of a step for the second consumer, and P for this one's own PV."""
    scratch = ctx.scratch
    # The first consumer is at most one step ahead of the second: the stage of step + 2 is loaded only when that has
    # released step. So neither alpha nor a phase of `ready` is overwritten before it is read.
    slot = scratch.right.slot(step)
    scratch.scales[slot, :] = tile.alpha
    p_tile(ctx, step)[...] = tile.p
    # wgmma reads P through the async proxy, which needs a fence.
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.ready.at[slot])


# The second consumer.


def run_second_consumer(kernel: LatentKernel) -> None:
    """Computes the right half of out."""
    plgpu.set_max_registers(NARROW_REGISTERS.consumer, action="increase")

    def attend(ctx: LatentContext, _: None) -> None:
        pl.run_scoped(functools.partial(attend_right, ctx), plgpu.ACC((ROWS, HALF), jnp.float32))

    _, count = sequences_of_range(kernel.call, kernel.operands.ranges)
    for_each_item(kernel, count, attend, None)


def attend_right(ctx: LatentContext, acc: Ref) -> None:
    """All steps of the second consumer in an item; ``acc`` is the right half of O."""
    scratch, right, rest = ctx.scratch, ctx.scratch.right, ctx.scratch.rest
    last = ctx.work.total - 1

    def one_step(step: Scalar, page: Scalar) -> jax.Array:
        next_page = ctx.page_of(step + 1)
        for ring in (right, rest):
            ring.load_from_shared(step)
        # P and alpha are ready, and S of the step is complete: only now may rows of V be cleared, which S has read as
        # K.
        plgpu.barrier_wait(scratch.ready.at[right.slot(step)])
        alpha = plgpu.load(scratch.scales.at[right.slot(step)], layout=row_layout())
        acc[...] = acc[...] * across(alpha, HALF)
        clear_masked_values(ctx, right, step, page)
        plgpu.wgmma(acc, p_tile(ctx, step), right.get_mma_tile(step))
        # This consumer has no other work to overlap with its MMA, which overlaps with the first consumer's work.
        plgpu.wgmma_wait(0)
        rest.release(step)
        pl.when(step < last)(lambda: right.release(step))
        return next_page

    lax.fori_loop(0, ctx.work.total, one_step, ctx.page_of(ctx.zero))
    plgpu.barrier_wait(scratch.finished.at[right.slot(last)])
    store_half(ctx, acc[...], last, RIGHT, right)


# Both consumers.


def by_kind(ctx: LatentContext, store: Callable[[AttentionResults[Ref], Scalar], None]) -> None:
    """Calls ``store`` with the results of rows, or with the partial results, whichever the item has, and its index."""
    parts = ctx.results.parts
    if parts is None:
        store(ctx.results.whole, ctx.work.sequence)
        return
    part = ctx.part()
    pl.when(part < 0)(lambda: store(ctx.results.whole, ctx.work.sequence))
    pl.when(part >= 0)(lambda: store(parts, part))


def clear_masked_values(ctx: LatentContext, ring: Ring, step: Scalar, page: Scalar) -> None:
    """Zeroes the rows of a half of V that no query sees: they may hold anything, and 0 · NaN is NaN.

    S of the step, which reads the same latents as K, must be complete.
    """
    end = ctx.visible_end(step, page)

    @pl.when(end < BLOCK_K)
    def _() -> None:
        tile = ring.get_mma_tile(step)
        for start in range(0, HALF, CHUNK):
            chunk = tile.at[:, pl.ds(start, CHUNK)]
            values = plgpu.load(chunk, layout=tile_layout())
            row = plgpu.broadcasted_iota(jnp.int32, (BLOCK_K, CHUNK), 0, layout=tile_layout())
            chunk[...] = jnp.where(row < end, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def store_half(ctx: LatentContext, out: jax.Array, last: Scalar, columns: pl.Slice, ring: Ring) -> None:
    """Stores 256 columns of the output, and releases the last stage of a half of V.

    Args:
      out: not yet normalised, ``[64, 256]`` float32.
      last: the last step of the item.
      ring: of the half, whose last stage no MMA reads any more: the output waits there for its TMA store.
    """
    scale = plgpu.load(ctx.scratch.scales.at[NORMALISER + ring.slot(last)], layout=row_layout())
    out = out * across(scale, HALF)

    def store(results: AttentionResults[Ref], index: Scalar) -> None:
        target = results.out.at[index, ctx.my_rows, columns]
        if results is not ctx.results.whole:
            ring.release(last)
            target[...] = out
            return
        smem = ring.get_mma_tile(last)
        smem[...] = out.astype(ctx.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(last)

    by_kind(ctx, store)


# The launch.


def latent_kernel(
    query: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    ranges: LatentRanges[jax.Array],
    *,
    call: LatentCall,
) -> LatentResults[jax.Array]:
    """Computes out and lse of rows, ``[sequences, rows, 512]`` and float32 ``[sequences, padded_rows]``, and parts.

    Those are float32 ``[2 · ranges, padded_rows, 512]`` and ``[2 · ranges, padded_rows]``.

    Args:
      query: ``[sequences, rows, 576]``, padded to a multiple of 8 rows for TMA: those beyond ``call.rows`` may hold
        anything, and so may their results.
      pages: ``[num_pages, page_size, 576]``.
      page_table: ``[sequences · columns]`` int32.
      lengths: ``[sequences]`` int32.
      sinks: float32 ``[padded_rows]``, the logarithm of the sum of the exponentials of a row's sinks.
      ranges: of `latent_ranges`.
    """
    dtype, float32 = query.dtype, jnp.float32

    def body(operands: LatentOperands[Ref], results: LatentResults[Ref], scratch: LatentScratch[Ring, Ref]) -> None:
        kernel = LatentKernel(call, dtype, operands, results, scratch)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == FIRST)(functools.partial(run_first_consumer, kernel))
        pl.when(warpgroup == SECOND)(functools.partial(run_second_consumer, kernel))
        pl.when(warpgroup == PRODUCER)(functools.partial(run_producer, kernel))

    whole = AttentionResults(
        jax.ShapeDtypeStruct((call.sequences, query.shape[1], VALUE_DIM), dtype),
        jax.ShapeDtypeStruct((call.sequences, call.padded_rows), float32),
    )
    parts = AttentionResults(
        jax.ShapeDtypeStruct((2 * call.ranges, call.padded_rows, VALUE_DIM), float32),
        jax.ShapeDtypeStruct((2 * call.ranges, call.padded_rows), float32),
    )
    return run_kernel(
        body,
        LatentOperands[Any](query, pages, page_table, lengths, sinks, ranges),
        LatentResults[Any](whole, parts if call.ranges > 1 else None),
        LatentPlan(dtype, call.cluster).scratch(),
        role="attend",
        num_ctas=call.ranges * call.clusters,
        warpgroups=WARPGROUPS,
        cluster=call.cluster,
    )
