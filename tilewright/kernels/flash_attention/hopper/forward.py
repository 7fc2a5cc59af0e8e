"""The forward pass on Hopper: a warp-specialised kernel after FlashAttention-3 (Shah et al., 2024).

A CTA (a Pallas program) has one producer warpgroup, which loads by TMA through rings of shared-memory stages, and two
or three consumer warpgroups, each of which owns 64 query rows. A work item is a tile of ``block_q`` queries of one
head; a step is one of its KV iterations.

======  =====================================================  =====================  ================================
symbol  meaning                                                shape                  where it lives
======  =====================================================  =====================  ================================
Q       queries of an item                                     [block_q, head_dim]    SMEM, ``q``
K, V    keys and values of a step                              [block_k, ·_dim]       SMEM, ``k`` and ``v``
S       QKᵀ; with scale, bias, soft cap and mask: the logits   [64, block_k] float32  registers, accumulator of QKᵀ
P       exp2(logits · multiplier − m), zero where dropped out  [64, block_k]          registers, operand A of PV
m       running maximum of the logits, in base 2; beside a     [64] float32           registers
        bias in natural units (``natural_maximum``)
l       running sum of P before dropout (``row_sum``)          [64] float32           registers
alpha   exp2(m before the step − m): rescales l and O          [64] float32           registers
O       PV, summed over the steps and not yet divided by l     [64, value_dim] f32    registers, accumulator of PV
lse     log-sum-exp of the logits, (m + log2 l) · ln 2         [64] float32           SMEM, then global memory
======  =====================================================  =====================  ================================

One work item of T steps; time runs to the right, and what stands below each other overlaps::

    producer        K0 Q    K1 V0      K2 V1      ...  K(T-1) V(T-2)    V(T-1)
    consumer, MMA   QK0     QK1 PV0    QK2 PV1    ...  QK(T-1) PV(T-2)  PV(T-1)
    consumer, ALU       P0     P1 · αO    P2 · αO ...         P(T-1) · αO      O / l, lse -> TMA store

QKᵀ of step i and PV of step i−1 are issued together (section 3.2 of the paper); the softmax of step i waits for QKᵀ
alone, and so runs beside PV of step i−1, after which alpha rescales O. The producer runs ahead by the stages of the
rings. Between consumers ``ping_pong`` orders the issue of MMAs, so that the softmax of one runs beside the MMAs of
another (section 3.1). Where shared memory allows (``ForwardPlan.ahead``), also the first step of the next item runs
beside the last PV of this one::

    consumer, MMA   ... QK(T-1) PV(T-2)    PV(T-1) QK0'         QK1' PV0'   ...
    consumer, ALU              P(T-1) · αO        P0' · O / l        P1' · αO'
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.dropout import draw_kept, zero_dropped
from tilewright.kernels.flash_attention.hopper.forward_context import (
    ForwardCall,
    ForwardContext,
    ForwardOperands,
    QueuedItem,
    for_each_item,
)
from tilewright.kernels.flash_attention.hopper.params import HopperForwardParams
from tilewright.kernels.flash_attention.hopper.plans import ForwardPlan, ForwardScratch
from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, Tables, TileSchedule, row_steps
from tilewright.kernels.flash_attention.hopper.scores import (
    ScoreArrays,
    ScoreOptions,
    TileCoord,
    biased_and_capped,
    initial_scores,
    masked_logits,
    without_hidden_rows,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.panels import mma, store_tile
from tilewright.kernels.hopper.ring import Ring, when
from tilewright.kernels.hopper.schedule import (
    STEPS_OF_RESIDENT_KEYS,
    even_lists,
    fewest_at_once,
    item_by_arithmetic,
    program_lists,
    program_order,
)
from tilewright.kernels.hopper.softmax import (
    LOG2E,
    AttentionResults,
    RowState,
    SoftmaxTile,
    initial_statistics,
    online_softmax,
)
from tilewright.kernels.hopper.tiles import ROWS, across, opaque_zero, tile_layout
from tilewright.kernels.hopper.turns import Turns
from tilewright.kernels.pallas_types import Ref, Scalar

CACHED_KEYS_AND_VALUES = 24 << 20
"""Bytes of keys and values that are worked on at a time: about half of the L2 cache."""

SECTOR_BYTES = 32
"""Bytes of a sector, the unit in which the L2 cache is filled."""


# The producer.


def run_producer(ctx: ForwardContext) -> None:
    """Loads Q, K and V of all items of this CTA, and gives the first turn of the ping-pong to consumer 0."""
    plgpu.set_max_registers(REGISTERS[ctx.call.params.consumers].producer, action="decrease")
    if ctx.call.params.ping_pong:
        ctx.scratch.turns.begin()
    # No drain at the end: without a cluster no other CTA writes to this one's shared memory, and the consumers have
    # waited for every load.
    for_each_item(ctx, functools.partial(produce_item, ctx), lambda _: jnp.int32(0))


def produce_item(ctx: ForwardContext, queued: QueuedItem, first: Scalar) -> Scalar:
    """Loads the tiles of an item, whose step 0 is step ``first`` of the rings; returns that of the next item."""
    operands, scratch = ctx.operands, ctx.scratch
    block_q, block_k = ctx.call.params.block_q, ctx.call.params.block_k
    work = ctx.decode(queued.item)
    kv_head = lax.div(work.head, jnp.int32(ctx.call.group))

    def load(ring: Ring, ref: Ref, step: Scalar) -> None:
        rows = pl.ds(work.steps.tile(step) * block_k, block_k)
        ring.load_from_dram(first + step, ref.at[work.batch, rows, kv_head])

    def load_both(step: Scalar, _: None) -> None:
        # V lags by a step: the consumers release K of a step and V of the one before, in this order.
        load(scratch.k, operands.key, step)
        load(scratch.v, operands.value, step - 1)
        # Last: its stage is free only when the softmax of the step before has begun.
        load_bias(step)

    def load_bias(step: Scalar) -> None:
        if scratch.bias is None:
            return
        for consumer in range(ctx.call.params.consumers):
            q_start = work.q_tile * block_q + consumer * ROWS
            coord = TileCoord(work.batch, work.head, q_start, work.steps.tile(step) * block_k, (ROWS, block_k), 0)
            ctx.bias_tiles.load(first + step, consumer, operands.arrays.bias, coord)

    def load_rest() -> None:
        lax.fori_loop(1, work.steps.total, load_both, None)
        load(scratch.v, operands.value, ctx.program * 0 + (work.steps.total - 1))

    # `program * 0` is not a constant: JAX 0.12 refuses a slice that it sees to hang over the end of a short array.
    when(queued.loads, lambda: load(scratch.k, operands.key, ctx.program * 0))
    # K first, then Q: with one stage of Q the wait for its release must not hold up a K whose stage is free.
    queries = operands.query.at[work.batch, pl.ds(work.q_tile * block_q, block_q), work.head]
    scratch.q.load_from_dram(queued.index, queries)
    load_bias(ctx.program * 0)
    when(queued.loads, load_rest)
    # The counter of K and V stands still over items that find theirs in the rings.
    after = first + work.steps.total
    return after if queued.loads is True else jnp.where(queued.loads, after, first)


# The consumers.


def run_consumer(ctx: ForwardContext) -> None:
    """Computes out and lse of this warpgroup's 64 rows of every item of this CTA."""
    call, params = ctx.call, ctx.call.params
    plgpu.set_max_registers(REGISTERS[params.consumers].consumer, action="increase")
    if call.plan.ahead:
        overlapped_items = functools.partial(consume_items_overlapped, ctx)
        # One accumulator for all items: the PV of one is still in flight when QKᵀ of the next is issued.
        pl.run_scoped(overlapped_items, plgpu.ACC((ROWS, call.value_dim), jnp.float32))
    else:
        for_each_item(ctx, functools.partial(consume_item, ctx), lambda _: jnp.int32(0))
    # TMA must have read the last output before the CTA exits.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if params.ping_pong:
        # Every consumer has taken as many turns, so the last one has passed its last turn on to consumer 0.
        ctx.scratch.turns.take_last(ctx.warpgroup == 0, 0)


def initialize_s(ctx: ForwardContext, item: Scalar, step: Scalar, scores: Ref) -> None:
    """Starts S from a bias of positions, if there is one."""
    options, arrays = ctx.call.options, ctx.operands.arrays
    start = initial_scores(options, arrays, lambda: score_coord(ctx, item, step))
    if start is not None:
        scores[...] = start


def issue_qk(ctx: ForwardContext, q_tile: Ref, step: Scalar, scores: Ref) -> None:
    """Issues S = QKᵀ of a step of the rings, whose K must have arrived."""
    mma(scores, q_tile.at[ctx.my_rows], ctx.scratch.k.get_mma_tile(step, transposed=True))


def issue_pv(ctx: ForwardContext, acc: Ref, p: jax.Array, queued: QueuedItem, step: Scalar) -> None:
    """Waits for V of a step of the rings, and issues O += PV."""
    when(queued.loads, lambda: ctx.scratch.v.load_from_shared(step))
    mma(acc, p, ctx.scratch.v.get_mma_tile(step))


def score_coord(ctx: ForwardContext, item: Scalar, step: Scalar) -> TileCoord:
    """Coordinates of S of a step of an item."""
    work, block_k = ctx.decode(item), ctx.call.params.block_k
    return TileCoord(
        work.batch, work.head, ctx.q_start(work), work.steps.tile(step) * block_k, (ROWS, block_k), q_axis=0
    )


def draw_bits(ctx: ForwardContext, item: Scalar, step: Scalar) -> jax.Array | None:
    """The dropout's bits of a step, drawn while MMAs are in flight; None without dropout."""
    return draw_kept(ctx.call.options, ctx.operands.arrays, score_coord(ctx, item, step))


def release_step(ctx: ForwardContext, ring: Ring, step: Scalar) -> None:
    """Releases K or V of a step, unless it stays for the items after this one."""
    if not ctx.call.resident_steps:
        ring.release(step)


def release_item(ctx: ForwardContext, ring: Ring, queued: QueuedItem, first: Scalar) -> None:
    """Releases K or V of all steps of an item at once, where they stayed for it and no item after it needs them."""

    def release() -> None:
        for step in range(ctx.call.resident_steps):
            ring.release(first + step)

    if ctx.call.resident_steps:
        when(queued.frees, release)


def next_first(ctx: ForwardContext, queued: QueuedItem, first: Scalar) -> jax.Array:
    """Step 0 of the next item in the rings, from that of this item."""
    if ctx.call.resident_steps:
        return jnp.where(queued.frees, first + ctx.call.resident_steps, first)
    return jnp.asarray(first + ctx.decode(queued.item).steps.total)


def softmax_tile(
    ctx: ForwardContext,
    scores: jax.Array,
    bits: jax.Array | None,
    item: Scalar,
    step: Scalar,
    m: jax.Array,
    row_sum: jax.Array,
    masked: bool | None,
    bias: jax.Array | None,
) -> SoftmaxTile:
    """P of a step of an item, in the dtype of V but for dropout, with alpha and the new m and l.

    Args:
      scores: S, ``[64, block_k]``.
      bits: of `draw_bits`.
      bias: of ``ForwardContext.read_bias``.
      masked: whether the step needs the mask, None if that is known on the device only.
    """
    call, options, arrays = ctx.call, ctx.call.options, ctx.operands.arrays
    work = ctx.decode(item)
    coord = score_coord(ctx, item, step)
    logits = scores
    if not options.plain:
        logits, _ = biased_and_capped(scores, options, arrays, coord, bias)
    # One loop with a branch, not a loop for masked and one for other steps: ptxas serialises the wgmmas of two (C7513).
    needs_mask = step < work.steps.masked if masked is None else masked
    logits = masked_logits(logits, needs_mask, options, arrays, coord)
    tile = online_softmax(logits, options.multiplier, m, row_sum, call.guarded, options.natural_maximum)
    # With dropout P stays in float32 here: bits are tested on the unrounded value, and `rounded_state` rounds it.
    p = tile.p
    if bits is not None:
        return tile._replace(p=zero_dropped(p, bits, coord))
    return tile._replace(p=p.astype(call.plan.dtype))


def rounded_state(ctx: ForwardContext, tile: SoftmaxTile) -> RowState:
    """The state after a step, with P in the dtype of V.

    With dropout P is rounded here, behind the wait for PV: what `softmax_tile` selects ptxas does not move behind it,
    and would serialise the MMAs (C7513), because it is an operand of the next one.
    """
    return tile.state._replace(p=tile.p.astype(ctx.call.plan.dtype))


def first_step(ctx: ForwardContext, queued: QueuedItem, step: Scalar) -> RowState:
    """QKᵀ and softmax of step 0 of an item, with no PV in flight; ``step`` is that of the rings."""
    q_ring, k_ring = ctx.scratch.q, ctx.scratch.k
    tile_shape = ROWS, ctx.call.params.block_k

    def qk_alone(scores: Ref) -> tuple[jax.Array, jax.Array | None]:
        # Before the turn: it writes registers only, and would keep the tensor cores idle behind the wait.
        initialize_s(ctx, queued.item, jnp.int32(0), scores)
        ctx.wait_turn()
        q_ring.load_from_shared(queued.index)
        # Keys that stay in the rings have been waited for in the item that loaded them.
        when(queued.loads, lambda: k_ring.load_from_shared(step))
        issue_qk(ctx, q_ring.get_mma_tile(queued.index), step, scores)
        ctx.pass_turn()
        bits = draw_bits(ctx, queued.item, jnp.int32(0))
        return scores[...], bits

    scores, bits = pl.run_scoped(qk_alone, plgpu.ACC(tile_shape, jnp.float32))
    release_step(ctx, k_ring, step)
    # The last load of the step: its wait comes when S is complete, and its stage is free before the softmax begins.
    bias, masked = ctx.read_bias(step), ctx.call.first_masked
    tile = softmax_tile(ctx, scores, bits, queued.item, jnp.int32(0), *initial_statistics(), masked, bias)
    return rounded_state(ctx, tile)


def remaining_steps(ctx: ForwardContext, acc: Ref, queued: QueuedItem, first: Scalar, state: RowState) -> RowState:
    """Steps 1 to T−1 of an item: QKᵀ of each beside PV of the one before. The last PV is left to the caller.

    Args:
      acc: O.
      first: step 0 of the item in the rings.
      state: of step 0.
    """
    call, k_ring, v_ring = ctx.call, ctx.scratch.k, ctx.scratch.v
    q_tile = ctx.scratch.q.get_mma_tile(queued.index)

    def one_step(item_step: Scalar, state: RowState) -> RowState:
        step = first + item_step

        def qk_beside_pv(scores: Ref) -> RowState:
            initialize_s(ctx, queued.item, item_step, scores)
            ctx.wait_turn()
            when(queued.loads, lambda: k_ring.load_from_shared(step))
            # QKᵀ before PV: the softmax waits for the older of the two groups, and PV runs beside it.
            issue_qk(ctx, q_tile, step, scores)
            issue_pv(ctx, acc, state.p, queued, step - 1)
            ctx.pass_turn()
            bits = draw_bits(ctx, queued.item, item_step)
            # wait_n=1: QKᵀ is complete, PV may still run.
            s = plgpu.wgmma_accumulator_load(scores, wait_n=0 if call.softmax_after_pv else 1)
            release_step(ctx, k_ring, step)
            bias = ctx.read_bias(step)
            tile = softmax_tile(ctx, s, bits, queued.item, item_step, state.m, state.row_sum, call.later_masked, bias)
            # alpha rescales O, so PV of the step before must have added to it; its V is free then, too.
            plgpu.wgmma_wait(0)
            release_step(ctx, v_ring, step - 1)
            acc[...] = acc[...] * across(tile.alpha, call.value_dim)
            return rounded_state(ctx, tile)

        return pl.run_scoped(qk_beside_pv, plgpu.ACC((ROWS, call.params.block_k), jnp.float32))

    total = ctx.decode(queued.item).steps.total
    if isinstance(total, int) and total == 2 and (call.value_dim > 96 or call.params.consumers == 3):
        # LLVM removes a loop of one iteration. ptxas then spills, and serialises the wgmmas, where registers are few.
        total = total + opaque_zero(queued.item)
    return lax.fori_loop(1, total, one_step, state)


def consume_item(ctx: ForwardContext, queued: QueuedItem, first: Scalar) -> Scalar:
    """Computes and stores an item from its first step to its last, with nothing of the next item.

    Args:
      first: step 0 of the item in the rings; step 0 of the next item is returned.
    """
    call, scratch = ctx.call, ctx.scratch
    after = first + ctx.decode(queued.item).steps.total

    def attend(acc: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
        state = remaining_steps(ctx, acc, queued, first, first_step(ctx, queued, first))
        # No MMA reads Q any more. Where the output takes its place, Q is released behind the store instead.
        if call.plan.own_output:
            scratch.q.release(queued.index)
        release_item(ctx, scratch.k, queued, first)
        issue_pv(ctx, acc, state.p, queued, after - 1)
        out = acc[...]
        release_step(ctx, scratch.v, after - 1)
        release_item(ctx, scratch.v, queued, first)
        return out, state.m, state.row_sum

    out, m, row_sum = pl.run_scoped(attend, plgpu.ACC((ROWS, call.value_dim), jnp.float32))
    out_smem = scratch.q.get_mma_tile(queued.index) if scratch.out is None else scratch.out
    store_item(ctx, queued.item, out, m, row_sum, out_smem)
    if not call.plan.own_output:
        # The next Q may come only when the TMA store has read the output from its place.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.q.release(queued.index)
    return next_first(ctx, queued, first)


def consume_items_overlapped(ctx: ForwardContext, acc: Ref) -> None:
    """Computes all items of this CTA as ``consume_item`` does, but with step 0 of each beside the last PV before it.

    The carry between items is step 0 of the item in the rings, and the state after it.
    """

    def one_item(queued: QueuedItem, carry: tuple[Scalar, RowState]) -> tuple[Scalar, RowState]:
        first, state = carry
        state = remaining_steps(ctx, acc, queued, first, state)
        ctx.scratch.q.release(queued.index)
        release_item(ctx, ctx.scratch.k, queued, first)
        after = next_first(ctx, queued, first)
        last = first + (ctx.call.resident_steps - 1) if ctx.call.resident_steps else after - 1
        next_state = last_pv_beside_next_step(ctx, acc, queued, last, after, state.p)
        release_item(ctx, ctx.scratch.v, queued, first)
        assert ctx.scratch.out is not None
        store_item(ctx, queued.item, acc[...], state.m, state.row_sum, ctx.scratch.out)
        # Step 0 of an item does not rescale O, so the accumulator begins from zeros.
        acc[...] = plgpu.layout_cast(jnp.zeros((ROWS, ctx.call.value_dim), jnp.float32), tile_layout())
        return after, next_state

    def start(item: Scalar) -> tuple[Scalar, RowState]:
        return jnp.int32(0), first_step(ctx, QueuedItem(jnp.int32(0), item, jnp.int32(-1)), jnp.int32(0))

    for_each_item(ctx, one_item, start)


def last_pv_beside_next_step(
    ctx: ForwardContext, acc: Ref, queued: QueuedItem, last: Scalar, after: Scalar, p: jax.Array
) -> RowState:
    """PV of the last step of an item, beside QKᵀ and softmax of step 0 of the next item, whose state it returns.

    Behind the last item, S is of what the stages of Q and K still hold, and the state is thrown away.

    Args:
      last: the last step of the item in the rings.
      after: step 0 of the next item.
      p: P of the last step.
    """
    q_ring, k_ring, v_ring = ctx.scratch.q, ctx.scratch.k, ctx.scratch.v
    # Behind the last item QKᵀ is issued all the same, on stale tiles: no branch comes between it and the PV beside it.
    has_next = queued.next_item >= 0
    # Without a next item the indices stay those of the last one: nothing is waited for, and nothing is released twice.
    next_index = queued.index + has_next.astype(jnp.int32)
    step = after if ctx.call.resident_steps else last + has_next.astype(jnp.int32)
    next_item = lax.max(queued.next_item, jnp.int32(0))

    def qk_beside_pv(scores: Ref) -> RowState:
        initialize_s(ctx, next_item, jnp.int32(0), scores)
        ctx.wait_turn()

        @pl.when(has_next)
        def _() -> None:
            q_ring.load_from_shared(next_index)
            when(queued.frees, lambda: k_ring.load_from_shared(step))

        issue_qk(ctx, q_ring.get_mma_tile(next_index), step, scores)
        issue_pv(ctx, acc, p, queued, last)
        ctx.pass_turn()
        bits = draw_bits(ctx, next_item, jnp.int32(0))
        s = plgpu.wgmma_accumulator_load(scores, wait_n=1)

        @pl.when(has_next)
        def _() -> None:
            release_step(ctx, k_ring, step)

        bias, masked = ctx.read_bias(step, has_next), ctx.call.first_masked
        tile = softmax_tile(ctx, s, bits, next_item, jnp.int32(0), *initial_statistics(), masked, bias)
        plgpu.wgmma_wait(0)
        release_step(ctx, v_ring, last)
        return rounded_state(ctx, tile)

    return pl.run_scoped(qk_beside_pv, plgpu.ACC((ROWS, ctx.call.params.block_k), jnp.float32))


def store_item(
    ctx: ForwardContext, item: Scalar, out: jax.Array, m: jax.Array, row_sum: jax.Array, out_smem: Ref
) -> None:
    """Normalises O, and starts the TMA stores of this warpgroup's rows of out and lse.

    Args:
      out: O after the last step, ``[64, value_dim]``.
      out_smem: ``[block_q, value_dim]``, from which out is stored.
    """
    call, scratch, work = ctx.call, ctx.scratch, ctx.decode(item)
    q_rows = pl.ds(ctx.q_start(work), ROWS)
    m, row_sum = without_hidden_rows(call.options, m, row_sum)
    alpha: jax.Array | None = None
    # m times ``unit`` is in base 2, and in natural units times ``natural``.
    unit, natural = (LOG2E, 1.0) if call.options.natural_maximum else (1.0, 1 / LOG2E)
    if ctx.operands.sinks is not None:
        # A sink is one more key, without a value.
        sink = ctx.operands.sinks[work.head] * (LOG2E / unit)
        shift = jnp.maximum(m, sink)
        shift = jnp.where(shift == -jnp.inf, 0.0, shift)
        alpha = jnp.exp2((m - shift) * unit)
        row_sum = row_sum * alpha + jnp.exp2((sink - shift) * unit)
        m = shift
    scale = jnp.where(row_sum == 0.0, 0.0, 1 / (row_sum * (1 - call.options.dropout_prob)))
    scale = scale if alpha is None else scale * alpha
    lse = (m + jnp.log2(row_sum) * (1 / unit)) * natural
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the item before still reads this memory
    # Each consumer has its own rows of the buffer, so no barrier between consumers is needed.
    target = out_smem.at[ctx.my_rows]
    target[...] = (out * across(scale, call.value_dim)).astype(call.plan.dtype)
    scratch.lse[ctx.warpgroup, :] = lse
    plgpu.commit_smem()
    store_tile(target, ctx.results.out.at[work.batch, q_rows, work.head])
    plgpu.copy_smem_to_gmem(scratch.lse.at[ctx.warpgroup], ctx.results.lse.at[work.batch, work.head, q_rows])


# The launch.


def masked_steps(schedule: TileSchedule) -> tuple[bool | None, bool | None]:
    """The need of a mask in step 0 of an item and in later steps: True, False, or None where it depends on the step.

    Causal tiles as wide as they are high need it only in step 0, and a loop without the branch is faster.
    """
    if not isinstance(schedule, BandSchedule):
        return None, None
    most = int(schedule.counts()[0].max())
    return most > 0, None if most > 1 else False


def resident_steps(schedule: TileSchedule, params: HopperForwardParams, items_of_keys: int) -> int:
    """``ForwardCall.resident_steps``: steps of items whose keys and values stay in the rings for the next item.

    A stage more than they take lets the keys of the next head arrive before those of this one leave.
    """
    steps = schedule.extent.column_tiles
    if not params.persistent or steps >= params.num_stages or items_of_keys == 1:
        return 0
    if 2 * steps > params.num_stages and steps * items_of_keys < STEPS_OF_RESIDENT_KEYS:
        return 0
    return steps if isinstance(schedule, BandSchedule) and schedule.has_same_steps else 0


def heads_at_once(schedule: TileSchedule, matrices: int, dims: int, dtype: DTypeLike, group: int, num_sms: int) -> int:
    """Query heads that are worked on at a time, whose K and V fit the cache together; a multiple of ``group``.

    Args:
      matrices: query heads of all batch elements.
      dims: head_dim + value_dim.
    """
    per_head = schedule.extent.columns * dims * np.dtype(dtype).itemsize
    cached = max(CACHED_KEYS_AND_VALUES // per_head, 1) * group
    if not isinstance(schedule, BandSchedule):  # the steps of rows are known on the device only
        return cached
    if dims // 2 * np.dtype(dtype).itemsize % SECTOR_BYTES:
        # Rows cut sectors of their neighbours: SMs that read one tile at a time were slower, 85 µs where 66 × 14 heads
        # of 256 and head_dim 72 took 79.
        return cached
    return fewest_at_once(row_steps(schedule), matrices, cached, group, num_sms)


def forward_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    tables: Tables | tuple[()],
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    schedule: TileSchedule,
    plan: ForwardPlan,
    num_sms: int,
) -> AttentionResults[jax.Array]:
    """Computes out and lse: ``[batch, q_length, heads, value_dim]`` and float32 ``[batch, heads, padded q_length]``.

    Args:
      sinks: ``[heads]`` float32, the log of the sinks' summed exponentials, or None.
      tables: of ``schedule``.
      num_sms: SMs of the device, each of which has one CTA of a persistent kernel.
    """
    batch, q_length, heads, _ = query.shape
    group, q_tiles = heads // value.shape[2], schedule.extent.row_tiles
    params, value_dim = plan.params, plan.value_dim
    items = batch * heads * q_tiles
    programs = min(num_sms, items) if params.persistent else items

    # Tiles of a bias are others for each item, and counted as steps of the rings.
    resident = 0 if plan.stages_bias else resident_steps(schedule, params, group * q_tiles)
    dims = query.shape[3] + value.shape[3]
    at_once = heads_at_once(schedule, batch * heads, dims, query.dtype, group, num_sms)
    queue = row_steps(schedule), batch * heads, at_once
    item_at, starts, order = None, None, None
    if resident:
        # Items of one key head must follow one another in a CTA, or its keys would leave the rings between them.
        starts, order = even_lists(items, programs)
    elif params.persistent:
        starts, order = program_lists(program_order(*queue), queue[0], programs)
    else:
        item_at = item_by_arithmetic(*queue)
        order = None if item_at else program_order(*queue)
    operands = ForwardOperands[object](query, key, value, sinks, starts, order, tables, arrays)
    call = ForwardCall(
        options,
        schedule,
        plan,
        heads,
        group,
        item_at,
        *masked_steps(schedule),
        guarded=schedule.may_mask or options.may_hold_minus_infinity,  # a bias of −∞ masks, too
        # Evaluating the mask needs the registers that hold P, which the PV in flight still reads: wait for it first.
        softmax_after_pv=value_dim > 128
        and arrays.mask is not None
        and (options.dropout_prob > 0 or not options.plain),
        resident_steps=resident,
    )

    def body(
        operands: ForwardOperands[Ref], results: AttentionResults[Ref], scratch: ForwardScratch[Ring, Turns, Ref]
    ) -> None:
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        ctx = ForwardContext(call, operands, results, scratch, program, warpgroup, pl.ds(warpgroup * ROWS, ROWS))
        pl.when(warpgroup < params.consumers)(functools.partial(run_consumer, ctx))
        pl.when(warpgroup == params.consumers)(functools.partial(run_producer, ctx))

    results = AttentionResults(
        jax.ShapeDtypeStruct((batch, q_length, heads, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_tiles * params.block_q), jnp.float32),
    )
    warpgroups = params.consumers + 1
    return run_kernel(body, operands, results, plan.scratch(), role="attend", num_ctas=programs, warpgroups=warpgroups)
