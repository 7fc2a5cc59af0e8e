"""Operands and context of the roles of the kernel for dK and dV up to head_dim 128, and the steps of a work item."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient
from tilewright.kernels.flash_attention.hopper.call import GroupParts, KeyValueResults
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan, KeyValueScratch
from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import BiasTiles, ScoreArrays, ScoreOptions
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import decode_tile_index, group_sizes
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.pallas_types import Condition, Ref, Scalar

L2_BYTES = 48 << 20
"""Nearly the L2 cache of an H100 or H200."""


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
      interleaved_at_once: `interleaved_at_once` of the call.
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
    interleaved_at_once: int = 0

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
        # With a bias it was tried: MPT took 0.355 ms instead of 0.350, SAM 0.751 instead of 0.718, the others as long
        # (docs/notes/hopper_attention.md).
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

    Query heads come one after another or, interleaved, a tile of queries of all of them before the next tile.

    Returns:
      the index of the step after them; that of the first one is ``first``.
    """
    # Decoded by every role for itself: warpgroups share no registers.
    b, key_part, kv_tile = ctx.decode(item)
    first_head, num_heads = ctx.parts.query_heads(key_part)
    one_head = ctx.parts.size == 1
    if ctx.interleaved_at_once:
        return _over_interleaved_steps(ctx, item, first, one, carry)

    def over_head(member: Scalar, state: tuple[Scalar, Carry]) -> tuple[Scalar, Carry]:
        first, carry = state
        head = first_head + member
        # For each head: masks of arrays may differ between heads, and with them the number of steps.
        steps = ctx.schedule.steps(ctx.operands.tables, b, head, kv_tile)

        def one_tile(number: Scalar, carry: Carry) -> Carry:
            # The S that is computed ahead belongs to the next step, and must not wait for loads that never come.
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


def _over_interleaved_steps[Carry](
    ctx: KeyValueContext,
    item: Scalar,
    first: Scalar,
    one: Callable[[QueryStep, Carry], Carry],
    carry: Carry,
) -> Scalar:
    """`over_query_steps` with the query heads interleaved, see `interleaved_at_once`."""
    # A band has the same steps for every head, so the masked steps of all heads come first here, too.
    b, key_part, kv_tile = ctx.decode(item)
    assert isinstance(ctx.schedule, BandSchedule)
    size = jnp.int32(ctx.parts.size)
    matrix = lax.div(item, jnp.int32(ctx.schedule.extent.row_tiles))
    descending = lax.rem(lax.div(matrix, jnp.int32(ctx.interleaved_at_once)), jnp.int32(2)) == 0
    first_head, _ = ctx.parts.query_heads(key_part)
    steps = ctx.schedule.steps(ctx.operands.tables, b, first_head, kv_tile, descending)
    total = steps.total * size

    def one_step(index: Scalar, carry: Carry) -> Carry:
        # The heads of one tile of queries follow one another: ``steps`` are those of a band, the same for all of them.
        number = lax.div(index, size)
        # CTAs at one tile of queries begin with different heads, so that few of them add to the same rows of dQ.
        head = first_head + lax.rem(index + kv_tile, size)
        return one(QueryStep(first + index, head, steps.tile(number), number < steps.masked, index + 1 < total), carry)

    lax.fori_loop(0, total, one_step, carry)
    return first + total


def interleaved_at_once(
    schedule: TileSchedule,
    row_steps: np.ndarray,
    parts: GroupParts,
    matrices: int,
    matrices_at_once: int,
    query_bytes: int,
    num_sms: int,
) -> int:
    """Size of the groups of `program_order` if query heads that share keys are interleaved; 0 if they are not.

    Rows of tiles with many and with few steps, as under a causal mask, reach the second of several query heads at
    different times, and the last one at very different times: Q, dO and dQ of all heads then pass through the L2 cache,
    again for each row of tiles. Interleaved, CTAs that are at the same tile of queries once are so all the time. The
    rows of an even group start together, and go from the last tile of queries to their diagonals. Those of an
    odd group start when the shortest rows of the group before are done, one after another, and end together: they go
    from their diagonals up, and each one starts as the others pass.

    4096 causal queries of 64 heads, eight to a key head: of 132 CTAs that run in step, with 24 to 40 MB of cache for
    them, 67 to 81 % of the loads miss it if heads come one after another, and 9 % if they are interleaved.

    Args:
      row_steps: of each row of tiles; with the same number in all of them heads stay in step.
      query_bytes: of Q, dO and dQ of the query heads of an item. If those of all items that run at a time fit the
        cache, no order helps, and interleaved the fewer that add to a row of dQ at a time cost more (3 % of 2048 causal
        queries of head_dim 64, 32 heads, four to a key head).
    """
    if parts.size == 1 or parts.group % parts.parts or not isinstance(schedule, BandSchedule):
        return 0
    if query_bytes * -(-num_sms // len(row_steps)) <= L2_BYTES:
        return 0
    return 0 if np.ptp(row_steps) == 0 else max(group_sizes(matrices, matrices_at_once))
