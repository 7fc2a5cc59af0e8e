"""The linear cross-entropy and the log-probabilities of labels: their argument lists and the oracle."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    CONTENTS,
    bias_array,
    check_labels,
    fraction,
    labels_array,
    may_be_distributed,
    not_negative,
    positive,
    reduction_name,
    rows_and_matrix,
    token_weights_array,
)
from tilewright.kernels.linear_cross_entropy.base import VocabularyLoss, logits_of
from tilewright.kernels.linear_cross_entropy.cases import CASES
from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossResults, Reduction
from tilewright.kernels.linear_cross_entropy.losses import of_statistics, reduced
from tilewright.kernels.linear_cross_entropy.shards import local_labels
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.cases import generator_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import AxisName, explicit_mesh
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.ops.utils.stable_ids import stable_id

BACKENDS = (
    "tilewright.kernels.linear_cross_entropy.hopper.backend:HopperLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.triton.backend:TritonLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.tpu.backend:TpuLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.xla.backend:XlaLinearCrossEntropy",
)
"""The backends of every op over statistics of one head."""


@stable_id("tilewright/linear_cross_entropy.LinearCrossEntropy")
class LinearCrossEntropy(VocabularyLoss[LossInputs]):
    """The cross-entropy of ``x · weight``; see ``linear_cross_entropy`` for the arguments.

    With ``axis_name`` a call of the kernel returns the statistics of a device's part of the vocabulary, for labels of
    that part: lse, the label's logit, and with label smoothing the sum of the logits.
    """

    cases = CASES
    contents = CONTENTS
    positional = ("x", "weight", "labels")
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 1, "labels": 0})
    run_is_forward: ClassVar[bool] = False  # it has no gradients

    def __init__(self) -> None:
        super().__init__("linear_cross_entropy", version="1", backends=BACKENDS)

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike,
        labels: ArrayLike,
        *,
        bias: ArrayLike | None = None,
        vocab_first: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_soft_cap: float | None = None,
        ignore_index: int = -100,
        token_weights: ArrayLike | None = None,
        reduction: Reduction = "mean",
        axis_name: str | tuple[str, ...] | None = None,
        return_lse: bool = False,
        gradient_epsilon: float | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> LossInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        first = arguments.flag("vocab_first", vocab_first)
        rows, matrix, vocab = rows_and_matrix(("x", "weight"), x, weight, first)
        tokens = tuple(rows.shape[:-1])
        ignored = arguments.integer("ignore_index", ignore_index)
        added = None if bias is None else bias_array(bias, vocab)
        given = None if token_weights is None else token_weights_array(token_weights, tokens)
        epsilon = None if gradient_epsilon is None else positive("gradient_epsilon", gradient_epsilon)
        if epsilon is not None and axis_name is not None:
            # A device knows only the probabilities of its own part.
            raise ValueError(f"{gradient_epsilon=} is not taken with a split vocabulary, {axis_name=}")
        # Labels of this part only; those of other parts are not an error. The axis does not change the program, so its
        # name is in no key, and a tuning outside of shard_map serves calls inside.
        canonical = labels_array(labels, tokens, vocab, ignored if axis_name is None else IGNORED)
        arrays = [each for each in (rows, matrix, added, given, canonical) if each is not None]
        distributed = may_be_distributed(*arrays)
        # Only the gradients of a sum can be made with the loss: they lack one factor, its cotangent. The loss of each
        # token would have a factor of its own.
        is_sum = reduction != "none" and not return_lse and axis_name is None
        return LossInputs(
            rows,
            matrix,
            canonical,
            added,
            given,
            vocab_first=first,
            label_smoothing=fraction("label_smoothing", label_smoothing),
            z_loss=not_negative("z_loss", z_loss),
            logits_soft_cap=arguments.soft_cap(logits_soft_cap),
            gradient_epsilon=epsilon,
            is_part=axis_name is not None,
            keeps_gradients=is_sum and not distributed and explicit_mesh(*arrays) is None,
            is_distributed=distributed,
            reduction=reduction_name(reduction),
            return_lse=arguments.flag("return_lse", return_lse),
            platform=self.backends.allowed(platform),
        )

    def whole(self, inputs: LossInputs, given: Mapping[str, Any], vocab: int) -> LossInputs:
        # As prepared, labels of other devices' parts are not known.
        labels, ignored = given["labels"], int(given.get("ignore_index", -100))
        return inputs.replace(labels=labels_array(labels, inputs.labels.shape, vocab, ignored))

    def part(self, inputs: LossInputs, axis_name: AxisName) -> LossInputs:
        labels = local_labels(inputs.labels, inputs.vocab, axis_name)
        return inputs.replace(
            labels=labels, token_weights=None, keeps_gradients=False, reduction="mean", return_lse=False
        )

    def statistics_cotangents(
        self, inputs: LossInputs, results: LossResults, cotangents: LossResults, vocab: int
    ) -> tuple[Any, Any, Any]:
        return of_statistics(inputs, results.statistics[0], cotangents, vocab)

    def merged(self, inputs: LossInputs, parts: jax.Array, vocab: int) -> tuple[Any, Any, Any]:
        lse, label_logit = jax.nn.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)
        logit_sum = parts[:, 2].sum(0) if inputs.needs_sum else None
        # The logit of a label is in the part of one device, and 0 in the others. Of a label that no device has the loss
        # is NaN, as on one device.
        return jnp.where(inputs.valid, lse, 0), jnp.where(inputs.labels >= vocab, jnp.nan, label_logit), logit_sum

    def reference(self, inputs: LossInputs) -> Any:
        """The oracle: promote narrow arrays for exact results."""
        labels, valid = inputs.labels, inputs.valid
        x = jnp.where(valid[..., None], inputs.x, 0)  # selected before the matmul, so that 0 · NaN counts nowhere
        logits = logits_of(x, inputs.weight, inputs.bias, inputs, inputs.wide)
        fill = 0.0 if inputs.summary == "statistics" else jnp.nan
        index = jnp.where(valid, labels, 0)[..., None]
        label_logit = jnp.take_along_axis(logits, index, -1, mode="fill", fill_value=fill)[..., 0]
        found = jax.nn.logsumexp(logits, -1), label_logit, logits.sum(-1)
        lse, label_logit, logit_sum = (jnp.where(valid, each, 0) for each in found)
        if inputs.summary == "statistics":
            return (lse, label_logit, logit_sum) if inputs.needs_sum else (lse, label_logit)
        # By its definition, so that the formula of the backends is not checked against itself.
        smoothing = inputs.label_smoothing
        loss = (1 - smoothing) * (lse - label_logit) + inputs.z_loss * lse**2
        if smoothing:
            loss = loss - smoothing * (logit_sum / inputs.vocab - lse)
        if inputs.token_weights is not None:
            loss = loss * inputs.token_weights.astype(loss.dtype)
        loss, count = jnp.where(inputs.valid, loss, 0), inputs.weights().sum()
        loss = reduced(inputs, loss if inputs.reduction == "none" else loss.sum(), count)
        return (loss, lse) if inputs.return_lse else loss

    def results(self, inputs: LossInputs) -> Any:
        found = super().results(inputs)
        arrays = (inputs.x, inputs.weight, inputs.bias) if inputs.keeps_gradients and found.count is not None else ()
        kept = [None if x is None else jax.ShapeDtypeStruct(x.shape, inputs.wide) for x in arrays]
        return dataclasses.replace(found, **dict(zip(("d_x", "d_weight", "d_bias"), kept, strict=False)))

    def run(self, inputs: LossInputs, *, cfg: Choice) -> Any:
        """Computes only the loss: nothing will read what a kernel keeps for gradients."""
        return super().run(inputs.replace(keeps_gradients=False), cfg=cfg)

    def sampled(self, inputs: LossInputs, key: jax.Array) -> LossInputs:
        """Also labels of the whole vocabulary, drawn on the host."""
        labels: Any = generator_of(key).integers(0, inputs.vocab, inputs.labels.shape).astype(np.int32)
        return super().sampled(inputs, key).replace(labels=labels)


_LINEAR_CROSS_ENTROPY = LinearCrossEntropy()


@public_function(LinearCrossEntropy.prepare)
@results(WITH_LSE)
def linear_cross_entropy(x: ArrayLike, weight: ArrayLike, labels: ArrayLike, **options: Any) -> Any:
    """The cross-entropy of the logits ``x · weight + bias``, which are never in memory as a whole.

    The logits, their sums and the loss are in float32 (float64 for float64), whatever the dtypes of x and weight.

    Args:
      x: ``[..., d]``, floating-point: the tokens' last hidden states.
      weight: ``[d, vocab]``.
      labels: ``[...]`` integers. One out of range is an error where its value is known, and under ``jit`` the loss of
        its token is NaN.
      bias: ``[vocab]``.
      vocab_first: weight is ``[vocab, d]``, as an embedding is.
      label_smoothing: the share of the target that is spread evenly over the vocabulary.
      z_loss: the weight of ``lse²`` in the loss of a token.
      logits_soft_cap: logits become ``cap · tanh(logits / cap)``.
      ignore_index: the label of tokens that count nowhere; whatever they hold, NaN included, reaches nothing.
      token_weights: ``[...]``, multiplied with the losses; booleans are a mask.
      reduction: "mean" divides the sum of the losses by that of the weights (without weights by the number of tokens
        that are not ignored; over no token it is 0), "sum", or "none" for the loss of each token.
      axis_name: inside ``shard_map``, the mesh axis over which the vocabulary is split: weight and bias are this
        device's part, x and labels are whole. On explicit axes the type of weight says so instead.
      return_lse: also return ``log Σ exp(logits)`` of each token, 0 for those that are ignored; differentiable.
      gradient_epsilon: probabilities below it count as zero in gradients. By default nothing is dropped.
        Not with axis_name.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The loss, a scalar or ``[...]``, in float32; or (loss, lse).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    check_labels({"x": x, "weight": weight, "labels": labels, **options})
    return _LINEAR_CROSS_ENTROPY(x, weight, labels, **options)


@results(WITH_LSE)
def linear_log_probs(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    vocab_first: bool = False,
    logits_soft_cap: float | None = None,
    ignore_index: int = -100,
    axis_name: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    platform: PlatformOption = None,
    cfg: object = None,
) -> Any:
    """``log_softmax(x · weight + bias)`` at the labels, without the logits in memory: for policy gradients and DPO.

    A call of ``linear_cross_entropy``, whose configs and tables it shares.

    Args:
      x, weight, labels, bias, vocab_first, logits_soft_cap, axis_name, platform, cfg: as ``linear_cross_entropy``.
      ignore_index: the label of tokens whose result is 0.
      return_lse: also return ``log Σ exp(logits)``.

    Returns:
      ``[...]`` in float32 (float64 for float64); or (log-probabilities, lse).
    """
    found = linear_cross_entropy(
        x, weight, labels, bias=bias, vocab_first=vocab_first, logits_soft_cap=logits_soft_cap,
        ignore_index=ignore_index, axis_name=axis_name, return_lse=return_lse, reduction="none", platform=platform,
        cfg=cfg,
    )  # fmt: skip
    return (-found[0], found[1]) if return_lse else jax.tree.map(lambda x: -x, found)
