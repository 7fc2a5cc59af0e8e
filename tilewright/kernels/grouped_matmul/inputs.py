"""The inputs of every grouped matmul backend: canonical arrays and static options."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

SCALE_BLOCK = 128
"""Elements along k, and of a matrix along n too, that share a scale."""

GRADIENTS = frozenset({"lhs", "rhs"})

type ScaleKind = Literal["none", "number", "blocks"]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedOptions:
    """The options of a call that are static values, not arrays.

    A backend that does not read a field computes without it: each declines what it cannot do, by name.

    Attributes:
      out_dtype: the name of the dtype of the result.
      transpose_rhs: True if a matrix is ``[n, k]``.
    """

    out_dtype: str
    transpose_rhs: bool = False
    precision: Any = None


@dataclasses.dataclass(frozen=True)
class GroupedInputs:
    """A call after ``prepare``; shapes and dtypes hold without further checks, group sizes may be any numbers.

    Attributes:
      rhs: ``[matrices, k, n]``, or ``[matrices, n, k]`` if the options say so; as many as groups without an offset.
      group_offset: the group of the first matrix, possibly none that exists; ``None`` for 0.
      lhs_scale, rhs_scale: ``None``, a scalar, or a scale for each block, in the layout of its operand.
      gradients: to a backward pass, the names of the operands whose gradients are used.
    """

    lhs: Float[Array, "rows k"]
    rhs: Float[Array, "matrices _ _"]
    group_sizes: Int32[Array, " groups"]
    group_offset: Int32[Array, ""] | None
    lhs_scale: Float[Array, "*_"] | None
    rhs_scale: Float[Array, "*_"] | None
    options: GroupedOptions
    gradients: frozenset[str] = GRADIENTS

    @property
    def out_shape(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.lhs.shape[0], self.rhs.shape[1 if self.options.transpose_rhs else 2]


jax.tree_util.register_dataclass(
    GroupedInputs,
    data_fields=["lhs", "rhs", "group_sizes", "group_offset", "lhs_scale", "rhs_scale"],
    meta_fields=["options", "gradients"],
)


def scale_kind(scale: Any) -> ScaleKind:
    """The elements that share a scale: none of it, all of the operand, or those of a block."""
    if scale is None:
        return "none"
    return "blocks" if scale.ndim else "number"


@dataclasses.dataclass(frozen=True)
class GroupedProblem:
    """The sizes and dtypes of a call, for selection.

    Attributes:
      groups: the number of group sizes.
      matrices: the number of matrices in rhs, fewer than groups on a device that has a part of them.
    """

    rows: int
    k: int
    n: int
    groups: int
    matrices: int
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    has_offset: bool
    lhs_scale: ScaleKind
    rhs_scale: ScaleKind
    options: GroupedOptions

    @classmethod
    def of(cls, inputs: GroupedInputs) -> "GroupedProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        (rows, k), (_, n) = inputs.lhs.shape, inputs.out_shape
        return cls(
            rows=rows,
            k=k,
            n=n,
            groups=inputs.group_sizes.shape[0],
            matrices=inputs.rhs.shape[0],
            lhs_dtype=np.dtype(inputs.lhs.dtype),
            rhs_dtype=np.dtype(inputs.rhs.dtype),
            has_offset=inputs.group_offset is not None,
            lhs_scale=scale_kind(inputs.lhs_scale),
            rhs_scale=scale_kind(inputs.rhs_scale),
            options=inputs.options,
        )
