"""The interface of what moves the rows of a mixture of experts."""

import abc
from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from tilewright.kernels.permutation.routing import Routing
from tilewright.ops.types import Device


class GateGradients(NamedTuple):
    """Gradients and products of hidden rows ``act(gate) · up``.

    Attributes:
      d_gate, d_up: the gradients of both pre-activations for the cotangents ``row_weights · d_hidden``.
      weighted_hidden: ``row_weights · hidden``; like the gradients in the dtype of ``gate``.
      dots: the inner product of each row of ``d_hidden`` and of ``hidden``, in float32.
    """

    d_gate: Float[Array, "rows n"]
    d_up: Float[Array, "rows n"]
    weighted_hidden: Float[Array, "rows n"]
    dots: Float32[Array, " rows"]


class Movement(abc.ABC):
    """The products of a mixture of experts that are no matmuls; stateless, and the same bits in every run.

    Weights, sums and activations are computed in float32, or float64 for float64 rows, and rounded once. ``k`` is at
    least 1. Nothing here has a derivative for JAX to find, except where an implementation says so.
    """

    def reasons(self, tokens: int, k: int, device: Device) -> list[str]:
        """Every reason why calls of so many choices cannot run on a device."""
        return []

    @abc.abstractmethod
    def route(self, experts: Int32[Array, "tokens k"], num_experts: int, capacity: int | None = None) -> Routing:
        """The rows of choices of experts; with ``capacity``, an expert has no more rows than that."""

    @abc.abstractmethod
    def gather(
        self,
        x: Float[Array, "tokens d"],
        routing: Routing,
        weights: Float[Array, "tokens k"] | None = None,
        *,
        fills: bool = True,
    ) -> Float[Array, "rows d"]:
        """The rows of experts, times the weights of their choices.

        Args:
          fills: rows that hold no choice are zeros, and not anything; there are as many rows as choices.
        """

    @abc.abstractmethod
    def combine(
        self,
        rows: Float[Array, "rows d"],
        routing: Routing,
        weights: Float[Array, "tokens k"] | None = None,
        bias: Float[Array, "experts d"] | None = None,
        experts: Int32[Array, "tokens k"] | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Float[Array, "tokens d"]:
        """The sum over a token's choices of ``weight · (row + bias of its expert)``, in the order of the choices.

        Dropped choices are left out, weights and all. A bias needs ``experts``; the dtype is that of the rows unless
        one is given.
        """

    @abc.abstractmethod
    def dots(
        self,
        y: Float[Array, "tokens d"],
        rows: Float[Array, "rows d"],
        routing: Routing,
        bias: Float[Array, "experts d"] | None = None,
        experts: Int32[Array, "tokens k"] | None = None,
    ) -> Float32[Array, "tokens k"]:
        """The inner products of a token of ``y`` with its rows, plus the bias of their experts; 0 where dropped."""

    @abc.abstractmethod
    def gate_gradients(
        self,
        activation: str,
        gate: Float[Array, "rows n"],
        up: Float[Array, "rows n"],
        d_hidden: Float[Array, "rows n"],
        row_weights: Float32[Array, " rows"],
        source: Int32[Array, " rows"],
    ) -> GateGradients:
        """The gradients of a gated unit whose results have a weight by row; anything in rows that hold no choice."""
