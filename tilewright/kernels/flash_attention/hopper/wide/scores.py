"""P and dS of a tile in the backward kernels for wide heads on Hopper, and the Q iterations of a CTA."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.dropout import negate_dropped, zero_dropped
from tilewright.kernels.flash_attention.hopper.params import BLOCK
from tilewright.kernels.flash_attention.hopper.schedule import Steps, TableRefs, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    ScoreArrays,
    ScoreOptions,
    TileCoord,
    biased_and_capped,
    masked_logits,
)
from tilewright.kernels.hopper.tiles import opaque_zero
from tilewright.kernels.pallas_types import Condition, Scalar


class QueryIteration(NamedTuple):
    """A Q iteration: the member of the group of query heads, and the number among the steps of that head."""

    member: Scalar
    number: Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class QueryIterations:
    """The query tiles that a CTA meets for dK and dV, over all query heads of its key head, as one sequence.

    Attributes:
      group: query heads of a key head.
      row_tile: the CTA's tile of keys.
      shared: the steps of every head, if they are the same for all; else None.
      zero: a 0 that the compiler cannot know.
    """

    schedule: TileSchedule
    tables: TableRefs
    batch: Scalar
    first_head: Scalar
    group: int
    row_tile: Scalar
    shared: Steps | None
    zero: Scalar

    @classmethod
    def of(
        cls,
        schedule: TileSchedule,
        tables: TableRefs,
        batch: Scalar,
        first_head: Scalar,
        group: int,
        row_tile: Scalar,
        zero: Scalar,
    ) -> "QueryIterations":
        """The iterations of a tile of keys, whose key head has ``group`` query heads from ``first_head`` on."""
        # Bands have no tables, and tables of one head serve all: the number of steps is then a product, without a loop.
        same_for_all = group == 1 or not tables or tables[0].shape[1] == 1
        shared = schedule.steps(tables, batch, first_head, row_tile) if same_for_all else None
        return cls(schedule, tables, batch, first_head, group, row_tile, shared, zero)

    def steps(self, member: Scalar) -> Steps:
        """The steps of one head."""
        if self.shared is not None:
            return self.shared
        return self.schedule.steps(self.tables, self.batch, self.first_head + member, self.row_tile)

    @property
    def total(self) -> Scalar:
        if self.shared is not None:
            # A loop whose length the compiler knows may be unrolled or dropped, and ``opaque_zero`` with it.
            return self.shared.total * self.group + self.zero
        return lax.fori_loop(0, self.group, lambda member, total: total + self.steps(member).total, jnp.int32(0))

    @property
    def first(self) -> QueryIteration:
        return QueryIteration(jnp.int32(0), jnp.int32(0))

    def after(self, iteration: QueryIteration) -> QueryIteration:
        """The next iteration."""
        member, number = iteration
        if self.group == 1:
            return QueryIteration(member, number + 1)
        last = number + 1 == self.steps(member).total
        return QueryIteration(jnp.where(last, member + 1, member), jnp.where(last, 0, number + 1))

    def head(self, iteration: QueryIteration) -> Scalar:
        return self.first_head if self.group == 1 else self.first_head + iteration.member

    def q_start(self, iteration: QueryIteration) -> Scalar:
        return self.steps(iteration.member).tile(iteration.number) * BLOCK

    def masked(self, iteration: QueryIteration) -> Condition:
        """True if the tile needs the mask."""
        return iteration.number < self.steps(iteration.member).masked


def item_in_step(item: Scalar, step: Scalar) -> Scalar:
    """The item, made to look different in each step.

    Its fields are then decoded again in each step. Hoisted out of the loop they would be spilled.
    """
    return item + opaque_zero(step + item)


def has_separate_ds_factor(options: ScoreOptions) -> bool:
    """True if dV and dS take different factors, so that P is not enough: see `softmax_tile`."""
    return options.soft_cap is not None or options.dropout_prob > 0


class ProbabilityTiles(NamedTuple):
    """P as a factor of two products, which differ by dropout and the derivative of the soft cap.

    Attributes:
      dv: operand of dV = ``dv``·dO, short of the scale of dropout.
      ds: factor of dS = ``ds`` ∘ (dP − delta), with the derivative of the soft cap; negative where dropout drops.
    """

    dv: jax.Array
    ds: jax.Array


def softmax_tile(
    s: jax.Array,
    bits: jax.Array | None,
    minus_lse: jax.Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
    coord: TileCoord,
    masked: Condition,
    dtype: DTypeLike,
    bias: jax.Array | None,
) -> ProbabilityTiles:
    """Computes P from S.

    Args:
      bits: of ``draw_kept``; None without dropout.
      bias: the tile of a bias that passes through shared memory, else None.
      minus_lse: added in the exponent, in base 2; None if S started from it.
      masked: whether the tile needs the mask; a bool, or a scalar on the device.
    """
    if not options.plain:
        s, _ = biased_and_capped(s, options, arrays, coord, bias)
    s = masked_logits(s, masked, options, arrays, coord)
    exponents = s * options.multiplier
    p_dv = p_ds = jnp.exp2(exponents if minus_lse is None else exponents + minus_lse)
    if options.soft_cap is not None:
        # tanh from the capped logits, where −∞ is masked: a second tile of registers over the mask would spill. That
        # works because the derivative of the cap is a function of its result.
        tanh = jnp.maximum(s * (1 / options.soft_cap), -1.0)
        p_ds = p_ds * (1 - tanh * tanh)
    if bits is not None:
        p_dv, p_ds = p_dv.astype(dtype), p_ds.astype(dtype)  # first: both in float32 do not fit registers
        p_dv, p_ds = zero_dropped(p_dv, bits, coord), negate_dropped(p_ds, bits, coord)
    return ProbabilityTiles(p_dv, p_ds)


def ds_tile(p_ds: jax.Array, dp: jax.Array, minus_delta: jax.Array | None, options: ScoreOptions) -> jax.Array:
    """Computes dS in float32 from ``ProbabilityTiles.ds`` and dP.

    Args:
      minus_delta: None if dP started from it, which the scale of dropout does not allow.
    """
    if minus_delta is None:
        return p_ds * dp
    # The sign says what dropout drops: there dS is −P·delta, without a second draw of random bits.
    p_ds = p_ds.astype(jnp.float32)
    # A dropped P that is 0 has no sign to lose: dS is 0 there in either case.
    kept_dp = jnp.where(p_ds < 0, 0.0, dp * (1 / (1 - options.dropout_prob)))
    return jnp.abs(p_ds) * (kept_dp + minus_delta)
