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

One item of T steps; time runs to the right, and what stands below each other overlaps. L, R and r are the parts of C::

    producer       R0 r0 L0  Q  R1 r1 L1       R2 r2 L2         ...                              R0' r0' L0'  Q' ...
    first, MMA            S0        S1 P0·L0         S2 P1·L1   ...   P(T-1)·L(T-1)
    first, ALU               P0           P1 · αO          P2   ...                  O / l, lse -> store
    second, MMA                   P0·R0            P1·R1        ...   P(T-1)·R(T-1)
    second, ALU                           αO               αO   ...                  O / l -> store

S of step i and the left PV of step i−1 are issued together (Shah et al., "FlashAttention-3", 2024, section 3.2), so
that the softmax of step i runs beside MMAs of both consumers. The first latents of the next item are loaded while this
one ends, and its Q when the last S is complete.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

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
from tilewright.kernels.hopper.types import Condition, Ref, Scalar
from tilewright.kernels.paged_attention.hopper.latent_work import (
    BLOCK_K,
    CONSUMERS,
    HALF,
    LATENT_DIM,
    NORMALISER,
    VALUE_DIM,
    LatentCall,
    LatentPlan,
    LatentRanges,
    LatentScratch,
    LatentWork,
    part_of_item,
    sequences_of_range,
    work_of_item,
)

STEP_BITS = 24
"""Bits of the index of a step; lengths have 30, and a step has 64 keys."""

CHUNK = 64
"""Columns of V that are read and written at once where rows are cleared."""

FIRST, SECOND, PRODUCER = range(WARPGROUPS := CONSUMERS + 1)
"""The warpgroups: scores, softmax and the left half of O; the right half; loads."""

LEFT, RIGHT, REST = pl.ds(0, HALF), pl.ds(HALF, HALF), pl.ds(VALUE_DIM, LATENT_DIM - VALUE_DIM)
"""Columns of the parts of a latent, and of a query."""


class LatentOperands[Operand](NamedTuple):
    """Operands of `latent_kernel`, as arrays or references."""

    query: Operand
    pages: Operand
    page_table: Operand
    lengths: Operand
    sinks: Operand | None
    ranges: LatentRanges[Operand]


class LatentResults[Result](NamedTuple):
    """Results of `latent_kernel`.

    Attributes:
      whole: of rows, undefined for sequences that are cut.
      parts: of the cut sequences' items, for `latent_combine`; None if there is only one range.
    """

    whole: AttentionResults[Result]
    parts: AttentionResults[Result] | None


@dataclasses.dataclass(frozen=True, slots=True)
class LatentKernel:
    """The references of a warpgroup, for all items of its CTA."""

    call: LatentCall
    dtype: DTypeLike
    operands: LatentOperands[Ref]
    results: LatentResults[Ref]
    scratch: LatentScratch[Ring, Ref]


@dataclasses.dataclass(frozen=True, slots=True)
class LatentContext(LatentKernel):
    """Everything that a warpgroup role needs of an item: the rings count its steps, and its Q, from 0.

    Attributes:
      my_rows: rows of the sequence that this CTA has.
      zero: a 0 that is not a constant: JAX 0.12 refuses a slice that it can see to exceed an array.
    """

    work: LatentWork
    my_rows: pl.Slice
    zero: jax.Array

    @classmethod
    def of_item(cls, kernel: LatentKernel, work: LatentWork, number: Scalar, first: Scalar) -> Self:
        """The context of item ``number`` of this CTA, whose step 0 is step ``first`` of the rings of latents."""
        scratch = kernel.scratch
        return cls(
            call=kernel.call,
            dtype=kernel.dtype,
            operands=kernel.operands,
            results=kernel.results,
            scratch=scratch._replace(
                q_left=scratch.q_left.after(number),
                q_right=scratch.q_right.after(number),
                q_rest=scratch.q_rest.after(number),
                left=scratch.left.after(first),
                right=scratch.right.after(first),
                rest=scratch.rest.after(first),
            ),
            work=work,
            my_rows=pl.ds(work.row_tile * ROWS, ROWS),
            zero=lax.axis_index("warpgroup") * 0,
        )

    def part(self) -> jax.Array:
        """Index of the partial results, −1 without; read at the end of an item, as a register would be spilled."""
        return part_of_item(self.call, self.operands.ranges, self.operands.lengths, self.work.sequence)

    def page_of(self, step: Scalar) -> jax.Array:
        """Entry of the page table for a step; after the last step, that of the last one."""
        block = self.work.first + lax.min(step, self.work.total - 1)
        column = lax.min(lax.div(block, jnp.int32(self.call.blocks_per_page)), jnp.int32(self.call.columns - 1))
        return self.operands.page_table[self.work.sequence * self.call.columns + column]

    def row_of(self, step: Scalar) -> jax.Array:
        """First row of a step in its page."""
        return lax.rem(self.work.first + step, jnp.int32(self.call.blocks_per_page)) * BLOCK_K

    def exists(self, page: Scalar) -> Condition:
        """True where an entry of the page table is a page; others are masked."""
        return (page >= 0) & (page < self.call.num_pages)

    def visible_end(self, step: Scalar, page: Scalar) -> jax.Array:
        """One past the last key of a step that some row sees, counted from its first key."""
        return jnp.where(self.exists(page), self.work.visible_end - (self.work.first + step) * BLOCK_K, 0)


def for_each_item(kernel: LatentKernel, role: Callable[[LatentContext], None]) -> Scalar:
    """Calls the role of a warpgroup for each item of this CTA; returns the steps of all."""
    call, ranges, lengths = kernel.call, kernel.operands.ranges, kernel.operands.lengths
    sequence, count = sequences_of_range(call, ranges)

    def one(number: Scalar, first: Scalar) -> Scalar:
        work = work_of_item(call, ranges, lengths, sequence + number)
        role(LatentContext.of_item(kernel, work, number, first))
        return first + work.total

    return lax.fori_loop(0, count, one, jnp.int32(0))


# The producer.


def run_producer(kernel: LatentKernel) -> None:
    """Loads Q and latents of all items of this CTA."""
    plgpu.set_max_registers(NARROW_REGISTERS.producer, action="decrease")
    steps = for_each_item(kernel, produce_item)
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
    run_consumer(kernel, attend_left)


def attend_left(ctx: LatentContext, acc: Ref) -> None:
    """All steps of the first consumer in an item; ``acc`` is the left half of O."""
    scratch, work = ctx.scratch, ctx.work
    page = ctx.page_of(ctx.zero)
    carry = (*first_step(ctx, page), ctx.page_of(ctx.zero + 1))
    m, row_sum, _ = lax.fori_loop(1, work.total, functools.partial(left_step, ctx, acc), carry)
    last = work.total - 1
    # S of the last step, which was the last to read them, is complete.
    for ring in (scratch.q_left, scratch.q_right, scratch.q_rest):
        ring.release(0)
    plgpu.wgmma(acc, p_tile(ctx, last), scratch.left.get_mma_tile(last))
    scale, lse = normalised(ctx, m, row_sum)
    # Stored before the wait for the last PV, so that the second consumer has it in time. Threads write and read it: the
    # barrier orders them, and no async-proxy fence is needed. That of the next item is in the other slot, or later than
    # the second consumer's release of this one.
    slot = scratch.left.slot(last)
    scratch.scales[NORMALISER + slot, :] = scale
    plgpu.barrier_arrive(scratch.finished.at[slot])
    out = acc[...] * across(scale, HALF)
    scratch.rest.release(last)

    def store(results: AttentionResults[Ref], index: Scalar) -> None:
        results.lse.at[index, ctx.my_rows][...] = lse

    by_kind(ctx, store)
    store_half(ctx, out, LEFT, scratch.left)


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


def first_step(ctx: LatentContext, page: Scalar) -> tuple[jax.Array, jax.Array]:
    """S and softmax of step 0, with no PV in flight; returns m and l."""
    scratch, zero = ctx.scratch, ctx.zero

    def scores_alone(scores: Ref) -> jax.Array:
        for ring in (scratch.q_left, scratch.q_right, scratch.q_rest):
            ring.load_from_shared(0)
        issue_scores(ctx, scores, zero)
        return scores[...]

    scores = pl.run_scoped(scores_alone, plgpu.ACC((ROWS, BLOCK_K), jnp.float32))
    statistics = initial_statistics()
    # S has read it as K; the second consumer still reads it as V.
    scratch.right.release(zero)
    tile = softmax_tile(ctx, scores, zero, page, *statistics)
    store_p_to_smem(ctx, zero, tile)
    clear_masked_values(ctx, scratch.left, zero, page)
    return tile.m, tile.row_sum


def left_step(
    ctx: LatentContext, acc: Ref, step: Scalar, carry: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """S and softmax of a step, beside the left PV of the one before; the carry is m, l and the step's page."""
    m, row_sum, page = carry
    left, right, rest = ctx.scratch.left, ctx.scratch.right, ctx.scratch.rest
    next_page = ctx.page_of(step + 1)

    def scores_beside_pv(scores: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
        issue_scores(ctx, scores, step)
        # P from shared memory, although this consumer had it in registers: as an operand in registers that is also
        # stored it made ptxas serialise the wgmmas (C7513, docs/notes/serving_attention.md).
        plgpu.wgmma(acc, p_tile(ctx, step - 1), left.get_mma_tile(step - 1))
        # wait_n=1: S is complete, PV may still run.
        s = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        right.release(step)
        tile = softmax_tile(ctx, s, step, page, m, row_sum)
        # Before the wait for this consumer's PV: the second one's PV may begin, and runs beside it.
        store_p_to_smem(ctx, step, tile)
        plgpu.wgmma_wait(0)
        # This consumer's PV has read P of the step before, which lay in this stage; the second one releases it for
        # itself.
        rest.release(step - 1)
        left.release(step - 1)
        clear_masked_values(ctx, left, step, page)
        acc[...] = acc[...] * across(tile.alpha, HALF)
        return tile.m, tile.row_sum, next_page

    return pl.run_scoped(scores_beside_pv, plgpu.ACC((ROWS, BLOCK_K), jnp.float32))


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
    run_consumer(kernel, attend_right)


def attend_right(ctx: LatentContext, acc: Ref) -> None:
    """All steps of the second consumer in an item; ``acc`` is the right half of O."""
    scratch, right, rest = ctx.scratch, ctx.scratch.right, ctx.scratch.rest

    def add_pv(step: Scalar, page: Scalar) -> None:
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

    def one_step(step: Scalar, page: Scalar) -> jax.Array:
        next_page = ctx.page_of(step + 1)
        add_pv(step, page)
        right.release(step)
        return next_page

    last = ctx.work.total - 1
    page = lax.fori_loop(0, last, one_step, ctx.page_of(ctx.zero))
    add_pv(last, page)
    slot = right.slot(last)
    plgpu.barrier_wait(scratch.finished.at[slot])
    scale = plgpu.load(scratch.scales.at[NORMALISER + slot], layout=row_layout())
    store_half(ctx, acc[...] * across(scale, HALF), RIGHT, right)


# Both consumers.


def run_consumer(kernel: LatentKernel, attend: Callable[[LatentContext, Ref], None]) -> None:
    """Calls ``attend(ctx, acc)`` for each item of this CTA."""
    plgpu.set_max_registers(NARROW_REGISTERS.consumer, action="increase")

    def consume_item(ctx: LatentContext) -> None:
        pl.run_scoped(functools.partial(attend, ctx), plgpu.ACC((ROWS, HALF), jnp.float32))

    for_each_item(kernel, consume_item)


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


def store_half(ctx: LatentContext, out: jax.Array, columns: pl.Slice, ring: Ring) -> None:
    """Stores 256 columns of the output, and releases the last stage of a half of V.

    Args:
      out: normalised, ``[64, 256]`` float32.
      ring: of the half, whose last stage no MMA reads any more: the output waits there for its TMA store.
    """
    last = ctx.work.total - 1

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
