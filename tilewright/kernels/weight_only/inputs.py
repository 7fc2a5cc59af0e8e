"""The description of a matmul with a weight of few bits, and its oracle."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Real, UInt8

from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.inputs import OpInputs, array, static
from tilewright.kernels.weight_only.packing import FORMATS, Packing, dequantized


class WeightOnlyInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      codes: in the order of ``packing``.
      scales: in mxfp4 bytes of E8M0.
      out_dtype: the name of the dtype of the result.
      zeros: numbers that stand for zero, in the shape of scales; ``None`` for 0.
      order: the column of x that meets each row of the stored weight; ``None`` for the same.
      format: "int4", "int8" or "mxfp4".
      group: rows that share a scale; ``None`` for all.
    """

    x: Float[Array, "*leading k"]
    codes: UInt8[Array, "units n 32"]
    scales: Real[Array, "groups n"]
    out_dtype: str = static()
    format: str = static()
    group: int | None = static()
    zeros: Real[Array, "groups n"] | None = array(default=None, gradient=False)
    order: Int32[Array, " k"] | None = None

    @functools.cached_property
    def packing(self) -> Packing:
        return FORMATS[self.format]

    @functools.cached_property
    def rows(self) -> Any:
        return math.prod(self.x.shape[:-1])

    @functools.cached_property
    def k(self) -> Any:
        return self.x.shape[-1]

    @functools.cached_property
    def n(self) -> Any:
        return self.codes.shape[-2]

    @functools.cached_property
    def out_shape(self) -> tuple[Any, ...]:
        return (*self.x.shape[:-1], self.n)

    @functools.cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of sums."""
        return accumulator(self.x.dtype, self.out_dtype)

    @property
    def ordered(self) -> jax.Array:
        """x with its columns in the order of the stored weight's rows."""
        return self.x if self.order is None else jnp.take(self.x, self.order, axis=-1)

    def matrix(self, dtype: Any) -> jax.Array:
        """The stored weight as ``[n, k]``, computed in float32 or a wider dtype and rounded once."""
        return dequantized(self.codes, self.scales, self.zeros, self.format, self.group, self.k, dtype)


def weight_only_reference(inputs: WeightOnlyInputs) -> jax.Array:
    """The result in float32, or in float64 if x is, of a weight in x's dtype: for exact results widen x."""
    wide = jnp.promote_types(inputs.x.dtype, jnp.float32)
    return jnp.matmul(inputs.ordered.astype(wide), inputs.matrix(inputs.x.dtype).astype(wide).T)
