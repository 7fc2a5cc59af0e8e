"""The description of a matmul, which may have groups of rows, a gate and scales, and its results."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.arguments import apply, padded, reshape
from tilewright.kernels.op.inputs import OpInputs, array, static

SCALE_BLOCK = 128
"""Elements along k, and of a matrix along n too, that share a scale."""


class MatmulResults(NamedTuple):
    """The result, and of a gated op both pre-activations, which are the residuals of its backward pass.

    A backend may return ``None`` for these if they are not kept. Rows of no group are zeros in all of them.
    """

    out: jax.Array
    gate: jax.Array | None = None
    up: jax.Array | None = None


class MatmulInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks, group sizes may be any numbers.

    Attributes:
      lhs: ``[..., k]``, or ``[k, m]`` if it is transposed; ``[rows, k]`` with groups.
      rhs: ``[k, n]``, or ``[n, k]`` if it is transposed; with groups ``[matrices, ...]``, as many as groups without an
        offset. Of a gated op the gate's.
      out_dtype: the name of the dtype of the result and of the pre-activations.
      up: as rhs, of a gated op; ``None`` to multiply only with rhs.
      group_sizes: ``None`` for one matrix that all rows are multiplied with.
      group_offset: the group of the first matrix, possibly none that exists; ``None`` for 0.
      lhs_scale, rhs_scale: ``None``, a scalar, or a scale for each block, in the layout of its operand; without a gate
        alone.
      activation: of a gated op.
      transpose_lhs: only without groups and without a gate.
      fills: False where results of rows without a matrix may be anything, and not zeros.
      keeps: False to a forward pass whose pre-activations are not used.
      row_index: with groups, the rows that are multiplied: row r is row ``row_index[r]`` of lhs, or zeros where that is
        negative; ``None`` for those of lhs itself. The gradient of lhs is then that of the rows, ``[rows, k]``. For
        another op's call of a backend that gathers.
      cotangent_index: the same of the cotangents of a backward pass.
    """

    lhs: Float[Array, "..."]
    rhs: Float[Array, "..."]
    out_dtype: str = static()
    up: Float[Array, "..."] | None = None
    group_sizes: Int32[Array, " groups"] | None = None
    group_offset: Int32[Array, ""] | None = None
    lhs_scale: Float[Array, "*_"] | None = array(default=None, gradient=False)
    rhs_scale: Float[Array, "*_"] | None = array(default=None, gradient=False)
    row_index: Int32[Array, " rows"] | None = array(default=None, role="stage")
    cotangent_index: Int32[Array, " rows"] | None = array(default=None, role="stage")
    activation: str | None = static(default=None)
    transpose_lhs: bool = static(default=False)
    transpose_rhs: bool = static(default=False)
    precision: Any = static(default=None)
    fills: bool = static(default=True, role="stage")
    keeps: bool = static(default=True, role="stage")

    @functools.cached_property
    def weights(self) -> dict[str, jax.Array]:
        """The matrices that the rows are multiplied with, by field."""
        return {"rhs": self.rhs} if self.up is None else {"rhs": self.rhs, "up": self.up}

    @functools.cached_property
    def operands(self) -> dict[str, jax.Array]:
        """The arrays that are multiplied, by the names of their arguments."""
        if self.up is None:
            return {"lhs": self.lhs, "rhs": self.rhs}
        return {"x" if self.group_sizes is None else "lhs": self.lhs, "gate": self.rhs, "up": self.up}

    @functools.cached_property
    def k_axes(self) -> tuple[int, int]:
        """The axis of lhs, and that of a matrix, along which they are summed."""
        return 0 if self.transpose_lhs else len(self.lhs.shape) - 1, 1 if self.transpose_rhs else 0

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        """The dimensions of the result before n."""
        k_axis, _ = self.k_axes
        if self.row_index is not None:
            return tuple(self.row_index.shape)
        return tuple(size for axis, size in enumerate(self.lhs.shape) if axis != k_axis)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.leading)

    @functools.cached_property
    def k(self) -> int:
        return self.lhs.shape[self.k_axes[0]]

    @functools.cached_property
    def n(self) -> int:
        return self.rhs.shape[-2 if self.transpose_rhs else -1]

    def gradient_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the gradient of lhs or of a weight."""
        return (self.rows, self.k) if name == "lhs" and self.row_index is not None else self.arrays[name].shape

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result and of the pre-activations."""
        return *self.leading, self.n

    @functools.cached_property
    def groups(self) -> int:
        """The number of group sizes; 1 without groups."""
        return 1 if self.group_sizes is None else self.group_sizes.shape[0]

    @functools.cached_property
    def matrices(self) -> int:
        """The number of matrices in rhs, fewer than groups on a device that has a part of them."""
        return 1 if self.group_sizes is None else self.rhs.shape[0]

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if an operand or the result has no elements."""
        return 0 in (*self.leading, *self.lhs.shape, *self.rhs.shape)

    @functools.cached_property
    def num_results(self) -> int:
        """The number of results that are kept."""
        return 3 if self.up is not None and self.keeps else 1

    @functools.cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of sums."""
        return accumulator(*(x.dtype for x in self.operands.values()), self.out_dtype)

    def product(self, name: str) -> "MatmulInputs":
        """The inputs of the product with one of the weights."""
        return self if self.up is None else self.replace(rhs=self.weights[name], up=None, activation=None)

    def padded(self, multiple: int) -> "MatmulInputs":
        """The same with operands that are padded with zeros to multiples of this along k and n; no scales."""
        lhs_k, rhs_k = self.k_axes
        stacked = len(self.rhs.shape) - 2
        axes = {"lhs": (lhs_k,)} | dict.fromkeys(self.weights, (stacked + rhs_k, stacked + 1 - rhs_k))
        return self.replace(**{name: padded(self.arrays[name], multiple, *each) for name, each in axes.items()})

    def as_one_group(self) -> "MatmulInputs":
        """The same call with one group of all rows if it has none; also without arrays."""
        if self.group_sizes is not None:
            return self
        return self.replace(
            lhs=reshape(self.lhs, (self.rows, self.k)),
            **{name: apply(lambda x: x[None], x) for name, x in self.weights.items()},
            group_sizes=apply(lambda _: jnp.full((1,), self.rows, jnp.int32), self.lhs),
            lhs_scale=_of_rows(self.lhs_scale, self.rows),
            rhs_scale=_stacked(self.rhs_scale),
        )


def _of_rows(scale: Any, rows: int) -> Any:
    """The scale of ``[..., k]`` as that of ``[rows, k]``."""
    return scale if scale is None or not scale.shape else reshape(scale, (rows, scale.shape[-1]))


def _stacked(scale: Any) -> Any:
    """The scale of a matrix as that of one of several."""
    return scale if scale is None or not scale.shape else apply(lambda x: x[None], scale)
