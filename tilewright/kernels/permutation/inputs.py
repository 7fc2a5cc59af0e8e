"""The inputs and results of ``permute`` and ``unpermute``."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int32

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.permutation.routing import Routing


class PermuteInputs(OpInputs):
    """A call of ``permute`` after ``prepare``; shapes and dtypes hold without further checks."""

    x: Float[Array, "tokens d"]
    experts: Int32[Array, "tokens k"]
    num_experts: int = static()
    capacity: int | None = static(default=None)


class UnpermuteInputs(OpInputs):
    """A call of ``unpermute`` after ``prepare``; shapes and dtypes hold without further checks."""

    rows: Float[Array, "choices d"]
    source: Int32[Array, " choices"]
    weights: Float[Array, "tokens k"]


class PermuteResults(NamedTuple):
    """Arrays, or their shapes and dtypes."""

    rows: Any
    routing: Routing


class UnpermuteResults(NamedTuple):
    """The sums, and the routing that a source tells, in which there are no experts."""

    out: Any
    routing: Routing
