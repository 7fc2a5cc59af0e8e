"""The linear cross-entropy: its argument list, and the parts that all its backends share."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    bias_array,
    check_labels,
    check_labels_on_host,
    fraction,
    labels_array,
    may_be_distributed,
    not_negative,
    positive,
    reduction_name,
    rows_and_matrix,
    token_weights_array,
)
from tilewright.kernels.linear_cross_entropy.cases import CASES
from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossResults, Reduction
from tilewright.kernels.linear_cross_entropy.losses import losses, of_sums, reduced, weights, wide_dtype
from tilewright.kernels.linear_cross_entropy.partitioning import split_by_tokens
from tilewright.kernels.linear_cross_entropy.reference import losses_reference, statistics_reference
from tilewright.kernels.linear_cross_entropy.shards import (
    TypedSplit,
    local_labels,
    merged_lse,
    of_all_devices,
    splits_vocabulary,
    summed_over,
)
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.backend import lazy
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import AxisName, Partitioning, devices_along, explicit_mesh, gathered
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id

BACKENDS = (
    "tilewright.kernels.linear_cross_entropy.hopper.backend:HopperLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.triton.backend:TritonLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.xla.backend:XlaLinearCrossEntropy",
)
"""The backends of every op over statistics of one head."""


@stable_id("tilewright/linear_cross_entropy.LinearCrossEntropy")
class LinearCrossEntropy(PortfolioKernel[LossInputs, LossResults]):
    """The cross-entropy of ``x · weight``; see ``linear_cross_entropy`` for the arguments.

    With ``axis_name`` a call of the kernel returns the statistics of a device's part of the vocabulary, for labels of
    that part: lse, the label's logit, and with label smoothing the sum of the logits.
    """

    cases = CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 1, "labels": 0})
    run_is_forward: ClassVar[bool] = False  # it has no gradients

    def __init__(self) -> None:
        super().__init__("linear_cross_entropy", version="1", implementations=[lazy(each) for each in BACKENDS])

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
            # A device knows the probabilities in its own part alone.
            raise ValueError(f"{gradient_epsilon=} is not taken with a split vocabulary, {axis_name=}")
        # Labels of a part alone; those of others are no mistake. Which axis it is does not change the program, so its
        # name is in no key, and a tuning outside of shard_map serves calls inside.
        canonical = labels_array(labels, tokens, vocab, ignored if axis_name is None else IGNORED)
        arrays = [each for each in (rows, matrix, added, given, canonical) if each is not None]
        distributed = may_be_distributed(*arrays)
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
            platform=arguments.platforms(platform),
        )

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """The loss over a vocabulary that ``axis_name`` splits, or the types of the arrays."""
        if len(args) == 1:
            return None  # prepared inputs are those of a part
        axis_name, weight = kwargs.get("axis_name"), args[1] if len(args) > 1 else kwargs.get("weight")
        # A probability below ``gradient_epsilon`` is known where the whole vocabulary is.
        whole = kwargs.get("gradient_epsilon") is not None
        if axis_name is None and (whole or not splits_vocabulary(kwargs.get("vocab_first", False), weight)):
            return None
        inputs = self.prepare(*args, **kwargs)
        if axis_name is not None:
            labels, ignored = args[2] if len(args) > 2 else kwargs["labels"], int(kwargs.get("ignore_index", -100))
            vocab = inputs.vocab * devices_along(axis_name, "vocabulary")
            check_labels_on_host(labels, vocab, ignored)
            # As prepared, those of other devices' parts are not known.
            inputs = inputs.replace(labels=labels_array(labels, inputs.labels.shape, vocab, ignored))
            return lambda: _of_parts(inputs, cfg, axis_name)
        split = TypedSplit.of(inputs)
        if split is None:
            return None
        of_loss = split.tokens if inputs.reduction == "none" else PartitionSpec()
        out = (of_loss, split.tokens) if inputs.return_lse else of_loss
        return lambda: split.run(lambda part: _of_parts(part, cfg, split.vocab, split.token_names), inputs, out)

    def reference(self, inputs: LossInputs) -> Any:
        """The oracle: promote narrow arrays for exact results."""
        if inputs.summary == "statistics":
            lse, label_logit, logit_sum = statistics_reference(inputs)
            return (lse, label_logit, logit_sum) if inputs.needs_sum else (lse, label_logit)
        loss, lse = losses_reference(inputs)
        count = weights(inputs.labels, inputs.token_weights, loss.dtype).sum()
        loss = reduced(loss if inputs.reduction == "none" else loss.sum(), count, inputs.reduction)
        return (loss, lse) if inputs.return_lse else loss

    def results(self, inputs: LossInputs) -> Any:
        wide = wide_dtype(inputs)
        token, scalar = jax.ShapeDtypeStruct(inputs.labels.shape, wide), jax.ShapeDtypeStruct((), wide)
        found = LossResults(token, token, token if inputs.needs_sum else None)
        if inputs.summary == "statistics":
            return found
        if inputs.summary == "none":
            return dataclasses.replace(found, total=token)
        kept = {"d_x": inputs.x, "d_weight": inputs.weight, "d_bias": inputs.bias} if inputs.keeps_gradients else {}
        gradients = {n: None if x is None else jax.ShapeDtypeStruct(x.shape, wide) for n, x in kept.items()}
        return dataclasses.replace(found, total=scalar, count=scalar, **gradients)

    def run(self, inputs: LossInputs, *, cfg: Choice) -> Any:  # type: ignore[override]
        """The loss alone: a kernel that keeps what gradients are made from would do so for nothing."""
        return super().run(inputs.replace(keeps_gradients=False), cfg=cfg)

    def outputs(self, inputs: LossInputs, results: LossResults) -> Any:
        """The loss, and lse if it is wanted; or the statistics."""
        if results.total is None:
            found = (results.lse, results.label_logit)
            return (*found, results.logit_sum) if inputs.needs_sum else found
        loss = reduced(results.total, results.count, inputs.reduction)
        return (loss, results.lse) if inputs.return_lse else loss

    def cotangents(self, inputs: LossInputs, residuals: LossResults, cotangents: tuple[Any, ...]) -> LossResults:
        """Selects those of lse, or of the sum of the losses and of the sum of the weights."""
        if residuals.total is None:
            return LossResults(*cotangents)
        of_loss, *of_lse = cotangents
        of_total, of_count = of_sums(residuals.total, residuals.count, inputs.reduction, of_loss)
        return LossResults(of_lse[0] if of_lse else None, None, total=of_total, count=of_count)

    def partitioning(self, inputs: LossInputs) -> Partitioning | None:
        """Splits by tokens, as in the types of x and of the labels."""
        return split_by_tokens(inputs, lambda tokens: LossResults(tokens, tokens, tokens if inputs.needs_sum else None))

    def sampled(self, inputs: LossInputs, key: jax.Array) -> LossInputs:
        """Normal arrays, logits of about 1, and labels of the whole vocabulary."""
        found = super().sampled(inputs, key)
        # Otherwise a token's largest logit has all the probability, and nothing else would be checked.
        weight = found.weight / math.sqrt(max(inputs.d, 1))
        return found.replace(weight=weight, labels=_drawn_labels(key, inputs.labels.shape, inputs.vocab))

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of one matmul forward and three backward, and bytes of every array once."""
        inputs = self.inputs_of(inv)
        flops, operands = 2.0 * inputs.tokens * inputs.d * inputs.vocab, array_bytes(inputs)
        # Of gradients that the forward pass computes, too: a program that does not use them does not have them, and
        # these are the FLOPs by which a rate is computed, whichever form the gradients have.
        return Cost(flops, float(operands)) if inv.direction == "forward" else Cost(3 * flops, 2.0 * operands)

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Nothing: all tokens may be ignored."""
        return Cost(0.0, 0.0)


def _drawn_labels(key: jax.Array, shape: tuple[int, ...], vocab: int) -> Any:
    """Labels from all of the vocabulary, drawn on the host."""
    with jax.ensure_compile_time_eval():
        seed = np.asarray(jax.random.key_data(key)).ravel()
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


_LINEAR_CROSS_ENTROPY = LinearCrossEntropy()


@public_function(LinearCrossEntropy.prepare)
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
    if options.get("axis_name") is None:
        check_labels(x, weight, labels, options.get("vocab_first", False), options.get("ignore_index", -100))
    return _LINEAR_CROSS_ENTROPY(x, weight, labels, **options)


def _of_parts(inputs: LossInputs, cfg: object, axis_name: AxisName, token_names: tuple[str, ...] = ()) -> Any:
    """The loss over a vocabulary that is split over a mesh axis, from each device's statistics.

    Args:
      inputs: a device's part, with labels of the whole vocabulary.
      token_names: axes over which tokens are split, if a scalar is to be that of all of them.
    """
    kernel: Any = _LINEAR_CROSS_ENTROPY
    own, wrong = local_labels(inputs.labels, inputs.vocab, axis_name)
    part = inputs.replace(
        x=of_all_devices(inputs.x, axis_name), labels=own, token_weights=None, is_part=True, reduction="mean",
        return_lse=False,
    )  # fmt: skip
    # The loss from here on is JAX's to differentiate: its transposes of the gather fit both kinds of shard_map.
    parts = gathered(jnp.stack(kernel(part, cfg=cfg)), axis_name)
    lse, label_logit = merged_lse(parts[:, 0]), parts[:, 1].sum(0)
    logit_sum = parts[:, 2].sum(0) if inputs.needs_sum else None
    valid = inputs.labels != IGNORED
    lse = jnp.where(valid, lse, 0)
    label_logit = jnp.where(wrong, jnp.nan, label_logit)
    vocab = inputs.vocab * lax.axis_size(axis_name)
    weight_of = weights(inputs.labels, inputs.token_weights, lse.dtype)
    loss = jnp.where(valid, losses(inputs, vocab, lse, label_logit, logit_sum), 0) * weight_of
    if inputs.reduction != "none":
        total, count = summed_over((loss.sum(), weight_of.sum()), token_names)
        loss = reduced(total, count, inputs.reduction)
    return (loss, lse) if inputs.return_lse else loss
