"""The router of a mixture of experts: its argument list, its checks and its public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import (
    PlatformOption,
    apply,
    as_array,
    flag,
    has_arithmetic,
    integer,
    is_floating,
    number,
    to_32_bit,
)
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.router.cases import CASES, RouterCase
from tilewright.kernels.router.inputs import RouterInputs, Scoring, routed
from tilewright.ops.utils.stable_ids import stable_id

_SCORINGS = get_args(Scoring.__value__)


@stable_id("tilewright/router.TopKRouter")
class TopKRouter(PortfolioKernel[RouterInputs, tuple[Any, Any]]):
    """The router of a mixture of experts; see ``top_k_router`` for the arguments."""

    cases: ClassVar[OpCases[RouterCase]] = CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"logits": 1})

    def __init__(self) -> None:
        backends = ("tilewright.kernels.router.triton.backend:TritonRouter", "tilewright.kernels.router.xla:XlaRouter")
        super().__init__("top_k_router", version="1", backends=backends)

    def prepare(
        self,
        logits: ArrayLike,
        k: int,
        *,
        scoring: Scoring = "softmax",
        normalize: bool = True,
        bias: ArrayLike | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> RouterInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        logits = as_array("logits", logits)
        if not logits.shape or not has_arithmetic(logits.dtype):
            raise ValueError(
                "logits must be a floating-point array of 16 bits or more, [..., experts], got "
                f"{logits.shape=}, {logits.dtype=}"
            )
        if scoring not in _SCORINGS:
            raise ValueError(f"scoring must be one of {_SCORINGS}, got {scoring!r}")
        k, num_groups, top_groups = (
            integer(name, value) for name, value in (("k", k), ("num_groups", num_groups), ("top_groups", top_groups))
        )
        _check_numbers(logits.shape[-1], k, num_groups, top_groups)
        return RouterInputs(
            logits,
            k,
            _bias(bias, logits),
            scoring,
            flag("normalize", normalize) or scoring == "softmax_after",
            num_groups,
            top_groups,
            number("scale", scale),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: RouterInputs) -> Any:
        shape = (*inputs.logits.shape[:-1], inputs.k)
        return jax.ShapeDtypeStruct(shape, inputs.compute_dtype), jax.ShapeDtypeStruct(shape, jnp.int32)

    def residuals(self, results: tuple[Any, Any]) -> Any:
        """The chosen experts, of which the backward pass finds the weights in the logits."""
        return results[1]

    def cotangents(self, inputs: RouterInputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        return cotangents

    def reference(self, inputs: RouterInputs) -> Any:
        return routed(inputs)


def _check_numbers(experts: Any, k: int, num_groups: int, top_groups: int) -> None:
    if not isinstance(experts, int):
        raise ValueError(f"the last dimension of logits must be a number, got {experts}")
    if num_groups < 1 or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"num_groups must divide the number of experts, and top_groups be from 1 to num_groups, got {experts=}, "
            f"{num_groups=}, {top_groups=}"
        )
    most = experts // num_groups * top_groups
    if not 1 <= k <= most:
        of = f"in {top_groups} of {num_groups} groups of {experts}" if num_groups > 1 else "in logits"
        raise ValueError(f"k must be from 1 to the {most} experts {of}, got {k=}")


def _bias(bias: ArrayLike | None, logits: jax.Array) -> jax.Array | None:
    """A bias without a gradient: the choice of experts, its only part, has none."""
    if bias is None:
        return None
    bias = as_array("bias", bias)
    if bias.shape != logits.shape[-1:] or not is_floating(bias.dtype):
        raise ValueError(f"bias must be floating-point {logits.shape[-1:]}, got {bias.dtype}{bias.shape}")
    found: jax.Array = apply(lax.stop_gradient, to_32_bit(bias, logits.dtype))
    return found


_TOP_K_ROUTER = TopKRouter()


@public_function(TopKRouter.prepare)
def top_k_router(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """The router of a mixture of experts: the k best experts of each token, and the weights of their results.

    Scores and weights are computed in float32, or float64 for float64 logits. Of equal experts the one with the lower
    index is chosen, and listed first. A NaN among the logits counts as −inf. An expert with −inf is chosen only by
    tokens that have fewer than k others; its weight is 0, its logit has the gradient 0, and a token without any finite
    logit has weights of 0. A logit of +inf is the first choice unless a bias outweighs its score of 1, and makes
    weights NaN unless they are ``"sigmoid"``'s.

    Args:
      logits: ``[..., experts]``, floating-point.
      k: the number of experts of a token.
      scoring: ``"softmax"`` of all logits (Mixtral, Qwen3-MoE); ``"softmax_after"`` of the k chosen ones (gpt-oss),
        which is the same as ``"softmax"`` with ``normalize`` if the choice is by logits alone; or ``"sigmoid"`` of each
        (DeepSeek-V3).
      normalize: divide the weights of a token by their sum; for ``"sigmoid"`` by the sum and 1e-20, as DeepSeek-V3
        does. ``"softmax_after"`` always does.
      bias: ``[experts]``, floating-point, added to the scores (for ``"softmax_after"``: to the logits) for the choice
        alone: weights do not have it, and its gradient is zero.
      num_groups: neighbouring experts form this many groups of equal size. The score of a group is the sum of its two
        greatest scores with bias.
      top_groups: the number of groups, those of the greatest scores, that a token may choose from. Experts of other
        groups are chosen only before ones with −inf.
      scale: multiplies the weights after all else.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``(weights, experts)``, both ``[..., k]`` and best first: float32 (float64 for float64 logits) and int32. The
      gradient of the weights reaches the logits; the choice has none.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _TOP_K_ROUTER(*args, **kwargs)
