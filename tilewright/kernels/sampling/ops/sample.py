"""Tokens from logits: the argument list, its checks and the public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, apply, as_array, flag, has_arithmetic
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import results
from tilewright.kernels.sampling.arguments import min_ps, row_keys, temperatures, top_ks, top_ps
from tilewright.kernels.sampling.cases import CASES, SampleCase
from tilewright.kernels.sampling.inputs import Draw, SampleInputs, draw_structs, outputs_of
from tilewright.kernels.sampling.reference import sample_reference
from tilewright.ops.utils.stable_ids import stable_id

WITH_LOG_PROBS: Mapping[str, Any] = MappingProxyType({"": jax.Array, "return_log_probs": tuple[jax.Array, jax.Array]})
"""The results of a function that returns log-probabilities as well if it is asked to."""


@stable_id("tilewright/sampling.Sample")
class Sample(InferenceKernel[SampleInputs, Draw]):
    """Tokens drawn from logits; see ``sample`` for the arguments."""

    cases: ClassVar[OpCases[SampleCase]] = CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"logits": 1, "key": 1, "temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0}
    )

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.sampling.triton.sample:TritonSample",
            "tilewright.kernels.sampling.xla.sample:XlaSample",
        )
        super().__init__("sample", version="1", backends=backends)

    def prepare(
        self,
        logits: ArrayLike,
        key: ArrayLike,
        *,
        temperature: ArrayLike = 1.0,
        top_k: ArrayLike | None = None,
        top_p: ArrayLike | None = None,
        min_p: ArrayLike | None = None,
        return_log_probs: bool = False,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> SampleInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        logits = as_array("logits", logits)
        if not logits.shape or not has_arithmetic(logits.dtype):
            raise ValueError(
                "logits must be a floating-point array of 16 bits or more, [..., vocab], got "
                f"{logits.shape=}, {logits.dtype=}"
            )
        *rows, vocab = logits.shape
        if not isinstance(vocab, int) or vocab < 1:
            raise ValueError(f"logits must have a vocabulary, of a size that is a number, got {logits.shape=}")
        leading = tuple(rows)
        return SampleInputs(
            apply(lambda x: x.astype(jnp.float32), logits) if logits.dtype.itemsize > 4 else logits,
            row_keys(key, leading),
            temperatures(temperature, leading),
            top_ks(top_k, leading, vocab),
            top_ps(top_p, leading),
            min_ps(min_p, leading),
            return_log_probs=flag("return_log_probs", return_log_probs),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: SampleInputs) -> Any:
        return draw_structs(inputs.leading, inputs.return_log_probs)

    def outputs(self, inputs: SampleInputs, results: Draw) -> Any:
        return outputs_of(results)

    def reference(self, inputs: SampleInputs) -> Any:
        return outputs_of(sample_reference(inputs))

    def no_gradient(self) -> str:
        return f"{self.name} is for inference and has no gradient; see linear_log_probs for policy gradients"

    def sampled(self, inputs: SampleInputs, key: jax.Array) -> SampleInputs:
        """Also limits as requests have them, where the call has any."""
        usual = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
        arrays = {name: getattr(inputs, name) for name in usual}
        limits = {name: jnp.full(x.shape, usual[name], x.dtype) for name, x in arrays.items() if x is not None}
        return super().sampled(inputs, key).replace(**limits)


_SAMPLE = Sample()


@public_function(Sample.prepare)
@results(WITH_LOG_PROBS)
def sample(*args: Any, **kwargs: Any) -> Any:
    """Draws one token of each row of logits, without sorting them.

    The token of a row depends on its logits, its options and its key alone: on no other row, nor on their number or
    order, nor on the config. Every option may be a number or an array with a number for each row, which may be traced,
    so that a batch can mix requests.

    Limits are thresholds of the logits: tokens of equal logits are kept or ruled out together. ``top_k`` comes first,
    then ``top_p`` of the probabilities that it leaves, of a sum of 1 again; ``min_p`` rules out more of these. NaN
    counts as −∞, −0 as 0; a token of −∞ is never drawn. A row without any other has token 0 with the log-probability
    −∞. In a row with +∞ all tokens of it are alike, and the others are ruled out.

    Args:
      logits: ``[..., vocab]``, floating-point; computed with in float32.
      key: a key for all rows, of which row i, counted through all leading dimensions, uses
        ``jax.random.fold_in(key, i)``; or keys of the shape ``[...]``, one a row. Made by ``jax.random.key`` or
        ``uint32[..., 2]``, which is what it has with "threefry2x32"; of longer keys the first two words count. Do not
        use the key of a token for another one.
      temperature: logits are divided by it. 0 is greedy: the token of the largest logit, of equal ones the first. In an
        array numbers below 0, and NaN, mean 0.
      top_k: keep tokens whose logit is at least the k-th largest. Below 1, or from the vocabulary's size on: no limit.
      top_p: keep the tokens of the largest logits whose probabilities sum up to this share, and always those of the
        largest one. From 1 on: no limit.
      min_p: keep tokens whose probability is at least this share of the largest one. 0: no limit.
      return_log_probs: also return the log-probability of the token.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The tokens, ``int32[...]``; or (tokens, log-probabilities), these in float32: of the distribution from which the
      token is drawn, after temperature and limits. For temperature 0 of the distribution of temperature 1.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _SAMPLE(*args, **kwargs)
