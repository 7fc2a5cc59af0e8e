"""The linear cross-entropy: its argument list, and the parts that all its backends share."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    Reduction,
    bias_array,
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
from tilewright.kernels.linear_cross_entropy.inputs import (
    IGNORED,
    LossInputs,
    LossOptions,
    LossProblem,
    LossResults,
)
from tilewright.kernels.linear_cross_entropy.losses import losses, reduced, weights, wide_dtype
from tilewright.kernels.linear_cross_entropy.partitioning import loss_partitioning
from tilewright.kernels.linear_cross_entropy.reference import losses_reference, statistics_reference
from tilewright.kernels.linear_cross_entropy.shards import (
    TypedSplit,
    local_labels,
    merged_lse,
    of_all_devices,
    summed_over,
)
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.portfolio import Choice, PortfolioKernel, lazy
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, devices_along, explicit_mesh, gathered, typed_axes
from tilewright.kernels.op.x64 import without_x64
from tilewright.ops.kernel.kernel import Invocation, errors_naming
from tilewright.ops.kernel.prepared import prepare
from tilewright.ops.utils.stable_ids import stable_id

BACKENDS = (
    "tilewright.kernels.linear_cross_entropy.hopper.backend:HopperLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.triton.backend:TritonLinearCrossEntropy",
    "tilewright.kernels.linear_cross_entropy.xla.backend:XlaLinearCrossEntropy",
)
"""The backends of every op over statistics of one head."""


@stable_id("tilewright/linear_cross_entropy.LinearCrossEntropy")
class LinearCrossEntropy(PortfolioKernel[LossInputs, LossProblem, LossResults]):
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
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks a call; reads only types, shapes and dtypes."""
        first = arguments.flag("vocab_first", vocab_first)
        rows, matrix, vocab = rows_and_matrix(("x", "weight"), x, weight, first)
        tokens = tuple(rows.shape[:-1])
        ignored = arguments.integer("ignore_index", ignore_index)
        options: dict[str, Any] = {
            "vocab_first": first,
            "label_smoothing": fraction("label_smoothing", label_smoothing),
            "z_loss": not_negative("z_loss", z_loss),
            "logits_soft_cap": arguments.soft_cap(logits_soft_cap),
            "reduction": reduction_name(reduction),
            "return_lse": arguments.flag("return_lse", return_lse),
            "platform": arguments.platforms(platform),
        }
        arrays = [rows, matrix]
        if bias is not None:
            options["bias"] = bias_array(bias, vocab)
            arrays.append(options["bias"])
        if token_weights is not None:
            options["token_weights"] = token_weights_array(token_weights, tokens)
            arrays.append(options["token_weights"])
        if gradient_epsilon is not None:
            options["gradient_epsilon"] = positive("gradient_epsilon", gradient_epsilon)
            if axis_name is not None:
                # A device knows the probabilities in its own part alone.
                raise ValueError(f"{gradient_epsilon=} is not taken with a split vocabulary, {axis_name=}")
        if axis_name is None:
            canonical = labels_array(labels, tokens, vocab, ignored)
        else:
            # Labels of this part alone; those of others are no mistake. Which axis it is does not change the program,
            # so its name is in no key, and a tuning outside of shard_map serves calls inside.
            options["is_part"] = True
            canonical = labels_array(labels, tokens, vocab, IGNORED)
        arrays.append(canonical)
        # Set only if True: keys of calls on one device do not have them.
        if may_be_distributed(*arrays):
            options["is_distributed"] = True
        elif explicit_mesh(*arrays) is None and reduction != "none" and not return_lse and axis_name is None:
            options["keeps_gradients"] = True
        return (rows, matrix, canonical), options

    def inputs(
        self,
        x: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        vocab_first: bool,
        reduction: str,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_soft_cap: float | None = None,
        bias: jax.Array | None = None,
        token_weights: jax.Array | None = None,
        gradient_epsilon: float | None = None,
        is_part: bool = False,
        is_distributed: bool = False,
        keeps_gradients: bool = False,
        **_: Any,
    ) -> LossInputs:
        """The prepared arguments in the form that backends take."""
        summary: Any = "statistics" if is_part else "none" if reduction == "none" else "scalar"
        options = LossOptions(
            summary, vocab_first, label_smoothing, z_loss, logits_soft_cap, gradient_epsilon, keeps_gradients,
            is_distributed,
        )  # fmt: skip
        return LossInputs(x, weight, labels, bias, token_weights, options)

    def problem(self, *args: Any, **kwargs: Any) -> LossProblem:
        """The sizes of prepared arguments, abstract or concrete."""
        return LossProblem.of(self.inputs(*args, **kwargs))

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The oracle on prepared arguments: promote narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        if inputs.options.summary == "statistics":
            lse, label_logit, logit_sum = statistics_reference(inputs)
            return (lse, label_logit, logit_sum) if inputs.options.needs_sum else (lse, label_logit)
        loss, lse = losses_reference(inputs)
        count = weights(inputs.labels, inputs.token_weights, loss.dtype).sum()
        loss = reduced(loss if kwargs["reduction"] == "none" else loss.sum(), count, kwargs["reduction"])
        return (loss, lse) if kwargs["return_lse"] else loss

    def results(self, inputs: LossInputs) -> Any:
        options, wide = inputs.options, wide_dtype(inputs)
        token, scalar = jax.ShapeDtypeStruct(inputs.labels.shape, wide), jax.ShapeDtypeStruct((), wide)
        found = LossResults(token, token, token if options.needs_sum else None)
        if options.summary == "statistics":
            return found
        if options.summary == "none":
            return dataclasses.replace(found, total=token)
        kept = {"d_x": inputs.x, "d_weight": inputs.weight, "d_bias": inputs.bias} if options.keeps_gradients else {}
        gradients = {n: None if x is None else jax.ShapeDtypeStruct(x.shape, wide) for n, x in kept.items()}
        return dataclasses.replace(found, total=scalar, count=scalar, **gradients)

    def run(self, *args: Any, cfg: Choice, **kwargs: Any) -> Any:
        """The loss alone: a kernel that keeps what gradients are made from would do so for nothing."""
        with without_x64(args, kwargs):
            inputs = self.inputs(*args, **kwargs)
            options = dataclasses.replace(inputs.options, keeps_gradients=False)
            inputs = dataclasses.replace(inputs, options=options)
            return self.outputs(inputs, self.forward_results(inputs, cfg), **kwargs)

    def outputs(self, inputs: LossInputs, results: LossResults, *args: Any, **kwargs: Any) -> Any:
        """The loss, and lse if it is wanted; or the statistics."""
        if results.total is None:
            found = (results.lse, results.label_logit)
            return (*found, results.logit_sum) if inputs.options.needs_sum else found
        loss = reduced(results.total, results.count, kwargs["reduction"])
        return (loss, results.lse) if kwargs["return_lse"] else loss

    def cotangents(
        self, inputs: LossInputs, results: LossResults, cotangents: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> LossResults:
        """Selects those of lse, or of the sum of the losses and of the sum of the weights."""
        if results.total is None:
            return LossResults(*cotangents)
        of_loss, *of_lse = cotangents
        reduction = kwargs["reduction"]
        if reduction == "none":
            return LossResults(of_lse[0] if of_lse else None, None, total=of_loss)
        _, pull_back = jax.vjp(lambda total, count: reduced(total, count, reduction), results.total, results.count)
        of_total, of_count = pull_back(of_loss)
        return LossResults(of_lse[0] if of_lse else None, None, total=of_total, count=of_count)

    def differentiated(self, inputs: LossInputs, wanted: frozenset[str]) -> LossInputs:
        """The inputs, with the names of the arrays whose gradients are used."""
        return dataclasses.replace(inputs, gradients=wanted & inputs.gradients)

    def partitioning(self, inputs: LossInputs) -> Partitioning | None:
        """Splits by tokens, as in the types of x and of the labels."""
        return loss_partitioning(inputs)

    def sample_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal arrays, logits of about 1, and labels of the whole vocabulary."""
        args, kwargs = super().sample_inputs(inv, key)
        problem = self.problem_of(inv)
        # Otherwise a token's largest logit has all the probability, and nothing else would be checked.
        return (
            args[0],
            args[1] / math.sqrt(max(problem.d, 1)),
            _drawn_labels(key, args[2].shape, problem.vocab),
        ), kwargs

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of one matmul forward and three backward, and bytes of every array once."""
        problem, operands = self.problem_of(inv), array_bytes(inv.abstract_args)
        flops = 2.0 * problem.tokens * problem.d * problem.vocab
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
def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
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
    if kwargs.get("axis_name") is not None:
        return _split_vocabulary(*args, **kwargs)
    given = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
    _check_labels(given)
    with errors_naming(_LINEAR_CROSS_ENTROPY):
        split = _typed_split(given)
        if split is not None:
            return _on_explicit_axes(split, **given)
    return _LINEAR_CROSS_ENTROPY(*args, **kwargs)


_POSITIONAL = ("x", "weight", "labels")


def _typed_split(given: Mapping[str, Any]) -> TypedSplit | None:
    """The split of the vocabulary that types of a call's arrays ask for, if they may be those of a right call."""
    x, weight, labels = (given.get(name) for name in _POSITIONAL)
    # The matrix first: of nearly every call this is all that is read. A probability below ``gradient_epsilon`` is known
    # where the whole vocabulary is.
    if not isinstance(weight, jax.Array) or weight.ndim != 2 or given.get("gradient_epsilon") is not None:
        return None
    axis = 0 if given.get("vocab_first") else 1
    if typed_axes(weight)[axis] is None or x is None or labels is None:
        return None
    arrays = {"x": x, "labels": labels, "token_weights": given.get("token_weights")}
    by_token = {name: arguments.as_array(name, each) for name, each in arrays.items() if each is not None}
    return TypedSplit.of(by_token, {"weight": (weight, axis)}, by_token["labels"].ndim)


def _on_explicit_axes(
    split: TypedSplit,
    *,
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    axis_name: None = None,
    **options: Any,
) -> Any:
    """The loss over a vocabulary that is split by the type of the matrix."""
    first = bool(options.get("vocab_first"))
    given = {"x": x, "weight": weight, "labels": labels, "bias": bias, "token_weights": token_weights}
    specs = {
        "x": split.tokens, "weight": split.spec(2, 0 if first else 1), "labels": split.tokens,
        "bias": split.spec(1, 0), "token_weights": split.tokens,
    }  # fmt: skip
    arrays = {name: arguments.as_array(name, each) for name, each in given.items() if each is not None}
    loss = split.tokens if options.get("reduction") == "none" else PartitionSpec()
    return split.run(
        lambda parts: _split_vocabulary(**parts, axis_name=split.vocab, token_names=split.token_names, **options),
        arrays,
        {name: specs[name] for name in arrays},
        (loss, split.tokens) if options.get("return_lse") else loss,
    )


def _check_labels(given: Mapping[str, Any]) -> None:
    """Raises for labels out of range whose values are known, unless ``prepare`` has something else to say first."""
    x, weight, labels = (given.get(name) for name in _POSITIONAL)
    of_x, shape = getattr(x, "shape", ()), getattr(weight, "shape", ())
    axis, ignore_index = 0 if given.get("vocab_first") else 1, given.get("ignore_index", -100)
    if labels is not None and len(shape) == 2 and of_x[-1:] == shape[1 - axis : 2 - axis]:
        check_labels_on_host(labels, shape[axis], arguments.integer("ignore_index", ignore_index))


def _split_vocabulary(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    axis_name: str | tuple[str, ...],
    ignore_index: int = -100,
    token_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    token_names: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """The loss over a vocabulary that is split over a mesh axis, from each device's statistics.

    Args:
      token_names: axes over which tokens are split, if a scalar is to be that of all of them.
    """
    kernel = _LINEAR_CROSS_ENTROPY
    # The checks of a call; labels of the whole vocabulary have the part's bounds here, so they are checked below.
    call = {"axis_name": axis_name, "token_weights": token_weights, "reduction": reduction, "return_lse": return_lse}
    given, checked = prepare(kernel, (x, weight, labels), call | options | {"ignore_index": ignore_index})
    inputs = kernel.inputs(*given, **checked)
    with errors_naming(kernel):
        devices = devices_along(axis_name, "vocabulary")
    check_labels_on_host(labels, inputs.vocab * devices, arguments.integer("ignore_index", ignore_index))
    whole = arguments.to_int32(arguments.as_array("labels", labels))
    whole = jnp.where(whole == ignore_index, IGNORED, jnp.where(whole < 0, np.iinfo(np.int32).max, whole))
    own, wrong = local_labels(whole, inputs.vocab, axis_name)
    # The loss from here on is JAX's to differentiate: its transposes of the gather fit both kinds of shard_map.
    statistics = kernel(of_all_devices(given[0], axis_name), given[1], own, axis_name=axis_name, **options)
    parts = gathered(jnp.stack(statistics), axis_name)
    lse, label_logit = merged_lse(parts[:, 0]), parts[:, 1].sum(0)
    logit_sum = parts[:, 2].sum(0) if inputs.options.needs_sum else None
    valid = whole != IGNORED
    lse = jnp.where(valid, lse, 0)
    label_logit = jnp.where(wrong, jnp.nan, label_logit)
    vocab = inputs.vocab * devices
    weight_of = weights(whole, inputs.token_weights, lse.dtype)
    loss = jnp.where(valid, losses(inputs.options, vocab, lse, label_logit, logit_sum), 0) * weight_of
    if reduction != "none":
        total, count = summed_over((loss.sum(), weight_of.sum()), token_names)
        loss = reduced(total, count, reduction)
    return (loss, lse) if return_lse else loss
