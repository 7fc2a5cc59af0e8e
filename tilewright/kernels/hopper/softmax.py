"""The online softmax of a warpgroup, in its registers: in base 2, with a maximum m and a sum l for each row.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Base 2, because the hardware has exp2 and
log2 only: log2(e) is folded into the scale.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.tiles import across, row_constants

LOG2E = math.log2(math.e)


class AttentionResults[Result](NamedTuple):
    """Results of a kernel that computes attention: their types, references to them, or arrays.

    Attributes:
      lse: log-sum-exp of the logits of each row, float32.
    """

    out: Result
    lse: Result


def split_scale(softmax_scale: float) -> tuple[float, float]:
    """The factor that S is multiplied by before ``online_softmax``, and the multiplier there, which must be positive.

    A positive scale folds into the exponent, where it costs nothing.
    """
    # A scale that is not positive would turn a maximum of S into a minimum of the logits: it is applied first.
    scale = softmax_scale * LOG2E
    return (1.0, scale) if scale > 0 else (scale, 1.0)


def initial_statistics() -> tuple[jax.Array, jax.Array]:
    """m and l of rows before their first key: −∞ and 0."""
    return row_constants(-jnp.inf), row_constants(0.0)


class RowState(NamedTuple):
    """State of a consumer between two steps: P of the later one, for its PV, and m and l up to it."""

    p: jax.Array
    m: jax.Array
    row_sum: jax.Array


class SoftmaxTile(NamedTuple):
    """The softmax of one tile of logits and the statistics of rows after it.

    Attributes:
      p: P, ``[64, keys]``, the operand of PV.
      alpha: ``[64]``, exp2(m before the tile − m): rescales what was summed before.
      m: ``[64]``, running maximum of a row's logits, in base 2 or, if so asked, in their unit.
      row_sum: l, ``[64]``, running sum of a row's P.
    """

    p: jax.Array
    alpha: jax.Array
    m: jax.Array
    row_sum: jax.Array

    @property
    def state(self) -> RowState:
        """The state after the tile, without alpha."""
        return RowState(self.p, self.m, self.row_sum)


def online_softmax(
    logits: jax.Array,
    multiplier: float,
    m: jax.Array,
    row_sum: jax.Array,
    guarded: bool = True,
    natural: bool = False,
) -> SoftmaxTile:
    """P of a tile in float32, alpha, and the new m and l.

    Args:
      logits: ``[64, keys]``; times ``multiplier``, which is positive, they are in base 2. −∞ is masked.
      m, row_sum: ``[64]``, before this tile.
      guarded: whether a row may have no visible key so far.
      natural: whether m is in the unit of the logits, not in base 2: for logits that may be so large that their
        product overflows, or has an error that is large in an exponent. It costs an addition for each element.
    """
    if natural:
        m_new = jnp.maximum(m, logits.max(axis=1))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if guarded else m_new
        # 0 before a row's first visible key, where m was −∞: O and l, which it rescales, are 0 there as well.
        alpha = jnp.exp2((m - shift) * multiplier)
        p = jnp.exp2((logits - across(shift, logits.shape[1])) * multiplier)
        return SoftmaxTile(p, alpha, m_new, row_sum * alpha + p.sum(axis=1))
    # The multiplier is positive: scaling the maximum is enough, and below it is one FMA with the subtraction.
    m_new = jnp.maximum(m, logits.max(axis=1) * multiplier)
    # A row that is fully masked so far has m = −∞, and is shifted by 0: −∞ − −∞ is NaN.
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if guarded else m_new
    alpha = jnp.exp2(m - shift)
    p = jnp.exp2(logits * multiplier - across(shift, logits.shape[1]))
    return SoftmaxTile(p, alpha, m_new, row_sum * alpha + p.sum(axis=1))


def normaliser(row_sum: jax.Array) -> jax.Array:
    """1 / l, the factor that normalises O after the last tile; 0 for fully masked rows."""
    # O of such a row is 0, and 0 · ∞ would be NaN.
    return jnp.where(row_sum == 0.0, 0.0, 1 / row_sum)


def row_lse(m: jax.Array, row_sum: jax.Array) -> jax.Array:
    """The natural log-sum-exp of rows, (m + log2 l) · ln 2; −∞ for fully masked rows."""
    return jnp.where(row_sum == 0.0, -jnp.inf, (m + jnp.log2(row_sum)) * (1 / LOG2E))
