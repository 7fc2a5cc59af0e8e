"""The inputs of the backends of both ops: canonical arrays and static options."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulOptions:
    """The options of a matmul that are static values, not arrays.

    A backend that does not read a field computes without it: each declines what it cannot do, by name.

    Attributes:
      out_dtype: the name of the dtype of the result.
    """

    out_dtype: str
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    precision: Any = None


@dataclasses.dataclass(frozen=True)
class MatmulInputs:
    """A call of ``matmul`` after ``prepare``.

    Attributes:
      lhs: ``[..., k]``, or ``[k, m]`` if the options say so.
      rhs: ``[k, n]`` or ``[n, k]``.
      gradients: to a backward pass, the names of the operands whose gradients are used.
    """

    lhs: Float[Array, "..."]
    rhs: Float[Array, "_ _"]
    options: MatmulOptions
    gradients: frozenset[str] = frozenset({"lhs", "rhs"})

    @property
    def k_axes(self) -> tuple[int, int]:
        """The axis of either operand along which they are summed."""
        return 0 if self.options.transpose_lhs else len(self.lhs.shape) - 1, 1 if self.options.transpose_rhs else 0


@dataclasses.dataclass(frozen=True, slots=True)
class GluOptions:
    """The options of a gated linear unit; ``out_dtype`` is also the dtype of the pre-activations."""

    out_dtype: str
    activation: str


@dataclasses.dataclass(frozen=True)
class GluInputs:
    """A call of ``glu`` after ``prepare``; ``gradients`` as in ``MatmulInputs``.

    Attributes:
      keeps: False to a forward pass whose pre-activations are not used.
    """

    x: Float[Array, "*rows k"]
    gate: Float[Array, "k n"]
    up: Float[Array, "k n"]
    options: GluOptions
    gradients: frozenset[str] = frozenset({"x", "gate", "up"})
    keeps: bool = True


type GluResults = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""The output and both pre-activations, which are the residuals: a backend may return None for them if not kept."""

jax.tree_util.register_dataclass(MatmulInputs, data_fields=["lhs", "rhs"], meta_fields=["options", "gradients"])
jax.tree_util.register_dataclass(
    GluInputs, data_fields=["x", "gate", "up"], meta_fields=["options", "gradients", "keeps"]
)


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """The sizes and dtypes of a call of ``matmul``, for selection."""

    rows: int
    k: int
    n: int
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    options: MatmulOptions

    @classmethod
    def of(cls, inputs: MatmulInputs) -> "MatmulProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        k_axis, rhs_axis = inputs.k_axes
        return cls(
            rows=math.prod(size for axis, size in enumerate(inputs.lhs.shape) if axis != k_axis),
            k=inputs.lhs.shape[k_axis],
            n=inputs.rhs.shape[1 - rhs_axis],
            lhs_dtype=np.dtype(inputs.lhs.dtype),
            rhs_dtype=np.dtype(inputs.rhs.dtype),
            options=inputs.options,
        )


@dataclasses.dataclass(frozen=True)
class GluProblem:
    """The sizes and dtypes of a call of ``glu``, for selection."""

    rows: int
    k: int
    n: int
    x_dtype: np.dtype
    gate_dtype: np.dtype
    up_dtype: np.dtype
    options: GluOptions

    @classmethod
    def of(cls, inputs: GluInputs) -> "GluProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        k, n = inputs.gate.shape
        return cls(
            rows=math.prod(inputs.x.shape[:-1]),
            k=k,
            n=n,
            x_dtype=np.dtype(inputs.x.dtype),
            gate_dtype=np.dtype(inputs.gate.dtype),
            up_dtype=np.dtype(inputs.up.dtype),
            options=inputs.options,
        )
