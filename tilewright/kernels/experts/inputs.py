"""The description of a layer of experts, its results and its parts."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.numerics.activations import SWIGLU_OAI
from tilewright.kernels.op.arguments import reshape
from tilewright.kernels.op.distributed import DistributedInputs
from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.permutation.routing import Routing
from tilewright.ops.kernel.arrays import is_symbolic

TOKENS = ("x", "weights", "experts")
"""The fields that have an element for each token."""

BIASES = ("gate_bias", "up_bias", "down_bias")

OPTIONS = frozenset({*BIASES, "activation", "capacity"})
"""The options of a call, all of which every backend and plan serves."""

_NOTHING: Any = None
"""Each array of a routing that is not kept: the tree stays that of one that is, as a split over devices needs."""


class ExpertsResults(NamedTuple):
    """The result, and what the backward pass needs beside the operands; ``None`` where nothing is kept.

    Attributes:
      out: ``[..., d]``.
      gate, up: the pre-activations of the rows of all experts, ``[rows, n]``.
      routing: of the rows.
    """

    out: Any
    gate: Any = None
    up: Any = None
    routing: Any = Routing(_NOTHING, _NOTHING, _NOTHING)


class ExpertsInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks, ids of experts may be any numbers.

    Attributes:
      weights: float32, or float64.
      out_dtype: the name of the dtype of the result and of the pre-activations.
      capacity: the most rows of an expert; ``None`` for any number.
      is_partial: the result is one of several that are added up, and is in the dtype of sums.
      keeps: False to a forward pass whose pre-activations are not used.
    """

    x: Float[Array, "*leading d"]
    weights: Float[Array, "*leading k"]
    experts: Int32[Array, "*leading k"]
    gate: Float[Array, "experts d n"]
    up: Float[Array, "experts d n"]
    down: Float[Array, "experts n d"]
    out_dtype: str = static()
    gate_bias: Float[Array, "experts n"] | None = None
    up_bias: Float[Array, "experts n"] | None = None
    down_bias: Float[Array, "experts d"] | None = None
    activation: str = static(default="silu")
    capacity: int | None = static(default=None)
    is_partial: bool = static(default=False, role="stage")
    keeps: bool = static(default=True, role="stage")

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.x.shape[:-1])

    @functools.cached_property
    def tokens(self) -> int:
        return math.prod(self.leading)

    @functools.cached_property
    def k(self) -> int:
        return self.experts.shape[-1]

    @functools.cached_property
    def choices(self) -> int:
        return self.tokens * self.k

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows of all experts together, of which some may hold no choice."""
        if self.capacity is None or is_symbolic(self.choices):
            return self.choices
        return min(self.choices, self.num_experts * self.capacity)

    @functools.cached_property
    def num_experts(self) -> int:
        return self.gate.shape[0]

    @functools.cached_property
    def d(self) -> int:
        return self.x.shape[-1]

    @functools.cached_property
    def n(self) -> int:
        return self.gate.shape[-1]

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if a matrix or the rows have no elements."""
        return 0 in (self.choices, *self.gate.shape)

    @functools.cached_property
    def is_fused(self) -> bool:
        """True if the gated matmul is one call: its kernels have no biases, and the activations of ``glu`` alone."""
        return self.gate_bias is None and self.up_bias is None and self.activation != SWIGLU_OAI

    @functools.cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of sums."""
        return jnp.promote_types(self.out_dtype, jnp.float32)

    @functools.cached_property
    def sum_dtype(self) -> np.dtype:
        """The dtype of the result."""
        return self.accumulator if self.is_partial else jnp.dtype(self.out_dtype)

    @functools.cached_property
    def flat(self) -> "ExpertsInputs":
        """The same with one dimension of tokens; also without arrays."""
        if len(self.leading) == 1:
            return self
        shapes = {"x": self.d, "weights": self.k, "experts": self.k}
        return self.replace(**{name: reshape(self.arrays[name], (self.tokens, size)) for name, size in shapes.items()})

    def gated_matmul(self, rows: Any, group_sizes: Any, row_index: jax.Array | None = None) -> MatmulInputs:
        """The gated matmul of the rows of experts; without a gate if it is not one call.

        Args:
          row_index: the token of each row, for tokens in place of rows.
        """
        matmul = MatmulInputs(
            rows,
            self.gate,
            out_dtype=self.out_dtype,
            group_sizes=group_sizes,
            row_index=row_index,
            fills=False,
            keeps=self.keeps,
        )
        return matmul.replace(up=self.up, activation=self.activation) if self.is_fused else matmul

    def d_gated_matmul(self, rows: Any, group_sizes: Any, row_index: jax.Array | None = None) -> MatmulInputs:
        """The same for its backward pass, which begins with the cotangents of both pre-activations."""
        activation = self.activation if self.is_fused else "identity"
        return self.gated_matmul(rows, group_sizes, row_index).replace(up=self.up, activation=activation)

    def down_matmul(self, hidden: Any, group_sizes: Any) -> MatmulInputs:
        return MatmulInputs(hidden, self.down, out_dtype=self.out_dtype, group_sizes=group_sizes, fills=False)

    def d_down_matmul(self, hidden: Any, group_sizes: Any, row_index: jax.Array | None = None) -> MatmulInputs:
        """The same for the gradient of its matrices.

        Args:
          row_index: the token of each row, for cotangents of tokens in place of those of rows.
        """
        matmul = self.down_matmul(hidden, group_sizes)
        return matmul.replace(wanted=frozenset({"rhs"}), cotangent_index=row_index)

    def hidden_gradient(self, d_out: Any, group_sizes: Any, row_index: jax.Array | None = None) -> MatmulInputs:
        """The matmul of the rows' cotangents with the transposed matrices of the second half."""
        return self.down_matmul(d_out, group_sizes).replace(transpose_rhs=True, row_index=row_index)

    def abstract_matmuls(self, gathers: bool = False) -> dict[str, MatmulInputs]:
        """The matmuls of both passes with shapes and dtypes in place of arrays.

        Args:
          gathers: whether they take tokens and an index of rows.
        """
        inputs: ExpertsInputs = self.structs
        sizes = jax.ShapeDtypeStruct((self.num_experts,), jnp.int32)
        index: Any = jax.ShapeDtypeStruct((self.rows,), jnp.int32) if gathers else None
        count = self.tokens if gathers else self.rows
        rows, d_out = (jax.ShapeDtypeStruct((count, self.d), dtype) for dtype in (self.x.dtype, self.out_dtype))
        hidden = jax.ShapeDtypeStruct((self.rows, self.n), self.out_dtype)
        return {
            "gated": inputs.gated_matmul(rows, sizes, index),
            "d_gated": inputs.d_gated_matmul(rows, sizes, index),
            "down": inputs.down_matmul(hidden, sizes),
            "d_down": inputs.d_down_matmul(hidden, sizes, index),
            "hidden": inputs.hidden_gradient(d_out, sizes, index),
        }


class ParallelInputs(ExpertsInputs, DistributedInputs):
    """A device's part of a call over several: its tokens, and its experts, whose ids count those of all devices."""
