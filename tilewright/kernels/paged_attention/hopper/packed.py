"""Attention of packed queries over pages on Hopper: a warp-specialised kernel whose K and V come by TMA from pages.

A work item is one tile of queries and one key head: up to 128 / group tokens of one sequence, each with the ``group``
query heads that share the key head, so that K and V are loaded once for all of them. A CTA (a Pallas program) has one
item after another (`ChunkCall.rounds`). One producer warpgroup loads; two consumer warpgroups own 64 rows (``tokens``
tokens of each head) each. A step is a block of ``block_k`` keys: a part of one page, or several pages.

======  ===================================================  =====================  ==================================
symbol  meaning                                              shape                  where it lives
======  ===================================================  =====================  ==================================
Q       queries of the tile, row = head, then token          [128, dim]             SMEM: ``rows`` row-major, as TMA
                                                                                    brings it; ``q_tile`` swizzled
K, V    keys and values of a step                            [block_k, dim]         SMEM: ``k``, ``v``
S       QKᵀ; scaled and masked: the logits                   [64, block_k] float32  registers, accumulator of QKᵀ
P       exp2(logits · multiplier − m)                        [64, block_k]          registers, operand A of PV
m, l    running max of the logits in base 2, and sum of P    [64] float32           registers
alpha   exp2(m before the step − m): rescales l and O        [64] float32           registers
O       PV, summed over the steps                            [64, dim] float32      registers, accumulator of PV
bits    which of a block's pages are in the page table       one bit for each page  global memory, a scalar for a step
tree    which new tokens a row sees, if there is a mask      words of 32 keys       global memory, of `tree_rows`
======  ===================================================  =====================  ==================================

One item of T steps; time runs to the right, and what stands below each other overlaps (Shah et al., "FlashAttention-3",
2024, section 3.2)::

    producer        K0 Q          K1 V0      K2 V1      ...  K(T-1) V(T-2)    V(T-1)        K0' Q' ...
    consumer, MMA           QK0   QK1 PV0    QK2 PV1    ...  QK(T-1) PV(T-2)  PV(T-1)
    consumer, ALU   swizzle Q  P0    P1 · αO    P2 · αO ...         P(T-1) · αO      O / l, lse -> TMA store

Q of the next item is loaded as soon as both consumers have swizzled this one, its first K and V when stages are free.
Under ``ping_pong`` the consumers take turns to issue QKᵀ and PV, so that the softmax of one runs beside the MMAs of the
other (section 3.1).

Before PV of a block that does not consist of tokens, both consumers clear the rows of V that no query sees, half of the
block each. A tile of at most 64 rows, such as one token to decode, leaves the second consumer only this. It is bound by
memory bandwidth where full tiles are bound by the tensor cores, so that `ordered_work` starts tiles of both kinds side
by side.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.softmax import (
    AttentionResults,
    RowState,
    SoftmaxTile,
    initial_statistics,
    normaliser,
    online_softmax,
    row_lse,
    split_scale,
)
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, row_layout, store_unoptimised, tile_layout
from tilewright.kernels.hopper.turns import Turns
from tilewright.kernels.paged_attention.hopper.packed_work import (
    CONSUMERS,
    FIELDS,
    WORD,
    ChunkCall,
    ChunkPlan,
    ChunkScratch,
    TileWork,
)
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.pallas_types import Ref, Scalar

STEP_BITS = 24
"""Bits of the index of a step; lengths have 29, and a step has 128 keys."""

CHUNK = 64
"""Columns of V that are read and written at once where rows are cleared."""


class ChunkOperands[Operand](NamedTuple):
    """Operands of `chunk_kernel`, as arrays or references."""

    query: Operand
    key: Operand
    value: Operand
    table: Operand
    bits: Operand
    work: Operand
    tree: Operand | None


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkKernel:
    """The references and sizes of a warpgroup, for all items of its CTA.

    Attributes:
      warpgroup: index of the warpgroup: the consumers, then the producer.
    """

    call: ChunkCall
    plan: ChunkPlan
    operands: ChunkOperands[Ref]
    results: AttentionResults[Ref]
    scratch: ChunkScratch[Ring, Turns, Ref]
    warpgroup: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkContext(ChunkKernel):
    """Everything that the role of a warpgroup needs of an item: the rings count its steps from 0.

    Attributes:
      number: of the item among those of this CTA that have work.
      order_index: of the tile in the order of ``operands.work``.
      work: the tile, as it was read at the start.
      has_work: whether there is a tile at that index.
      steps: blocks of keys, at least one.
      first_bits: index in ``operands.bits`` of step 0.
      full_from, full_until: in these steps every row sees all keys of a block whose pages are all present.
      written_from, written_until: in these all keys of such a block are those of tokens.
      zero: a 0 that is not a constant: JAX 0.12 refuses a slice that it can see to exceed an array.
      my_rows: rows of the tile that this consumer owns.
    """

    number: Scalar
    kv_head: jax.Array
    order_index: jax.Array
    work: TileWork
    has_work: jax.Array
    steps: jax.Array
    first_bits: jax.Array
    full_from: jax.Array
    full_until: jax.Array
    written_from: jax.Array
    written_until: jax.Array
    zero: jax.Array
    my_rows: pl.Slice

    @classmethod
    def of_item(cls, kernel: ChunkKernel, item: Scalar, number: Scalar, first: Scalar) -> Self:
        """The context of an item, whose step 0 is step ``first`` of the CTA.

        ``tiles_at_once`` items with one key head are followed by those with the next one.
        """
        call, operands, scratch, warpgroup = kernel.call, kernel.operands, kernel.scratch, kernel.warpgroup
        block_k, at_once = call.block_k, call.tiles_at_once
        # Key heads alternate after as many tiles as are resident at a time, so that their K and V are read from L2.
        within = lax.rem(item, jnp.int32(at_once * call.kv_heads))
        kv_head = lax.div(within, jnp.int32(at_once))
        order_index = lax.div(item, jnp.int32(at_once * call.kv_heads)) * at_once + lax.rem(within, jnp.int32(at_once))
        work = read_work(call, operands, order_index)
        block, steps = work.first(call), work.total(call)
        return cls(
            call=call,
            plan=kernel.plan,
            operands=operands,
            results=kernel.results,
            scratch=scratch._replace(k=scratch.k.after(first), v=scratch.v.after(first)),
            warpgroup=warpgroup,
            number=number,
            kv_head=kv_head,
            order_index=order_index,
            work=work,
            has_work=work.tokens > 0,
            steps=steps,
            first_bits=work.sequence * call.blocks + block,
            full_from=lax.div(work.all_low + (block_k - 1), jnp.int32(block_k)) - block,
            full_until=lax.div(work.all_high, jnp.int32(block_k)) - block,
            written_from=lax.div(work.low + (block_k - 1), jnp.int32(block_k)) - block,
            written_until=lax.div(work.written, jnp.int32(block_k)) - block,
            zero=warpgroup * 0,
            my_rows=pl.ds(warpgroup * ROWS, ROWS),
        )

    def work_again(self) -> TileWork:
        """The tile, read again: values that only few blocks need would stay in registers and make others spill."""
        return read_work(self.call, self.operands, self.order_index)

    def first_key(self, work: TileWork, step: Scalar) -> jax.Array:
        """Position of the first key of a step."""
        return jnp.asarray((work.first(self.call) + step) * self.call.block_k)

    def wait_turn(self) -> None:
        """Waits for this consumer's turn to issue MMAs, under ``ping_pong``."""
        if self.call.ping_pong:
            self.scratch.turns.wait(self.warpgroup)

    def pass_turn(self) -> None:
        """Gives the turn to the other consumer, under ``ping_pong``."""
        if self.call.ping_pong:
            self.scratch.turns.pass_on(self.warpgroup)

    def page_bits(self, step: Scalar) -> jax.Array:
        """Bits of the present pages of a step; after the last step, those of the last one."""
        return self.operands.bits[self.first_bits + lax.min(step, self.steps - 1)]

    def is_full(self, step: Scalar, bits: jax.Array) -> jax.Array:
        """True where every row sees all keys of a step."""
        return self._within(step, self.full_from, self.full_until) & (bits == self.call.all_pages)

    def is_written(self, step: Scalar, bits: jax.Array) -> jax.Array:
        """True where all keys of a step are those of tokens, whether or not a row sees them."""
        return self._within(step, self.written_from, self.written_until) & (bits == self.call.all_pages)

    def _within(self, step: Scalar, begin: Scalar, end: Scalar) -> jax.Array:
        # Without a window the first step is 0, and no register holds it.
        return jnp.asarray(step < end if self.call.left is None else (step >= begin) & (step < end))


def read_work(call: ChunkCall, operands: ChunkOperands[Ref], order_index: Scalar) -> TileWork:
    """The tile at an index of the order, as scalars."""
    return TileWork(*(operands.work[field * call.order_length + order_index] for field in range(FIELDS)))


def for_each_item(kernel: ChunkKernel, role: Callable[[ChunkContext], None]) -> None:
    """Calls the role of a warpgroup for each item of this CTA that has a tile."""
    rounds, items = kernel.call.rounds, kernel.call.items
    begin, count = rounds.of(lax.axis_index("program"), items)

    def one(index: Scalar, carry: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        number, first = carry
        ctx = ChunkContext.of_item(kernel, begin + index * rounds.programs, number, first)
        pl.when(ctx.has_work)(lambda: role(ctx))
        return number + ctx.has_work.astype(jnp.int32), first + jnp.where(ctx.has_work, ctx.steps, 0)

    lax.fori_loop(0, count, one, (jnp.int32(0), jnp.int32(0)))


# The producer.


def run_producer(kernel: ChunkKernel) -> None:
    """Loads Q, K and V of all items of this CTA, and gives the first turn to consumer 0."""
    plgpu.set_max_registers(kernel.plan.registers.producer, action="decrease")
    if kernel.call.ping_pong:
        kernel.scratch.turns.begin()
    for_each_item(kernel, produce_item)


def produce_item(ctx: ChunkContext) -> None:
    """Loads Q, and K and V of all steps of the tile."""
    call, operands, scratch = ctx.call, ctx.operands, ctx.scratch

    def load_both(step: Scalar, _: None) -> None:
        # V lags by a step: the consumers release K of a step and V of the one before, in this order.
        load_block(ctx, scratch.k, operands.key, step)
        load_block(ctx, scratch.v, operands.value, step - 1)

    def load_queries(piece: Scalar, _: None) -> None:
        """Loads one head of a warpgroup's tokens. Rows that a tile does not have are filled with any tokens."""
        half, head = lax.div(piece, jnp.int32(call.group)), lax.rem(piece, jnp.int32(call.group))
        # Clamped, as the second consumer's tokens may begin after the last one; TMA fills what is out of bounds with
        # zeros.
        token = lax.min(ctx.work.token + half * call.tokens, jnp.int32(operands.query.shape[0] - 1))
        source = operands.query.at[pl.ds(token, call.tokens), ctx.kv_head * call.group + head]
        target = scratch.rows.at[pl.ds(half * ROWS + head * call.tokens, call.tokens)]
        plgpu.copy_gmem_to_smem(source, target, scratch.queries_ready)

    # K of step 0 first: it is on its way while the pieces of Q are issued.
    load_block(ctx, scratch.k, operands.key, ctx.zero)
    pl.when(ctx.number > 0)(lambda: plgpu.barrier_wait(scratch.queries_free))
    lax.fori_loop(0, ctx.plan.pieces, load_queries, None)
    lax.fori_loop(1, ctx.steps, load_both, None)
    load_block(ctx, scratch.v, operands.value, ctx.zero + (ctx.steps - 1))


def load_block(ctx: ChunkContext, ring: Ring, ref: Ref, step: Scalar) -> None:
    """Loads K or V of a step: a part of one page, or several pages one below the other."""
    call, work = ctx.call, ctx.work
    start = ctx.first_key(work, step)
    column = work.sequence * call.columns + lax.div(start, jnp.int32(call.page_size))
    row = lax.rem(start, jnp.int32(call.page_size)) if call.page_size > call.block_k else ctx.zero
    # An absent page has number 0 in ``table`` (`present_pages`): it is copied nevertheless, because the stage's barrier
    # counts as many copies in each step, and its keys are masked.
    pages = [ctx.operands.table[column + number] for number in range(call.pages_per_block)]
    ring.load_from_dram(step, *(ref.at[page, pl.ds(row, call.page_rows), ctx.kv_head] for page in pages))


# The consumers.


def run_consumer(kernel: ChunkKernel) -> None:
    """Computes this warpgroup's rows of all items of this CTA."""
    plgpu.set_max_registers(kernel.plan.registers.consumer, action="increase")
    for_each_item(kernel, consume_item)
    # TMA must have read the last output before the CTA exits.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if kernel.call.ping_pong:
        kernel.scratch.turns.take_last(kernel.warpgroup == 0, 0)


def consume_item(ctx: ChunkContext) -> None:
    """Computes this warpgroup's rows of the tile, or helps the other consumer if there are none."""

    @pl.when(ctx.work.tokens > ctx.warpgroup * ctx.call.tokens)
    def _() -> None:
        pl.run_scoped(functools.partial(attend, ctx), plgpu.ACC((ROWS, ctx.plan.dim), jnp.float32))

    @pl.when(ctx.work.tokens <= ctx.warpgroup * ctx.call.tokens)
    def _() -> None:
        # Not idle: the rings count the releases of both consumers, and `cleared` the arrivals of both.
        attend_without_rows(ctx)


def attend(ctx: ChunkContext, acc: Ref) -> None:
    """Computes and stores out and lse of this warpgroup's rows; ``acc`` is O."""
    k_ring, v_ring = ctx.scratch.k, ctx.scratch.v
    tile_shape = ROWS, ctx.call.block_k

    def qk_alone(scores: Ref) -> jax.Array:
        k_ring.load_from_shared(ctx.zero)
        ctx.wait_turn()
        issue_qk(ctx, scores, ctx.zero)
        ctx.pass_turn()
        return scores[...]

    # wgmma reads Q swizzled. TMA cannot swizzle a head's few rows, so Q passes through registers once.
    swizzle_queries(ctx)
    scores = pl.run_scoped(qk_alone, plgpu.ACC(tile_shape, jnp.float32))
    k_ring.release(ctx.zero)
    bits = ctx.page_bits(ctx.zero)
    tile = softmax_tile(ctx, scores, ctx.zero, bits, *initial_statistics())
    # Bits are loaded one step ahead: the softmax need not wait for them.
    carry = tile.state, ctx.page_bits(ctx.zero + 1)
    (p, m, row_sum), _ = lax.fori_loop(1, ctx.steps, functools.partial(attend_step, ctx, acc), carry)
    # The last PV has no QKᵀ to run beside.
    wait_values(ctx, ctx.steps - 1, ctx.page_bits(ctx.steps - 1))
    plgpu.wgmma(acc, p, v_ring.get_mma_tile(ctx.steps - 1))
    out = acc[...]
    v_ring.release(ctx.steps - 1)
    store_rows(ctx, out, m, row_sum)


def attend_step(
    ctx: ChunkContext, acc: Ref, step: Scalar, carry: tuple[RowState, jax.Array]
) -> tuple[RowState, jax.Array]:
    """QKᵀ and softmax of a step, beside PV of the one before; the carry is the state and the bits of the step."""
    state, bits = carry
    k_ring, v_ring = ctx.scratch.k, ctx.scratch.v
    # Loaded at the top, so that their latency hides behind the wait for K.
    bits_before, bits_after = ctx.page_bits(step - 1), ctx.page_bits(step + 1)

    def qk_beside_pv(scores: Ref) -> tuple[RowState, jax.Array]:
        k_ring.load_from_shared(step)
        ctx.wait_turn()
        issue_qk(ctx, scores, step)
        # Before PV, although it belongs to this turn: the consumers may meet where rows of V are cleared. PV is issued
        # before the other one has seen its turn, unless it has to wait for V.
        ctx.pass_turn()
        # After the issue of QKᵀ, which runs while rows of V are cleared.
        wait_values(ctx, step - 1, bits_before)
        plgpu.wgmma(acc, state.p, v_ring.get_mma_tile(step - 1))
        # wait_n=1: QKᵀ is complete, PV may still run.
        s = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        k_ring.release(step)
        tile = softmax_tile(ctx, s, step, bits, state.m, state.row_sum)
        plgpu.wgmma_wait(0)
        v_ring.release(step - 1)
        acc[...] = acc[...] * across(tile.alpha, ctx.plan.dim)
        return tile.state, bits_after

    return pl.run_scoped(qk_beside_pv, plgpu.ACC((ROWS, ctx.call.block_k), jnp.float32))


def attend_without_rows(ctx: ChunkContext) -> None:
    """Releases the slots of all steps, and clears this warpgroup's half of V where that is needed."""
    k_ring, v_ring = ctx.scratch.k, ctx.scratch.v

    plgpu.barrier_wait(ctx.scratch.queries_ready)
    plgpu.barrier_arrive(ctx.scratch.queries_free)

    def one_step(step: Scalar, bits: jax.Array) -> jax.Array:
        bits_after = ctx.page_bits(step + 1)
        ctx.wait_turn()
        ctx.pass_turn()
        k_ring.load_from_shared(step)
        k_ring.release(step)
        wait_values(ctx, step, bits)
        v_ring.release(step)
        return bits_after

    lax.fori_loop(0, ctx.steps, one_step, ctx.page_bits(ctx.zero))


def swizzle_queries(ctx: ChunkContext) -> None:
    """Waits for Q, and copies this warpgroup's rows to where wgmma reads them."""
    plgpu.barrier_wait(ctx.scratch.queries_ready)
    # Each consumer copies its own rows, and its MMAs read these only: no barrier with the other one.
    rows = plgpu.load(ctx.scratch.rows.at[ctx.my_rows], layout=tile_layout(), optimized=False)
    # No MMA reads the tile of the item before any more: they have been waited for.
    ctx.scratch.q_tile.at[ctx.my_rows][...] = rows
    # One fence for two: MMAs read what was written, and TMA may write what was read.
    plgpu.commit_smem()
    plgpu.barrier_arrive(ctx.scratch.queries_free)


def issue_qk(ctx: ChunkContext, scores: Ref, step: Scalar) -> None:
    """Issues S = QKᵀ of a step, whose K must have arrived."""
    # The descriptors of Q do not change from step to step; the compiler would keep all of them in registers and spill
    # others: indexing Q by a zero that depends on the step has them recomputed.
    zero = opaque_zero(step, STEP_BITS)
    rows = pl.ds((ctx.warpgroup + zero) * ROWS, ROWS)
    plgpu.wgmma(scores, ctx.scratch.q_tile.at[rows], ctx.scratch.k.get_mma_tile(step, transposed=True))


def softmax_tile(
    ctx: ChunkContext, scores: jax.Array, step: Scalar, bits: jax.Array, m: jax.Array, row_sum: jax.Array
) -> SoftmaxTile:
    """P of a step in the dtype of V, with alpha and the new m and l; ``scores`` is S."""
    early_scale, multiplier = split_scale(ctx.call.softmax_scale)
    logits = scores if early_scale == 1.0 else scores * early_scale
    logits = lax.cond(
        ctx.is_full(step, bits), lambda x: x, lambda x: jnp.where(visible(ctx, step, bits), x, -jnp.inf), logits
    )
    # Guarded: absent pages and windows give rows that have not seen a visible key yet.
    tile = online_softmax(logits, multiplier, m, row_sum)
    return tile._replace(p=tile.p.astype(ctx.plan.dtype))


def visible(ctx: ChunkContext, step: Scalar, bits: jax.Array) -> jax.Array:
    """The mask of a step, ``[64, block_k]``, True where a key is visible."""
    call, block_k = ctx.call, ctx.call.block_k
    # Bounds are per row and take two registers; for differences the compiler would keep every element.
    work = ctx.work_again()
    end = visible_end(ctx, work, step, bits)
    key = lax.broadcast_in_dim(masked_absent(ctx, iota(block_k, 1), bits), (ROWS, block_k), [1])
    row = lax.rem(iota(ROWS, 0), jnp.int32(call.tokens)) + (
        ctx.warpgroup * call.tokens + (work.position - ctx.first_key(work, step))
    )
    mask = key < across(jnp.minimum(row + ((FAR if call.right is None else call.right) + 1), end), block_k)
    if call.left is not None:
        mask &= key >= across(jnp.maximum(row - call.left, work.low - ctx.first_key(work, step)), block_k)
    if call.mask_words:
        mask &= tree_visible(ctx, step)
    return mask


def tree_visible(ctx: ChunkContext, step: Scalar) -> jax.Array:
    """The bits of a step of ``tree_mask``, ``[64, block_k]``, True for what was in the cache before."""
    call, block_k, work = ctx.call, ctx.call.block_k, ctx.work_again()
    assert ctx.operands.tree is not None
    column = iota(block_k, 1)
    chunk, bit = column >> 5, lax.broadcast_in_dim(column & 31, (ROWS, block_k), [1])
    first = lax.div(ctx.first_key(work, step), jnp.int32(WORD)) - call.first_word(work)
    seen = jnp.zeros((ROWS, block_k), jnp.int32)
    for number in range(block_k // WORD):
        index = first + number
        inside = lax.clamp(jnp.int32(0), index, jnp.int32(call.mask_words - 1))
        words = plgpu.load(ctx.operands.tree.at[work.tile, ctx.warpgroup, inside], layout=row_layout(), optimized=False)
        # Before the words all keys are those of the cache, and behind them none has a bit.
        words = (words & jnp.where(index == inside, -1, 0)) | jnp.where(index < 0, -1, 0)
        is_number = lax.broadcast_in_dim(chunk == number, (ROWS, block_k), [1])
        seen = jnp.where(is_number, across(words, block_k), seen)
    return (lax.shift_right_logical(seen, bit) & 1) == 1


def iota(size: int, axis: int) -> jax.Array:
    """Indices along an axis of an accumulator; each thread has those of its elements."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=tile_layout().reduce(1 - axis))


def masked_absent(ctx: ChunkContext, key: jax.Array, bits: jax.Array) -> jax.Array:
    """Indices of keys in their block, those of absent pages beyond every bound."""
    call = ctx.call
    if call.pages_per_block == 1:
        return key
    page = lax.shift_right_logical(key, jnp.int32(call.page_rows.bit_length() - 1))
    return jnp.where((lax.shift_right_logical(bits, page) & 1) == 1, key, FAR)


def visible_end(ctx: ChunkContext, work: TileWork, step: Scalar, bits: jax.Array) -> jax.Array:
    """One past the last key of a step that some row sees, counted from the first key of its block."""
    end = work.high - ctx.first_key(work, step)
    return jnp.where(bits == 1, end, 0) if ctx.call.pages_per_block == 1 else end


def wait_values(ctx: ChunkContext, step: Scalar, bits: jax.Array) -> None:
    """Waits for V of a step, and clears its rows that are no token's: they may hold anything, and 0 · NaN is NaN."""
    ctx.scratch.v.load_from_shared(step)

    @pl.when(jnp.logical_not(ctx.is_written(step, bits)))
    def _() -> None:
        # Both consumers branch by the same scalars, so they meet at `cleared` in the same steps.
        clear_masked_values(ctx, step, bits)


def clear_masked_values(ctx: ChunkContext, step: Scalar, bits: jax.Array) -> None:
    """Zeroes masked rows in this consumer's half of V, and waits for the other consumer to have done the same."""
    scratch = ctx.scratch
    work = ctx.work_again()
    # One half for each consumer, even if one of them has no rows: PV then waits for half as many stores.
    half = ctx.call.block_k // CONSUMERS
    rows = pl.ds(ctx.warpgroup * half, half)
    for column in range(0, ctx.plan.dim, CHUNK):
        chunk = scratch.v.get_mma_tile(step).at[rows, pl.ds(column, CHUNK)]
        values = plgpu.load(chunk, layout=tile_layout())
        key = plgpu.broadcasted_iota(jnp.int32, (half, CHUNK), 0, layout=tile_layout()) + ctx.warpgroup * half
        key = masked_absent(ctx, key, bits)
        some_row_sees = (key < visible_end(ctx, work, step, bits)) & (key >= work.low - ctx.first_key(work, step))
        chunk[...] = jnp.where(some_row_sees, values, jnp.zeros_like(values))
    # wgmma reads V through the async proxy, which needs a fence; it reads the other consumer's half, too.
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.cleared)
    plgpu.barrier_wait(scratch.cleared)


def store_rows(ctx: ChunkContext, out: jax.Array, m: jax.Array, row_sum: jax.Array) -> None:
    """Normalises O, and stores out of the tokens that the tile has, and lse of all rows.

    Output rows are staged row-major, and stored by one TMA copy for each head; where the tile has fewer tokens than
    rows, by one for each row.
    """
    call, results = ctx.call, ctx.results
    work = ctx.work_again()
    scale = normaliser(row_sum)
    staged = ctx.scratch.out.at[ctx.my_rows]
    # TMA must have read the output of the item before.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    store_unoptimised(staged, (out * across(scale, ctx.plan.dim)).astype(ctx.plan.dtype))
    plgpu.commit_smem()
    token, head = work.token + ctx.warpgroup * call.tokens, ctx.kv_head * call.group
    my_tokens = lax.min(work.tokens - ctx.warpgroup * call.tokens, jnp.int32(call.tokens))

    def store_tokens(begin: Scalar, size: int) -> None:
        def store_head(number: Scalar, _: None) -> None:
            target = results.out.at[pl.ds(token + begin, size), head + number]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(number * call.tokens + begin, size)], target)

        lax.fori_loop(0, call.group, store_head, None)

    @pl.when(my_tokens == call.tokens)
    def _() -> None:
        store_tokens(ctx.zero, call.tokens)

    @pl.when(my_tokens < call.tokens)
    def _() -> None:
        # A copy has a static size, and must not write the tokens after these: they belong to another tile.
        lax.fori_loop(0, my_tokens, lambda begin, _: store_tokens(begin, 1), None)

    lse = row_lse(m, row_sum)
    # All rows are stored, as tiles have their own rows of lse; rows without a token are not read.
    results.lse.at[work.tile, ctx.kv_head, ctx.warpgroup][...] = lse


# The launch.


def chunk_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    bits: jax.Array,
    work: jax.Array,
    tree: jax.Array | None = None,
    *,
    call: ChunkCall,
) -> AttentionResults[jax.Array]:
    """Computes out and lse of tokens, ``[tokens, heads, dim]``, and of rows, float32 ``[tiles, kv_heads, 2, 64]``.

    The results of tokens without a tile, and of rows beyond a tile's tokens, are undefined.

    Args:
      query: ``[tokens, heads, dim]``.
      key, value: ``[num_pages, page_size, kv_heads, dim]``.
      table, bits: of `present_pages`.
      work: of `ordered_work`.
      tree: of `tree_rows`, if there is a mask.
    """
    plan = call.plan(query.dtype, query.shape[2])

    def body(
        operands: ChunkOperands[Ref], results: AttentionResults[Ref], scratch: ChunkScratch[Ring, Turns, Ref]
    ) -> None:
        # Nothing is shared between CTAs.
        warpgroup = lax.axis_index("warpgroup")
        kernel = ChunkKernel(call, plan, operands, results, scratch, warpgroup)
        pl.when(warpgroup < CONSUMERS)(lambda: run_consumer(kernel))
        pl.when(warpgroup == CONSUMERS)(lambda: run_producer(kernel))

    operands = ChunkOperands[object](query, key, value, table, bits, work, tree)
    results = AttentionResults(
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((call.tiles, call.kv_heads, CONSUMERS, ROWS), jnp.float32),
    )
    # An SM that has a decoded token computes no chunk meanwhile: with a CTA for each item both kinds together took 574
    # µs where chunks alone took 413 and decoded tokens 307 (docs/notes/serving_attention.md).
    return run_kernel(
        body,
        operands,
        results,
        plan.scratch(),
        role="attend",
        num_ctas=call.rounds.grid(call.items),
        warpgroups=CONSUMERS + 1,
    )
