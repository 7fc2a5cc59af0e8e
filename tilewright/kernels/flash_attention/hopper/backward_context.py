"""Operands and context of the roles of the kernel for dK and dV up to head_dim 128, and the steps of a work item."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient
from tilewright.kernels.flash_attention.hopper.call import GroupParts, KeyValueResults
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan, KeyValueScratch
from tilewright.kernels.flash_attention.hopper.schedule import TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import BiasTiles, ScoreArrays, ScoreOptions
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.types import Condition, Ref, Scalar


class ConversionOperands[Operand](NamedTuple):
    """Operands of an `OverlappedConversion`.

    Attributes:
      items: its plan, int32.
      counters: ``[batch, kv_heads, *COUNTER_SHAPE]`` float32, to which items that are complete are added.
    """

    items: Operand
    counters: Operand


class KeyValueOperands[Operand](NamedTuple):
    """Operands of the kernel, as arrays or references.

    Attributes:
      statistics: as in ``BackwardCall``, complete.
      dq_accumulator: None if deterministic.
      d_bias: the array of a `BiasGradient`; None without one, and where it is a result.
      item_lists: ``program_lists`` over tiles of keys.
      conversion: None unless a conversion of dQ is overlapped.
      tables: of the tile schedule.
      arrays: for tiles ``[keys, queries]``.
    """

    query: Operand
    key: Operand
    value: Operand
    d_out: Operand
    statistics: Operand
    dq_accumulator: Operand | None
    d_bias: Operand | None
    item_lists: tuple[Operand, Operand]
    conversion: ConversionOperands[Operand] | None
    tables: tuple[Operand, ...]
    arrays: ScoreArrays


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueContext:
    """All that the roles of the kernel share.

    Attributes:
      parts: of the query heads of a key head.
      warpgroup: index of the calling warpgroup; those of the consumers come first.
    """

    plan: BackwardPlan
    options: ScoreOptions
    schedule: TileSchedule
    kv_heads: int
    parts: GroupParts
    operands: KeyValueOperands[Ref]
    results: KeyValueResults[Ref]
    scratch: KeyValueScratch[Ring, Ref]
    warpgroup: Scalar

    @property
    def block_q(self) -> int:
        return self.plan.params.block_q

    @property
    def block_k(self) -> int:
        return self.plan.params.block_k

    @property
    def bias_gradient(self) -> AnyBiasGradient | None:
        return self.plan.bias_gradient

    @property
    def d_bias(self) -> Ref | None:
        """The array of the `BiasGradient`."""
        return self.results.d_bias if self.operands.d_bias is None else self.operands.d_bias

    @property
    def bias_tiles(self) -> BiasTiles | None:
        """The tiles of a bias that passes through shared memory."""
        return None if self.scratch.bias is None else BiasTiles(self.scratch.bias, CONSUMERS)

    @property
    def s_shape(self) -> tuple[int, int]:
        """Shape of a consumer's tile of S, ``[keys, queries]``."""
        return ROWS, self.block_q

    @property
    def overlaps_next_s(self) -> bool:
        """True if S of the next step is computed beside dK: where no bias, soft cap or dropout takes the registers."""
        light = self.options.plain and self.options.positions is None and not self.options.dropout_prob
        return self.plan.overlaps_next_s and light

    def decode(self, item: Scalar) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Batch element, part of a key head (`GroupParts`) and tile of keys of a work item."""
        return decode_tile_index(item, self.schedule.extent.row_tiles, self.kv_heads * self.parts.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class QueryStep:
    """A step of a work item: one tile of queries of one query head."""

    index: Scalar  # among all steps of the CTA, over its items: slots and phases of the rings follow from it
    head: Scalar
    q_tile: Scalar
    masked: Condition  # whether the tile needs the mask
    more: Condition  # whether the item has another step


def over_query_steps[Carry](
    ctx: KeyValueContext,
    item: Scalar,
    first: Scalar,
    one: Callable[[QueryStep, Carry], Carry],
    carry: Carry,
) -> Scalar:
    """Calls ``carry = one(step, carry)`` for every query tile of every query head of an item.

    Returns:
      the index of the step after them; that of the first one is ``first``.
    """
    # Decoded by every role for itself: warpgroups share no registers.
    b, key_part, kv_tile = ctx.decode(item)
    first_head, num_heads = ctx.parts.query_heads(key_part)
    one_head = ctx.parts.size == 1

    def over_head(member: Scalar, state: tuple[Scalar, Carry]) -> tuple[Scalar, Carry]:
        first, carry = state
        head = first_head + member
        steps = ctx.schedule.steps(ctx.operands.tables, b, head, kv_tile)

        def one_tile(number: Scalar, carry: Carry) -> Carry:
            more = number + 1 < steps.total
            # The next head of the item has one step at least.
            more = more if one_head else more | (member + 1 < num_heads)
            step = QueryStep(first + number, head, steps.tile(number), number < steps.masked, more)
            return one(step, carry)

        carry = lax.fori_loop(0, steps.total, one_tile, carry)
        return first + steps.total, carry

    # One head needs no loop over heads.
    state = first, carry
    after, _ = over_head(0, state) if one_head else lax.fori_loop(0, num_heads, over_head, state)
    return after
