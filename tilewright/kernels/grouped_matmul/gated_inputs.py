"""The inputs of the gated grouped matmul: those of two grouped matmuls of the same rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tilewright.kernels.grouped_matmul.inputs import GroupedInputs, GroupedOptions
from tilewright.kernels.grouped_matmul.reference import grouped_matmul_reference
from tilewright.kernels.numerics.activations import gated

GATED_GRADIENTS = frozenset({"lhs", "gate", "up"})

type GatedResults = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""The output and both pre-activations, of which rows of nobody are zeros; the latter are the residuals.

A backend may return None for these if the inputs say that they are not kept.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GatedOptions:
    """The options of a call that are static values, not arrays.

    Attributes:
      out_dtype: the name of the dtype of the result and of the pre-activations.
    """

    out_dtype: str
    activation: str


@dataclasses.dataclass(frozen=True)
class GatedInputs:
    """A call after ``prepare``.

    Attributes:
      group_offset: as of ``GroupedInputs``; given on a device that has a part of the matrices.
      gradients: to a backward pass, the names of the operands whose gradients are used.
      keeps: False to a forward pass whose pre-activations are not used.
    """

    lhs: Float[Array, "rows k"]
    gate: Float[Array, "matrices k n"]
    up: Float[Array, "matrices k n"]
    group_sizes: Int32[Array, " groups"]
    group_offset: Int32[Array, ""] | None
    options: GatedOptions
    gradients: frozenset[str] = GATED_GRADIENTS
    keeps: bool = True

    def product(self, matrices: Any) -> GroupedInputs:
        """The inputs of the grouped matmul of the rows with gate or up."""
        options = GroupedOptions(self.options.out_dtype)
        return GroupedInputs(self.lhs, matrices, self.group_sizes, self.group_offset, None, None, options)


jax.tree_util.register_dataclass(
    GatedInputs,
    data_fields=["lhs", "gate", "up", "group_sizes", "group_offset"],
    meta_fields=["options", "gradients", "keeps"],
)


@dataclasses.dataclass(frozen=True)
class GatedProblem:
    """The sizes and dtypes of a call, for selection; the fields mean the same as in ``GroupedProblem``."""

    rows: int
    k: int
    n: int
    groups: int
    matrices: int
    lhs_dtype: np.dtype
    gate_dtype: np.dtype
    up_dtype: np.dtype
    has_offset: bool
    options: GatedOptions

    @classmethod
    def of(cls, inputs: GatedInputs) -> "GatedProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        matrices, k, n = inputs.gate.shape
        return cls(
            rows=inputs.lhs.shape[0],
            k=k,
            n=n,
            groups=inputs.group_sizes.shape[0],
            matrices=matrices,
            lhs_dtype=np.dtype(inputs.lhs.dtype),
            gate_dtype=np.dtype(inputs.gate.dtype),
            up_dtype=np.dtype(inputs.up.dtype),
            has_offset=inputs.group_offset is not None,
            options=inputs.options,
        )


def gated_reference(inputs: GatedInputs) -> jax.Array:
    """The oracle, in float32, or float64 if an operand is; differentiable."""
    gate, up = (grouped_matmul_reference(inputs.product(matrices)) for matrices in (inputs.gate, inputs.up))
    wide = jnp.promote_types(gate.dtype, up.dtype)
    return gated(inputs.options.activation, gate.astype(wide), up.astype(wide))
