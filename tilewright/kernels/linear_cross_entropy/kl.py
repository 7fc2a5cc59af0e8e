"""The divergence of a student from a teacher: its argument list and the oracle."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    may_be_distributed,
    positive,
    reduction_name,
    rows_and_matrix,
    token_weights_array,
)
from tilewright.kernels.linear_cross_entropy.base import VocabularyLoss, logits_of
from tilewright.kernels.linear_cross_entropy.cases import KL_CASES
from tilewright.kernels.linear_cross_entropy.inputs import KlInputs, LossResults, Reduction
from tilewright.kernels.linear_cross_entropy.losses import of_kl_statistics, reduced
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.public import public_function
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_cross_entropy.LinearKlDivergence")
class LinearKlDivergence(VocabularyLoss[KlInputs]):
    """The divergence between the softmax of two linear heads; see ``linear_kl_divergence`` for the arguments."""

    cases = KL_CASES
    positional = ("student_x", "student_weight", "teacher_x", "teacher_weight")
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"student_x": 1, "teacher_x": 1})

    def __init__(self) -> None:
        backends = ("tilewright.kernels.linear_cross_entropy.xla.kl:XlaLinearKlDivergence",)
        super().__init__("linear_kl_divergence", version="1", backends=backends)

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
            platform=self.backends.allowed(platform),
        )

    def statistics_cotangents(
        self, inputs: KlInputs, results: LossResults, cotangents: LossResults, vocab: int
    ) -> tuple[Any, Any, Any]:
        return of_kl_statistics(inputs, cotangents)

    def split_alike(self, inputs: KlInputs) -> Sequence[Mapping[str, int]]:
        """The vocabulary of both heads."""
        return [{name: inputs.vocab_axis for _, name in inputs.heads}]

    def merged(self, inputs: KlInputs, parts: jax.Array, vocab: int) -> tuple[Any, Any, Any]:
        student, teacher = (jax.nn.logsumexp(parts[:, i], 0) for i in (0, 1))
        # Each device's difference is a mean in its part of the teacher's probabilities.
        return student, teacher, (jnp.exp(parts[:, 1] - teacher) * parts[:, 2]).sum(0)

    def reference(self, inputs: KlInputs) -> Any:
        """The oracle: promote narrow arrays for exact results."""
        u, v = (
            logits_of(jnp.where(inputs.valid[..., None], x, 0), weight, None, inputs, inputs.wide) / inputs.temperature
            for x, weight in inputs.head_arrays
        )
        if inputs.summary == "statistics":
            difference = (jax.nn.softmax(v, -1) * (v - u)).sum(-1)
            found = jax.nn.logsumexp(u, -1), jax.nn.logsumexp(v, -1), difference
            return tuple(jnp.where(inputs.valid, each, 0) for each in found)
        # By its definition, so that the formula from statistics is not checked against itself.
        log_p, log_q = jax.nn.log_softmax(u, -1), jax.nn.log_softmax(v, -1)
        weights = inputs.weights()
        loss = jnp.where(inputs.valid, (jnp.exp(log_q) * (log_q - log_p)).sum(-1), 0) * weights
        return reduced(inputs, loss if inputs.reduction == "none" else loss.sum(), weights.sum())


def _mask_array(mask: object, tokens: tuple[int, ...]) -> jax.Array:
    array = arguments.as_array("mask", mask)
    if array.dtype != jnp.bool_ or array.shape != tokens:
        raise ValueError(
            f"mask must be booleans [...] as the tokens of x, {tokens}, got {array.shape=}, {array.dtype=}"
        )
    return array


_LINEAR_KL_DIVERGENCE = LinearKlDivergence()


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
