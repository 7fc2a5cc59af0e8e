"""The op ``unpermute``: its argument list, its checks and its public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, has_arithmetic, integer_array, to_32_bit
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.permutation.cases import UNPERMUTE_CASES, UnpermuteCase, drawn_source
from tilewright.kernels.permutation.inputs import UnpermuteInputs, UnpermuteResults
from tilewright.kernels.permutation.routing import Routing, declared
from tilewright.kernels.permutation.xla import XlaUnpermute
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/permutation.Unpermute")
class Unpermute(PortfolioKernel[UnpermuteInputs, UnpermuteResults]):
    """The sums of tokens over their rows of experts; see ``unpermute`` for the arguments."""

    cases: ClassVar[OpCases[UnpermuteCase]] = UNPERMUTE_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"rows": 2, "source": 1, "weights": 2})

    def __init__(self) -> None:
        backends = ["tilewright.kernels.permutation.triton.backend:TritonUnpermute"]
        super().__init__(
            "unpermute", version="1", backends=[*backends, "tilewright.kernels.permutation.xla:XlaUnpermute"]
        )

    def prepare(
        self,
        rows: ArrayLike,
        source: ArrayLike,
        weights: ArrayLike,
        *,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> UnpermuteInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows, weights = as_array("rows", rows), as_array("weights", weights)
        if len(rows.shape) != 2 or not has_arithmetic(rows.dtype):
            raise ValueError(
                "rows must be a floating-point array of 16 bits or more, [tokens · k, d], got "
                f"{rows.shape=}, {rows.dtype=}"
            )
        tokens, k = weights.shape if len(weights.shape) == 2 else (0, 0)
        if not isinstance(k, int) or k < 1 or tokens * k != rows.shape[0] or not has_arithmetic(weights.dtype):
            raise ValueError(
                "weights must be floating-point [tokens, k] for the tokens · k rows, with a number k of at least 1, "
                f"got {rows.shape=}, {weights.shape=}, {weights.dtype=}"
            )
        source = integer_array("source", source, rows.shape[:1], False)
        return UnpermuteInputs(rows, source, to_32_bit(weights, rows.dtype), platform=self.backends.allowed(platform))

    def results(self, inputs: UnpermuteInputs) -> Any:
        tokens, k = inputs.weights.shape
        out = jax.ShapeDtypeStruct((tokens, inputs.rows.shape[1]), inputs.rows.dtype)
        return UnpermuteResults(out, declared(tokens * k, tokens, k, 0))

    def outputs(self, inputs: UnpermuteInputs, results: UnpermuteResults) -> jax.Array:
        return results.out

    def residuals(self, results: UnpermuteResults) -> Routing:
        return results.routing

    def cotangents(self, inputs: UnpermuteInputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        return cotangents[0]

    def reference(self, inputs: UnpermuteInputs) -> Any:
        return self.outputs(inputs, XlaUnpermute().forward(inputs, FwdParams()))

    def sampled(self, inputs: UnpermuteInputs, key: jax.Array) -> UnpermuteInputs:
        """Normal rows and weights, and all choices in a random order."""
        source = drawn_source(generator_of(key), inputs.source.shape[0])
        return super().sampled(inputs, key).replace(source=jnp.asarray(source))


_UNPERMUTE = Unpermute()


@public_function(Unpermute.prepare)
def unpermute(*args: Any, **kwargs: Any) -> jax.Array:
    """The weighted sum of each token's rows, whose order is that of ``permute``.

    Sums are in float32, or float64 for float64 rows, in the order of a token's choices, and are rounded once. Choices
    without a row are left out: neither their weights nor rows that hold no choice reach anything, NaN included.

    Args:
      rows: ``[tokens · k, d]``, floating-point, such as the results of ``grouped_matmul``.
      source: ``[tokens · k]`` integers, of ``permute``: the choice of each row. No two rows may have the same; a number
        that is no choice, such as −1, means that the row holds none.
      weights: ``[tokens, k]``, floating-point: what each choice's row is multiplied by.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[tokens, d]`` in the dtype of the rows. Gradients reach rows and weights; they are 0 for rows that hold no
      choice, and for weights of choices without a row.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _UNPERMUTE(*args, **kwargs)
