"""The inputs and results of every norm backend: arrays of any rank, static options."""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float

type Kind = Literal["rms", "layer"]


@dataclasses.dataclass(frozen=True, slots=True)
class NormOptions:
    """The options of a call that are static values, not arrays.

    Attributes:
      kind: "rms" divides by the root mean square, "layer" subtracts the mean and divides by the standard deviation.
      weight_offset: added to the weight; 1 if the weight is stored as its difference from one.
    """

    kind: Kind
    eps: float = 1e-6
    weight_offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class NormInputs:
    """A call after ``prepare``; shapes and dtypes hold without further checks."""

    x: Float[Array, "*rows columns"]
    residual: Float[Array, "*rows columns"] | None
    weight: Float[Array, " columns"] | None
    bias: Float[Array, " columns"] | None
    options: NormOptions


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


jax.tree_util.register_dataclass(NormInputs, data_fields=["x", "residual", "weight", "bias"], meta_fields=["options"])
jax.tree_util.register_dataclass(NormResults, data_fields=["out", "total"], meta_fields=[])


def normed(inputs: NormInputs, results: NormResults) -> Any:
    """The array whose rows were normed."""
    return inputs.x if results.total is None else results.total


@dataclasses.dataclass(frozen=True)
class NormProblem:
    """The sizes of a call, for selection; a dtype is ``None`` if the array is absent."""

    rows: int
    columns: int
    dtype: np.dtype
    weight_dtype: np.dtype | None
    bias_dtype: np.dtype | None
    has_residual: bool
    options: NormOptions

    @classmethod
    def of(cls, inputs: NormInputs) -> "NormProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        *rows, columns = inputs.x.shape
        return cls(
            rows=math.prod(rows),
            columns=columns,
            dtype=np.dtype(inputs.x.dtype),
            weight_dtype=None if inputs.weight is None else np.dtype(inputs.weight.dtype),
            bias_dtype=None if inputs.bias is None else np.dtype(inputs.bias.dtype),
            has_residual=inputs.residual is not None,
            options=inputs.options,
        )

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize
