"""The op ``permute``: its argument list, its checks and its public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, has_arithmetic, integer, integer_array
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.permutation.cases import PERMUTE_CASES, PermuteCase, drawn_experts
from tilewright.kernels.permutation.inputs import PermuteInputs, PermuteResults
from tilewright.kernels.permutation.routing import Routing, declared
from tilewright.kernels.permutation.xla import XlaPermute
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/permutation.Permute")
class Permute(PortfolioKernel[PermuteInputs, PermuteResults]):
    """The rows of experts from those of tokens; see ``permute`` for the arguments."""

    cases: ClassVar[OpCases[PermuteCase]] = PERMUTE_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 2, "experts": 2})

    def __init__(self) -> None:
        backends = ["tilewright.kernels.permutation.triton.backend:TritonPermute"]
        super().__init__("permute", version="1", backends=[*backends, "tilewright.kernels.permutation.xla:XlaPermute"])

    def prepare(
        self,
        x: ArrayLike,
        experts: ArrayLike,
        num_experts: int,
        *,
        capacity: int | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> PermuteInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        x, experts = as_array("x", x), as_array("experts", experts)
        if len(x.shape) != 2 or not has_arithmetic(x.dtype):
            raise ValueError(
                f"x must be a floating-point array of 16 bits or more, [tokens, d], got {x.shape=}, {x.dtype=}"
            )
        k = experts.shape[-1] if experts.shape else 0
        if not isinstance(k, int) or k < 1 or experts.shape != (x.shape[0], k):
            raise ValueError(
                f"experts must be [tokens, k] for the tokens of x, with a number k of at least 1, got {x.shape=}, "
                f"{experts.shape=}"
            )
        num_experts = integer("num_experts", num_experts)
        capacity = None if capacity is None else integer("capacity", capacity)
        if num_experts < 1 or (capacity is not None and capacity < 1):
            raise ValueError(
                f"num_experts must be at least 1, and capacity at least 1 or None, got {num_experts=}, {capacity=}"
            )
        experts = integer_array("experts", experts, experts.shape, False)
        return PermuteInputs(x, experts, num_experts, capacity, platform=self.backends.allowed(platform))

    def results(self, inputs: PermuteInputs) -> Any:
        (tokens, d), k = inputs.x.shape, inputs.experts.shape[1]
        rows = jax.ShapeDtypeStruct((tokens * k, d), inputs.x.dtype)
        return PermuteResults(rows, declared(tokens * k, tokens, k, inputs.num_experts))

    def outputs(self, inputs: PermuteInputs, results: PermuteResults) -> Any:
        return results.rows, results.routing.group_sizes, results.routing.source

    def residuals(self, results: PermuteResults) -> Routing:
        return results.routing

    def cotangents(self, inputs: PermuteInputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        return cotangents[0]

    def reference(self, inputs: PermuteInputs) -> Any:
        return self.outputs(inputs, XlaPermute().forward(inputs, FwdParams()))

    def sampled(self, inputs: PermuteInputs, key: jax.Array) -> PermuteInputs:
        """Normal rows, and experts that are chosen alike often."""
        experts = drawn_experts(generator_of(key), inputs.experts.shape, inputs.num_experts)
        return super().sampled(inputs, key).replace(experts=jnp.asarray(experts))


_PERMUTE = Permute()


@public_function(Permute.prepare)
def permute(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of experts from those of tokens, for ``grouped_matmul``; ``unpermute`` sums them up for each token.

    A row is a choice of a token. Rows are sorted by expert, and those of an expert by token and by the choices of a
    token. There are as many as there are choices; choices without a row leave rows of zeros behind those of the last
    expert.

    Args:
      x: ``[tokens, d]``, floating-point.
      experts: ``[tokens, k]`` integers, the choices of ``top_k_router``. One that is not in ``[0, num_experts)`` has no
        row.
      num_experts: the number of experts.
      capacity: the most rows of an expert; further choices of it, in the order of rows, have none. None drops nothing.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``(rows, group_sizes, source)``: the rows ``[tokens · k, d]`` in the dtype of x; the number of rows of each
      expert, int32 ``[num_experts]``; and for each row its choice, ``token · k`` plus the index among the choices of
      the token, or −1, int32 ``[tokens · k]``. The gradient of the rows reaches x, as a sum in float32 (float64 for
      float64) over the rows of a token in the order of its choices.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _PERMUTE(*args, **kwargs)
