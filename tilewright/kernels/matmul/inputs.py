"""The inputs of the backends of both ops: canonical arrays and static options."""

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float

from tilewright.kernels.op.inputs import OpInputs, static


class MatmulInputs(OpInputs):
    """A call of ``matmul`` after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      lhs: ``[..., k]``, or ``[k, m]`` if it is transposed.
      rhs: ``[k, n]`` or ``[n, k]``.
      out_dtype: the name of the dtype of the result.
    """

    lhs: Float[Array, "..."]
    rhs: Float[Array, "_ _"]
    out_dtype: str = static()
    transpose_lhs: bool = static(default=False)
    transpose_rhs: bool = static(default=False)
    precision: Any = static(default=None)

    @functools.cached_property
    def k_axes(self) -> tuple[int, int]:
        """The axis of either operand along which they are summed."""
        return 0 if self.transpose_lhs else len(self.lhs.shape) - 1, 1 if self.transpose_rhs else 0

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        """The dimensions of the result before n."""
        k_axis, _ = self.k_axes
        return tuple(size for axis, size in enumerate(self.lhs.shape) if axis != k_axis)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.leading)

    @functools.cached_property
    def k(self) -> int:
        return self.lhs.shape[self.k_axes[0]]

    @functools.cached_property
    def n(self) -> int:
        return self.rhs.shape[1 - self.k_axes[1]]


class GluInputs(OpInputs):
    """A call of ``glu`` after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      out_dtype: the name of the dtype of the result and of the pre-activations.
      keeps: False to a forward pass whose pre-activations are not used.
    """

    x: Float[Array, "*rows k"]
    gate: Float[Array, "k n"]
    up: Float[Array, "k n"]
    out_dtype: str = static()
    activation: str = static()
    keeps: bool = static(default=True, role="stage")

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.x.shape[:-1])

    @functools.cached_property
    def k(self) -> int:
        return self.gate.shape[0]

    @functools.cached_property
    def n(self) -> int:
        return self.gate.shape[1]

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.n)


type GluResults = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""The output and both pre-activations, which are the residuals: a backend may return None for them if not kept."""
