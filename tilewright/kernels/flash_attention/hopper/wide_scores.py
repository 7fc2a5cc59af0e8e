"""What the backward kernels for wide heads on Hopper do to a tile of scores, and which tiles they meet."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.params import BLOCK
from tilewright.kernels.flash_attention.hopper.schedule import Steps, TableRefs, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import (
    ScoreArrays,
    ScoreOptions,
    TileCoord,
    biased_and_capped,
    kept,
    masked_logits,
)
from tilewright.kernels.hopper.tiles import opaque_zero
from tilewright.kernels.hopper.types import Condition, Scalar

type Visit = tuple[Scalar, Scalar]
"""Member of the group, and its number among that head's visits."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueryVisits:
    """The query tiles that a program of dK and dV visits, over all heads of its group, as one sequence.

    A visit is a pair (member of the group, its number among that head's visits).
    """

    schedule: TileSchedule
    tables: TableRefs
    batch: Scalar
    first_head: Scalar
    group: int
    row_tile: Scalar
    shared: Steps | None
    nothing: Scalar

    @classmethod
    def of(
        cls,
        schedule: TileSchedule,
        tables: TableRefs,
        batch: Scalar,
        first_head: Scalar,
        group: int,
        row_tile: Scalar,
        nothing: Scalar,
    ) -> "QueryVisits":
        alike = group == 1 or not tables or tables[0].shape[1] == 1
        shared = schedule.steps(tables, batch, first_head, row_tile) if alike else None
        return cls(schedule, tables, batch, first_head, group, row_tile, shared, nothing)

    def steps(self, member: Scalar) -> Steps:
        """The visits of one head."""
        if self.shared is not None:
            return self.shared
        return self.schedule.steps(self.tables, self.batch, self.first_head + member, self.row_tile)

    @property
    def total(self) -> Scalar:
        if self.shared is not None:
            # A loop whose length the compiler knows may be unrolled or dropped, and ``opaque_zero`` with it.
            return self.shared.total * self.group + self.nothing
        return lax.fori_loop(0, self.group, lambda member, total: total + self.steps(member).total, jnp.int32(0))

    @property
    def first(self) -> Visit:
        return jnp.int32(0), jnp.int32(0)

    def after(self, visit: Visit) -> Visit:
        member, number = visit
        if self.group == 1:
            return member, number + 1
        last = number + 1 == self.steps(member).total
        return jnp.where(last, member + 1, member), jnp.where(last, 0, number + 1)

    def head(self, visit: Visit) -> Scalar:
        return self.first_head if self.group == 1 else self.first_head + visit[0]

    def q_start(self, visit: Visit) -> Scalar:
        return self.steps(visit[0]).tile(visit[1]) * BLOCK

    def masked(self, visit: Visit) -> Condition:
        return visit[1] < self.steps(visit[0]).masked


def has_unlike_factors(options: ScoreOptions) -> bool:
    """Whether d_out and dP are multiplied by different things: see ``probabilities``."""
    return options.soft_cap is not None or options.dropout_prob > 0


def probabilities(
    logits: jax.Array,
    shift: jax.Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
    place: TileCoord,
    masked: Condition,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """``(weights, factors)``: what d_out is multiplied by for dV, short of dropout's scale, and what dP is for dS.

    Factors have the derivative of the soft cap in them, and a negative sign where dropout drops.

    Args:
      shift: what is added in the exponent of two; None if it is in the logits.
      masked: a bool, or a scalar that is decided on the device.
    """
    if not options.plain:
        logits, _ = biased_and_capped(logits, options, arrays, place)
    logits = masked_logits(logits, masked, options, arrays, place)
    exponents = logits * options.multiplier
    weights = factors = jnp.exp2(exponents if shift is None else exponents + shift)
    if options.soft_cap is not None:
        # Had from the capped logits, of which −∞ is a masked one: a second tile of registers over the mask is spilled.
        tanh = jnp.maximum(logits * (1 / options.soft_cap), -1.0)
        factors = factors * (1 - tanh * tanh)
    if options.dropout_prob:
        # Narrowed first: the generator takes the registers.
        weights, factors = weights.astype(dtype), factors.astype(dtype)
        keep = kept(options, arrays, place)
        weights, factors = jnp.where(keep, weights, jnp.zeros((), dtype)), jnp.where(keep, factors, -factors)
    return weights, factors


def score_gradients(
    factors: jax.Array, d_probabilities: jax.Array, minus_delta: jax.Array | None, options: ScoreOptions
) -> jax.Array:
    """dS; ``minus_delta`` is None if the product for dP started from it, which dropout's scale does not allow."""
    if minus_delta is None:
        return factors * d_probabilities
    factors = factors.astype(jnp.float32)
    dropped = jnp.where(factors < 0, 0.0, d_probabilities * (1 / (1 - options.dropout_prob)))
    return jnp.abs(factors) * (dropped + minus_delta)


def again(item: Scalar, step: Scalar) -> Scalar:
    """The item as if it were another in each step, so that what follows from it takes no registers over the loop."""
    return item + opaque_zero(step + item)
