"""The inputs of the gated grouped matmul: those of two grouped matmuls of the same rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.reference import grouped_matmul_reference
from tilewright.kernels.numerics.activations import gated
from tilewright.kernels.op.inputs import OpInputs, static

type GatedResults = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""The output and both pre-activations, of which rows of nobody are zeros; the latter are the residuals.

A backend may return None for these if the inputs say that they are not kept.
"""


class GatedInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks, group sizes may be any numbers.

    Attributes:
      out_dtype: the name of the dtype of the result and of the pre-activations.
      group_offset: as of ``GroupedInputs``; given on a device that has a part of the matrices.
      keeps: False to a forward pass whose pre-activations are not used.
    """

    lhs: Float[Array, "rows k"]
    gate: Float[Array, "matrices k n"]
    up: Float[Array, "matrices k n"]
    group_sizes: Int32[Array, " groups"]
    out_dtype: str = static()
    activation: str = static()
    group_offset: Int32[Array, ""] | None = None
    keeps: bool = static(default=True, role="stage")

    def product(self, matrices: Any) -> GroupedInputs:
        """The inputs of the grouped matmul of the rows with gate or up."""
        return GroupedInputs(self.lhs, matrices, self.group_sizes, self.out_dtype, self.group_offset)

    @functools.cached_property
    def rows(self) -> int:
        return self.lhs.shape[0]

    @functools.cached_property
    def k(self) -> int:
        return self.lhs.shape[1]

    @functools.cached_property
    def n(self) -> int:
        return self.gate.shape[2]

    @functools.cached_property
    def groups(self) -> int:
        """The number of group sizes."""
        return self.group_sizes.shape[0]

    @functools.cached_property
    def matrices(self) -> int:
        """The number of matrices in gate and in up, as in ``GroupedInputs``."""
        return self.gate.shape[0]

    @functools.cached_property
    def out_shape(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.rows, self.n

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if an operand has no elements."""
        return 0 in (*self.lhs.shape, *self.gate.shape)


def gated_reference(inputs: GatedInputs) -> jax.Array:
    """The oracle, in float32, or float64 if an operand is; differentiable."""
    gate, up = (grouped_matmul_reference(inputs.product(matrices)) for matrices in (inputs.gate, inputs.up))
    wide = jnp.promote_types(gate.dtype, up.dtype)
    return gated(inputs.activation, gate.astype(wide), up.astype(wide))
