"""Epilogues of the matmul kernel for tiles of logits: the sums of a softmax, or gradients of the logits.

A tile of logits fills half of a thread's registers. It is taken in parts of 64 columns, so that a part's exponentials
take the place of its logits.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.matmul.epilogue import Columns, Place
from tilewright.kernels.hopper.softmax import LOG2E
from tilewright.kernels.hopper.tiles import column_layout, row_layout, spread, tile_layout
from tilewright.kernels.pallas_types import Ref

PART = 64
"""Columns that are taken at a time."""

LOWEST = -2.0e38
"""In place of the highest logit of a tile whose logits are all -inf: their differences are -inf, not NaN."""


def _static(**kwargs: Any) -> Any:
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some columns of a tile of logits.

    Attributes:
      logits: after bias and soft cap.
      column: of the vocabulary, its first one.
    """

    logits: jax.Array
    column: Any
    soft_cap: float | None

    def columns(self) -> jax.Array:
        """The number of each element's column in this part."""
        columns: jax.Array = plgpu.broadcasted_iota(jnp.int32, self.logits.shape, 1, layout=tile_layout())
        return columns

    def spread(self, rows: jax.Array) -> jax.Array:
        """A value of each row, in all columns."""
        return spread(rows, (self.logits.shape[0], PART), 0)

    def own(self, labels: jax.Array) -> jax.Array:
        """True at the class of each row's label."""
        # Compared within the part, so that the iota is the same constant for all parts.
        return self.columns() == self.spread(labels - self.column)

    def before_cap(self, gradient: jax.Array) -> jax.Array:
        """The gradient before the soft cap, from that behind it."""
        if self.soft_cap is None:
            return gradient
        # From the logits, as registers do not suffice for the derivatives of all parts beside them.
        tanh = self.logits * (1 / self.soft_cap)
        return gradient * (1 - tanh * tanh)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitTiles:
    """The logits of a kernel.

    Attributes:
      begin: ``[1]``, the class of the result's first column; None for 0.
      bias: float32, of the result's columns, padded by a tile; or None.
      tail: the number of classes if that of the last tile may be lower than its columns, else None.
    """

    begin: Any
    bias: Any
    soft_cap: float | None = _static()
    tail: int | None = _static()

    def parts(self, sums: Columns, place: Place) -> list[Part]:
        """A tile in parts."""
        (tile,) = sums
        first = place.column if self.begin is None else self.begin[0] + place.column
        return [
            self._part(tile[:, at : at + PART], first + at, place.column + at) for at in range(0, tile.shape[1], PART)
        ]

    def _part(self, logits: jax.Array, column: Any, result_column: Any) -> Part:
        if self.bias is not None:
            # Of the block, which XLA has cut: from an odd class of the whole bias the load stopped with a misaligned
            # address, which the interpreter does not see (docs/notes/vocabulary_losses.md).
            # Two columns at a time, so from a multiple of 8 bytes: a block of the vocabulary may begin anywhere.
            bias = plgpu.load(self.bias.at[pl.ds(result_column, PART)], layout=column_layout(), optimized=False)
            logits = logits + spread(bias, (logits.shape[0], PART), 1)
        if self.soft_cap is not None:
            # tanh by exp2, as the hardware's own has 11 bits. What overflows gives 1, and what underflows -1.
            tanh = 1 - 2 / (1 + jnp.exp2(logits * (2 * LOG2E / self.soft_cap)))
            logits = self.soft_cap * tanh
        if self.tail is not None:
            part = Part(logits, column, self.soft_cap)
            logits = jnp.where(part.columns() < self.tail - column, logits, -jnp.inf)
        return Part(logits, column, self.soft_cap)


def rows_of(vector: Ref, place: Place, rows: int) -> jax.Array:
    """The values of a tile's rows."""
    return plgpu.load(vector.at[pl.ds(place.row, rows)], layout=row_layout(), optimized=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxSums:
    """Sums of each row in a tile of columns: the highest logit, the sum of exponentials, and what else a loss needs.

    Attributes:
      labels: int32 ``[tokens]``, padded by a tile, as all vectors of rows.
      sums_logits: whether the sum of the logits is a result.
      keeps: whether the exponentials are, times the slope of the soft cap, as the first result.
    """

    tiles: LogitTiles
    labels: Any
    sums_logits: bool = _static()
    keeps: bool = _static()

    def __call__(self, sums: Sequence[Columns], place: Place) -> Sequence[Columns | jax.Array]:
        """Kept exponentials; highest logits, sums of exponentials, logits of labels, sums of logits."""
        parts = self.tiles.parts(sums[0], place)
        labels = rows_of(self.labels, place, parts[0].logits.shape[0])
        # First of all parts, for the exponentials are of differences from it.
        highest = parts[0].logits.max(axis=1)
        for part in parts[1:]:
            highest = jnp.maximum(highest, part.logits.max(axis=1))
        highest = jnp.maximum(highest, LOWEST)
        # Scaled once for each row: below it is one FMA with the subtraction.
        scaled = highest * LOG2E
        total = label_logit = logit_sum = jnp.zeros_like(highest)
        kept = []
        for part in parts:
            # One tile in hundreds has a row's label. A branch would have to be the warpgroup's, not a row's.
            label_logit = label_logit + jnp.where(part.own(labels), part.logits, 0.0).sum(axis=1)
            if self.sums_logits:
                # Classes that are not there have logits of -inf.
                known = part.logits
                if self.tiles.tail is not None:
                    known = jnp.where(part.columns() < self.tiles.tail - part.column, known, 0.0)
                logit_sum = logit_sum + known.sum(axis=1)
            exponentials = jnp.exp2(part.logits * LOG2E - part.spread(scaled))
            total = total + exponentials.sum(axis=1)
            if self.keeps:
                # With the slope of the cap, as the logits are not kept.
                kept.append(part.before_cap(exponentials))
        found = [highest, total, label_logit, *([logit_sum] if self.sums_logits else [])]
        return [tuple(kept), *found] if self.keeps else found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitGradients:
    """The gradients of the logits before bias and soft cap.

    Attributes:
      labels, lse, of_lse, of_label, of_sum: of each row, its label, its lse (inf where it is ignored), and the
        cotangents of lse, of the label's logit, and of the sum of the logits or None.
      first: ``[1]``, the class before which gradients are 0; None for none.
      classes: those behind which gradients are 0; None for none.
      epsilon: probabilities below it count as 0; None for none.
    """

    tiles: LogitTiles
    labels: Any
    lse: Any
    of_lse: Any
    of_label: Any
    of_sum: Any
    first: Any
    classes: int | None = _static()
    epsilon: float | None = _static()

    def __call__(self, sums: Sequence[Columns], place: Place) -> Sequence[Columns]:
        """The tile of the gradients."""
        rows = sums[0][0].shape[0]
        labels, lse, of_lse, of_label = (
            rows_of(each, place, rows) for each in (self.labels, self.lse, self.of_lse, self.of_label)
        )
        of_sum = None if self.of_sum is None else rows_of(self.of_sum, place, rows)
        # An ignored row has lse = +inf: its probabilities are 0.
        scaled, gradients = lse * LOG2E, []
        for part in self.tiles.parts(sums[0], place):
            probabilities = jnp.exp2(part.logits * LOG2E - part.spread(scaled))
            if self.epsilon is not None:
                probabilities = jnp.where(probabilities < self.epsilon, 0.0, probabilities)
            gradient = probabilities * part.spread(of_lse)
            # Before the sum is rounded to 16 bits: near 1 a probability and -1 cancel.
            gradient = jnp.where(part.own(labels), gradient + part.spread(of_label), gradient)
            if of_sum is not None:
                gradient = gradient + part.spread(of_sum)
            gradient = part.before_cap(gradient)
            if self.first is not None:
                gradient = jnp.where(part.columns() >= self.first[0] - part.column, gradient, 0.0)
            if self.classes is not None:
                gradient = jnp.where(part.columns() < self.classes - part.column, gradient, 0.0)
            gradients.append(gradient)
        return [tuple(gradients)]
