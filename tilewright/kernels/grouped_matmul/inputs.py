"""The inputs of every grouped matmul backend: canonical arrays and static options."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int32

from tilewright.kernels.op.inputs import OpInputs, array, static

SCALE_BLOCK = 128
"""Elements along k, and of a matrix along n too, that share a scale."""


class GroupedInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks, group sizes may be any numbers.

    Attributes:
      rhs: ``[matrices, k, n]``, or ``[matrices, n, k]`` if it is transposed; as many as groups without an offset.
      out_dtype: the name of the dtype of the result.
      group_offset: the group of the first matrix, possibly none that exists; ``None`` for 0.
      lhs_scale, rhs_scale: ``None``, a scalar, or a scale for each block, in the layout of its operand.
    """

    lhs: Float[Array, "rows k"]
    rhs: Float[Array, "matrices _ _"]
    group_sizes: Int32[Array, " groups"]
    out_dtype: str = static()
    group_offset: Int32[Array, ""] | None = None
    lhs_scale: Float[Array, "*_"] | None = array(default=None, gradient=False)
    rhs_scale: Float[Array, "*_"] | None = array(default=None, gradient=False)
    transpose_rhs: bool = static(default=False)
    precision: Any = static(default=None)

    @functools.cached_property
    def rows(self) -> int:
        return self.lhs.shape[0]

    @functools.cached_property
    def k(self) -> int:
        return self.lhs.shape[1]

    @functools.cached_property
    def n(self) -> int:
        return self.rhs.shape[1 if self.transpose_rhs else 2]

    @functools.cached_property
    def groups(self) -> int:
        """The number of group sizes."""
        return self.group_sizes.shape[0]

    @functools.cached_property
    def matrices(self) -> int:
        """The number of matrices in rhs, fewer than groups on a device that has a part of them."""
        return self.rhs.shape[0]

    @functools.cached_property
    def out_shape(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.rows, self.n

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if an operand has no elements."""
        return 0 in (*self.lhs.shape, *self.rhs.shape)

    @functools.cached_property
    def has_scales(self) -> bool:
        return self.lhs_scale is not None or self.rhs_scale is not None
