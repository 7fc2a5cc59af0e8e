"""Everything that the warpgroup roles of the forward kernel on Hopper share: operands, context, the queue of items."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.params import HopperForwardParams
from tilewright.kernels.flash_attention.hopper.plans import ForwardPlan, ForwardScratch
from tilewright.kernels.flash_attention.hopper.schedule import Steps, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import BiasTiles, ScoreArrays, ScoreOptions
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.softmax import AttentionResults
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.turns import Turns
from tilewright.kernels.pallas_types import Condition, Ref, Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedItem:
    """A work item in the queue of a CTA.

    Attributes:
      index: its index in the queue.
      next_item: the item after it, −1 behind the last.
      loads: whether its keys and values are loaded for it; else they are those of the item before, still in the rings.
      frees: whether its keys and values leave the rings with it; else the next item, if any, reads the same.
    """

    index: Scalar
    item: Scalar
    next_item: jax.Array
    loads: Condition = True
    frees: Condition = True


@dataclasses.dataclass(frozen=True, slots=True)
class WorkItem:
    """A decoded work item."""

    batch: Scalar
    head: Scalar
    q_tile: Scalar
    steps: Steps


class ForwardOperands[Operand](NamedTuple):
    """Operands of the kernel, as arrays or references.

    Attributes:
      query: ``[batch, q_length, heads, head_dim]``.
      key, value: ``[batch, kv_length, kv_heads, head_dim or value_dim]``.
      sinks: ``[heads]`` float32, or None.
      item_starts, item_order: `program_lists` of a persistent kernel; else no starts, and the order only where
        ``ForwardCall.item_at`` does not compute it.
      tables: of the tile schedule.
    """

    query: Operand
    key: Operand
    value: Operand
    sinks: Operand | None
    item_starts: Operand | None
    item_order: Operand | None
    tables: tuple[Operand, ...]
    arrays: ScoreArrays


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardCall:
    """The static half of one call.

    Attributes:
      group: query heads of a key head.
      item_at: the item of a program of a kernel that is not persistent, where arithmetic gives it.
      first_masked, later_masked: `masked_steps`.
      guarded: whether a row may have no visible key so far, so that its m is −∞.
      softmax_after_pv: whether the softmax waits for the PV in flight, too.
      resident_steps: steps of an item if all items of a key head have the same keys and values, and these stay in the
        rings from its first item to its last; else 0.
    """

    options: ScoreOptions
    schedule: TileSchedule
    plan: ForwardPlan
    heads: int
    group: int
    item_at: Callable[[Scalar], jax.Array] | None
    first_masked: bool | None
    later_masked: bool | None
    guarded: bool
    softmax_after_pv: bool
    resident_steps: int = 0

    @property
    def items_of_keys(self) -> int:
        """Items of a key head, which follow one another."""
        return self.group * self.schedule.extent.row_tiles

    @property
    def params(self) -> HopperForwardParams:
        return self.plan.params

    @property
    def value_dim(self) -> int:
        return self.plan.value_dim


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardContext:
    """All that a role of a warpgroup needs.

    Attributes:
      program: index of the CTA.
      warpgroup: index of the warpgroup: the consumers, then the producer.
      my_rows: rows of the tile of queries that this consumer owns.
    """

    call: ForwardCall
    operands: ForwardOperands[Ref]
    results: AttentionResults[Ref]
    scratch: ForwardScratch[Ring, Turns, Ref]
    program: jax.Array
    warpgroup: jax.Array
    my_rows: pl.Slice

    def decode(self, item: Scalar) -> WorkItem:
        """The coordinates of a work item and its steps.

        Every call traces the arithmetic anew: nothing of it is carried by a loop.
        """
        call = self.call
        batch, head, q_tile = decode_tile_index(item, call.schedule.extent.row_tiles, call.heads)
        return WorkItem(batch, head, q_tile, call.schedule.steps(self.operands.tables, batch, head, q_tile))

    def q_start(self, work: WorkItem) -> Scalar:
        """The first query of this consumer."""
        return work.q_tile * self.call.params.block_q + self.warpgroup * ROWS

    @property
    def bias_tiles(self) -> BiasTiles:
        assert self.scratch.bias is not None
        return BiasTiles(self.scratch.bias, self.call.params.consumers)

    def read_bias(self, step: Scalar, present: Condition = True) -> jax.Array | None:
        """This consumer's tile of the bias of a step of the rings, if the bias passes through shared memory."""
        if self.scratch.bias is None:
            return None
        # Callers read it behind QKᵀ. Beside QKᵀ, which was to hide the latency of `ldmatrix`, T5 took 0.090 ms instead
        # of 0.086, MPT 0.088 instead of 0.087, and SAM 0.251 instead of 0.253 (docs/notes/hopper_attention.md).
        return self.bias_tiles.read(step, self.warpgroup, present=present)

    def wait_turn(self) -> None:
        """Waits for this consumer's turn to issue MMAs, under ``ping_pong``."""
        if self.call.params.ping_pong:
            self.scratch.turns.wait(self.warpgroup)

    def pass_turn(self) -> None:
        """Gives the turn to the next consumer, under ``ping_pong``."""
        if self.call.params.ping_pong:
            self.scratch.turns.pass_on(self.warpgroup)


def for_each_item[Carry](
    ctx: ForwardContext, body: Callable[[QueuedItem, Carry], Carry], start: Callable[[Scalar], Carry]
) -> None:
    """Runs ``carry = body(queued, carry)`` over the work items of this CTA, from ``start(first item)`` on."""
    starts, order = ctx.operands.item_starts, ctx.operands.item_order
    # A kernel that is not persistent: one item, and no loop around it.
    if starts is None:
        item = _single_item(ctx)
        body(QueuedItem(jnp.int32(0), item, jnp.int32(-1)), start(item))
        return
    assert order is not None
    # Both roles read the list from global memory, so that no item has to pass from the producer to the consumers.
    begin, end = starts[ctx.program], starts[ctx.program + 1]

    def one_item(position: Scalar, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        item, carry = state
        after = position + 1
        # Clamped to the last item, behind which the list of another program begins.
        next_item = jnp.where(after < end, order[lax.min(after, end - 1)], -1)
        queued = QueuedItem(position - begin, item, next_item)
        if ctx.call.resident_steps:
            count = jnp.int32(ctx.call.items_of_keys)
            # A key head's items are numbered consecutively, so its first one is a multiple of their count. The first
            # item of a CTA may be any of them, and loads; the last one of a CTA frees nothing, as nothing is loaded
            # behind it.
            loads = (position == begin) | (lax.rem(item, count) == 0)
            frees = (next_item > 0) & (lax.rem(next_item, count) == 0)
            queued = dataclasses.replace(queued, loads=loads, frees=frees)
        return next_item, body(queued, carry)

    first = order[begin]
    lax.fori_loop(begin, end, one_item, (first, start(first)))


def _single_item(ctx: ForwardContext) -> jax.Array:
    """The work item of this CTA in a kernel that is not persistent."""
    if ctx.call.item_at is not None:
        return ctx.call.item_at(ctx.program)
    assert ctx.operands.item_order is not None
    return ctx.operands.item_order[ctx.program]
