"""Tokens from hidden states, without their logits: the argument list, its checks and the public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import bias_array, rows_and_matrix
from tilewright.kernels.op.arguments import PlatformOption, flag, soft_cap
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.sampling.arguments import row_keys, temperatures
from tilewright.kernels.sampling.cases import LINEAR_CASES, LinearSampleCase
from tilewright.kernels.sampling.inputs import Draw, LinearSampleInputs, draw_structs
from tilewright.kernels.sampling.reference import linear_sample_reference
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/sampling.LinearSample")
class LinearSample(InferenceKernel[LinearSampleInputs, Draw]):
    """Tokens drawn from the logits of a linear head; see ``linear_sample`` for the arguments."""

    cases: ClassVar[OpCases[LinearSampleCase]] = LINEAR_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 1, "key": 1, "temperature": 0})

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.sampling.triton.linear_sample:TritonLinearSample",
            "tilewright.kernels.sampling.xla.linear_sample:XlaLinearSample",
        )
        super().__init__("linear_sample", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike,
        key: ArrayLike,
        *,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike | None = None,
        vocab_first: bool = False,
        logits_soft_cap: float | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> LinearSampleInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        first = flag("vocab_first", vocab_first)
        rows, matrix, vocab = rows_and_matrix(("x", "weight"), x, weight, first)
        leading = tuple(rows.shape[:-1])
        return LinearSampleInputs(
            rows,
            matrix,
            row_keys(key, leading),
            None if bias is None else bias_array(bias, vocab),
            temperatures(temperature, leading),
            first,
            soft_cap(logits_soft_cap),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: LinearSampleInputs) -> Any:
        return draw_structs(inputs.leading, return_log_probs=True)

    def outputs(self, inputs: LinearSampleInputs, results: Draw) -> Any:
        return tuple(results)

    def reference(self, inputs: LinearSampleInputs) -> Any:
        return tuple(linear_sample_reference(inputs))

    def no_gradient(self) -> str:
        return f"{self.name} is for inference and has no gradient; see linear_log_probs for policy gradients"

    def flops(self, inputs: LinearSampleInputs, direction: Direction) -> float:
        return 2.0 * inputs.rows * inputs.d * inputs.vocab

    def sampled(self, inputs: LinearSampleInputs, key: jax.Array) -> LinearSampleInputs:
        """Logits of about 1, and temperatures of 1 where the call has any."""
        found = super().sampled(inputs, key)
        weight = (found.weight * max(inputs.d, 1) ** -0.5).astype(found.weight.dtype)
        given = inputs.temperature
        return found.replace(weight=weight, temperature=None if given is None else jnp.ones(given.shape, given.dtype))


_LINEAR_SAMPLE = LinearSample()


@public_function(LinearSample.prepare)
def linear_sample(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Draws a token of each row from ``softmax((x · weight + bias) / temperature)``, without the logits in memory.

    The token is that of ``sample`` with the same key and the logits in float32: a row's token depends on its x, its
    temperature and its key alone, as far as the rounding of a matmul does not depend on its other rows.

    Args:
      x: ``[..., d]``, floating-point: the last hidden states.
      weight: ``[d, vocab]``.
      key: a key for all rows, of which row i uses ``jax.random.fold_in(key, i)``, or keys of the shape ``[...]``; as
        ``sample`` takes them.
      temperature: a number, or an array of one for each row, by which logits are divided. 0 is greedy.
      bias: ``[vocab]``.
      vocab_first: weight is ``[vocab, d]``, as an embedding is.
      logits_soft_cap: logits become ``cap · tanh(logits / cap)``.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``(tokens, log_probs)``, ``int32[...]`` and ``float32[...]``: the log-probability of the token in the distribution
      from which it is drawn. For temperature 0 in that of temperature 1, as ``linear_log_probs`` gives it. What is not
      finite counts as in ``sample``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _LINEAR_SAMPLE(*args, **kwargs)
