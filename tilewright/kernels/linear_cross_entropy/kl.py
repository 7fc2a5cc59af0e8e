"""The divergence of a student from a teacher: its argument list, and the parts that all its backends share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    may_be_distributed,
    positive,
    reduction_name,
    rows_and_matrix,
    token_weights_array,
)
from tilewright.kernels.linear_cross_entropy.cases import KL_CASES
from tilewright.kernels.linear_cross_entropy.inputs import Reduction
from tilewright.kernels.linear_cross_entropy.kl_inputs import KlInputs, KlResults, divergences
from tilewright.kernels.linear_cross_entropy.losses import of_sums, reduced
from tilewright.kernels.linear_cross_entropy.partitioning import split_by_tokens
from tilewright.kernels.linear_cross_entropy.reference import logits_of
from tilewright.kernels.linear_cross_entropy.shards import (
    TypedSplit,
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
from tilewright.kernels.op.sharding import AxisName, Partitioning, devices_along, gathered
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_cross_entropy.LinearKlDivergence")
class LinearKlDivergence(PortfolioKernel[KlInputs, KlResults]):
    """The divergence between the softmax of two linear heads; see ``linear_kl_divergence`` for the arguments.

    With ``axis_name`` a call of the kernel returns the statistics of a device's part of the vocabulary.
    """

    cases = KL_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"student_x": 1, "teacher_x": 1})

    def __init__(self) -> None:
        backends = ("tilewright.kernels.linear_cross_entropy.xla.kl:XlaLinearKlDivergence",)
        super().__init__("linear_kl_divergence", version="1", implementations=[lazy(each) for each in backends])

    def prepare(
        self,
        student_x: ArrayLike,
        student_weight: ArrayLike,
        teacher_x: ArrayLike,
        teacher_weight: ArrayLike,
        *,
        temperature: float = 1.0,
        vocab_first: bool = False,
        logits_soft_cap: float | None = None,
        mask: ArrayLike | None = None,
        token_weights: ArrayLike | None = None,
        reduction: Reduction = "mean",
        axis_name: str | tuple[str, ...] | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> KlInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        first = arguments.flag("vocab_first", vocab_first)
        student = rows_and_matrix(("student_x", "student_weight"), student_x, student_weight, first)
        teacher = rows_and_matrix(("teacher_x", "teacher_weight"), teacher_x, teacher_weight, first)
        tokens = tuple(student[0].shape[:-1])
        if teacher[0].shape[:-1] != tokens or teacher[2] != student[2]:
            raise ValueError(
                f"student and teacher must have the same tokens and vocabulary, got student_x.shape="
                f"{tuple(student[0].shape)}, teacher_x.shape={tuple(teacher[0].shape)}, and vocabularies "
                f"of {student[2]} and {teacher[2]}"
            )
        counted = None if mask is None else _mask_array(mask, tokens)
        given = None if token_weights is None else token_weights_array(token_weights, tokens)
        arrays = (*student[:2], *teacher[:2], counted, given)
        return KlInputs(
            *arrays,
            temperature=positive("temperature", temperature),
            vocab_first=first,
            logits_soft_cap=arguments.soft_cap(logits_soft_cap),
            is_part=axis_name is not None,
            is_distributed=may_be_distributed(*(each for each in arrays if each is not None)),
            reduction=reduction_name(reduction),
            platform=arguments.platforms(platform),
        )

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """The divergence over a vocabulary that ``axis_name`` splits, or the types of the arrays."""
        if len(args) == 1:
            return None  # prepared inputs are those of a part
        given = dict(zip(_POSITIONAL, args, strict=False)) | dict(kwargs)
        axis_name, matrices = given.get("axis_name"), (given.get("student_weight"), given.get("teacher_weight"))
        if axis_name is None and not splits_vocabulary(given.get("vocab_first", False), *matrices):
            return None
        inputs = self.prepare(*args, **kwargs)
        if axis_name is not None:
            devices_along(axis_name, "vocabulary")
            return lambda: _of_parts(inputs, cfg, axis_name)
        split = TypedSplit.of(inputs)
        if split is None:
            return None
        out = split.tokens if inputs.reduction == "none" else PartitionSpec()
        return lambda: split.run(lambda part: _of_parts(part, cfg, split.vocab, split.token_names), inputs, out)

    def reference(self, inputs: KlInputs) -> Any:
        """The oracle: promote narrow arrays for exact results."""
        u, v = (
            logits_of(jnp.where(inputs.valid[..., None], x, 0), weight, None, inputs, inputs.wide) / inputs.temperature
            for x, weight in ((inputs.student_x, inputs.student_weight), (inputs.teacher_x, inputs.teacher_weight))
        )
        if inputs.summary == "statistics":
            difference = (jax.nn.softmax(v, -1) * (v - u)).sum(-1)
            found = jax.nn.logsumexp(u, -1), jax.nn.logsumexp(v, -1), difference
            return tuple(jnp.where(inputs.valid, each, 0) for each in found)
        # By its definition, so that the formula from statistics is not checked against itself.
        log_p, log_q = jax.nn.log_softmax(u, -1), jax.nn.log_softmax(v, -1)
        weights = inputs.weights()
        loss = jnp.where(inputs.valid, (jnp.exp(log_q) * (log_q - log_p)).sum(-1), 0) * weights
        return reduced(loss if inputs.reduction == "none" else loss.sum(), weights.sum(), inputs.reduction)

    def results(self, inputs: KlInputs) -> Any:
        token, scalar = (jax.ShapeDtypeStruct(shape, inputs.wide) for shape in (inputs.token_shape, ()))
        found = KlResults(token, token, token)
        if inputs.summary == "statistics":
            return found
        sums = {"total": token} if inputs.summary == "none" else {"total": scalar, "count": scalar}
        return dataclasses.replace(found, **sums)

    def outputs(self, inputs: KlInputs, results: KlResults) -> Any:
        """The loss, or the statistics."""
        if results.total is None:
            return results.student_lse, results.teacher_lse, results.difference
        return reduced(results.total, results.count, inputs.reduction)

    def cotangents(self, inputs: KlInputs, residuals: KlResults, cotangents: tuple[Any, ...]) -> KlResults:
        """Selects those of the sum of the losses and of the sum of the weights."""
        if residuals.total is None:
            return KlResults(*cotangents)
        of_total, of_count = of_sums(residuals.total, residuals.count, inputs.reduction, cotangents[0])
        return KlResults(None, None, None, total=of_total, count=of_count)

    def partitioning(self, inputs: KlInputs) -> Partitioning | None:
        """Splits by tokens, as in the types of both x."""
        return split_by_tokens(inputs, lambda tokens: KlResults(tokens, tokens, tokens))

    def sampled(self, inputs: KlInputs, key: jax.Array) -> KlInputs:
        """Normal arrays, and logits of about 1."""
        found = super().sampled(inputs, key)
        sizes = {"student_weight": inputs.d, "teacher_weight": inputs.teacher_d}
        matrices = {name: (getattr(found, name), max(d, 1) ** -0.5) for name, d in sizes.items()}
        return found.replace(**{name: (x * scale).astype(x.dtype) for name, (x, scale) in matrices.items()})

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of two matmuls forward, and of four backward with a constant teacher; bytes of every array once."""
        inputs = self.inputs_of(inv)
        operands = array_bytes(inputs)
        student, teacher = (2.0 * inputs.tokens * inputs.vocab * d for d in (inputs.d, inputs.teacher_d))
        if inv.direction == "forward":
            return Cost(student + teacher, float(operands))
        return Cost(3 * student + teacher, 2.0 * operands)

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Nothing: the mask may be False for all tokens."""
        return Cost(0.0, 0.0)


def _mask_array(mask: object, tokens: tuple[int, ...]) -> jax.Array:
    array = arguments.as_array("mask", mask)
    if array.dtype != jnp.bool_ or array.shape != tokens:
        raise ValueError(
            f"mask must be booleans [...] as the tokens of x, {tokens}, got {array.shape=}, {array.dtype=}"
        )
    return array


_LINEAR_KL_DIVERGENCE = LinearKlDivergence()
_POSITIONAL = ("student_x", "student_weight", "teacher_x", "teacher_weight")


@public_function(LinearKlDivergence.prepare)
def linear_kl_divergence(
    student_x: ArrayLike, student_weight: ArrayLike, teacher_x: ArrayLike, teacher_weight: ArrayLike, **options: Any
) -> jax.Array:
    """The Kullback-Leibler divergence KL(teacher ‖ student) of two linear heads, without their logits in memory.

    ``Σ q (log q - log p)`` with ``p = softmax(student_x · student_weight / temperature)`` and q the teacher's, in
    float32. It is not multiplied by the square of the temperature. Gradients flow to the teacher, too, if they
    are used: ``jax.lax.stop_gradient`` or not differentiating it saves their time.

    Args:
      student_x: ``[..., d]``, floating-point.
      student_weight: ``[d, vocab]``.
      teacher_x: ``[..., e]``.
      teacher_weight: ``[e, vocab]``.
      temperature: divides the logits of both.
      vocab_first: both matrices are ``[vocab, d]``.
      logits_soft_cap: logits become ``cap · tanh(logits / cap)``, before the temperature.
      mask: ``[...]`` booleans, False for tokens that count nowhere; whatever they hold reaches nothing.
      token_weights: ``[...]``, multiplied with the divergences.
      reduction: "mean" divides the sum by that of the weights of tokens that count (without weights by their number;
        over no token it is 0), "sum", or "none" for each token.
      axis_name: inside ``shard_map``, the mesh axis over which the vocabulary is split: both matrices are this
        device's part. On explicit axes the types of the matrices say so instead.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The divergence, a scalar or ``[...]``, in float32 (float64 for float64).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    divergence: jax.Array = _LINEAR_KL_DIVERGENCE(student_x, student_weight, teacher_x, teacher_weight, **options)
    return divergence


def _of_parts(inputs: KlInputs, cfg: object, axis_name: AxisName, token_names: tuple[str, ...] = ()) -> jax.Array:
    """The divergence over a vocabulary that is split over a mesh axis, from each device's statistics.

    Args:
      inputs: a device's part.
      token_names: axes over which tokens are split, if a scalar is to be that of all of them.
    """
    kernel: Any = _LINEAR_KL_DIVERGENCE
    student, teacher = (of_all_devices(x, axis_name) for x in (inputs.student_x, inputs.teacher_x))
    statistics = kernel(inputs.replace(student_x=student, teacher_x=teacher, is_part=True), cfg=cfg)
    parts = gathered(jnp.stack(statistics), axis_name)
    # As of a vocabulary that is whole, from here on in plain JAX.
    lse = [merged_lse(parts[:, i]) for i in (0, 1)]
    # Each device's difference is a mean in its part of the teacher's probabilities.
    difference = (jnp.exp(parts[:, 1] - lse[1]) * parts[:, 2]).sum(0)
    weights = inputs.weights()
    loss = jnp.where(inputs.valid, divergences(KlResults(lse[0], lse[1], difference)), 0) * weights
    if inputs.reduction == "none":
        return loss
    total, count = summed_over((loss.sum(), weights.sum()), token_names)
    return reduced(total, count, inputs.reduction)
