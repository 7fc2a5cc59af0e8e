"""The inputs and results of every norm backend: arrays of any rank, static options."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from tilewright.kernels.op.inputs import OpInputs, static

type Kind = Literal["rms", "layer"]


class NormInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      kind: "rms" divides by the root mean square, "layer" subtracts the mean and divides by the standard deviation.
      weight_offset: added to the weight; 1 if the weight is stored as its difference from one.
    """

    x: Float[Array, "*rows columns"]
    kind: Kind = static()
    residual: Float[Array, "*rows columns"] | None = None
    weight: Float[Array, " columns"] | None = None
    bias: Float[Array, " columns"] | None = None
    eps: float = static(default=1e-6)
    weight_offset: float = static(default=0.0)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.x.shape[:-1])

    @functools.cached_property
    def columns(self) -> int:
        return self.x.shape[-1]

    @functools.cached_property
    def row_bytes(self) -> int:
        return self.columns * self.x.dtype.itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormResults:
    """The results of a forward pass, or their cotangents.

    Row statistics are not stored: the backward pass reads whole rows in any case, and recomputes the statistics in a
    reduction that it needs anyway, while writing and reading them costs 16 bytes a row and, for narrow rows, a change
    of layout.

    Attributes:
      total: ``x + residual`` after rounding, the array that was normed; ``None`` without a residual, or for a zero
        cotangent.
    """

    out: Float[Array, "*rows columns"]
    total: Float[Array, "*rows columns"] | None


def normed(inputs: NormInputs, results: NormResults) -> Any:
    """The array whose rows were normed."""
    return inputs.x if results.total is None else results.total
