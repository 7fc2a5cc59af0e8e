"""The inputs and results of the backends of ``linear_kl_divergence``, and its loss from the statistics of logits.

| symbol | is |
| --- | --- |
| u, v | logits of student and teacher, after the soft cap, divided by the temperature |
| p, q | their softmax |
| D | Σ q (v - u), the difference of the logits in the mean of the teacher |
| t | ``D - lse(v) + lse(u)``, the divergence of a token |
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tilewright.kernels.linear_cross_entropy.inputs import Reduction, Summary, summary_of
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.inputs import OpInputs, static


class KlInputs(OpInputs):
    """A call after ``prepare``; the options that ``LossInputs`` has mean the same.

    Attributes:
      student_x, teacher_x: ``[*tokens, d]``, each with a d of its own.
      mask: ``[*tokens]``, False for tokens that count nowhere.
    """

    student_x: Float[Array, "*tokens d"]
    student_weight: Float[Array, "_ _"]
    teacher_x: Float[Array, "*tokens e"]
    teacher_weight: Float[Array, "_ _"]
    mask: Bool[Array, "*tokens"] | None = None
    token_weights: Float[Array, "*tokens"] | None = None
    temperature: float = static(default=1.0)
    vocab_first: bool = static(default=False)
    logits_soft_cap: float | None = static(default=None)
    is_part: bool = static(default=False)
    is_distributed: bool = static(default=False, role="call")
    reduction: Reduction = static(default="mean", role="call")

    @property
    def summary(self) -> Summary:
        """The form of the results."""
        return summary_of(self.is_part, self.reduction)

    @property
    def vocab_axis(self) -> int:
        return 0 if self.vocab_first else 1

    @property
    def vocab_axes(self) -> dict[str, int]:
        """The axis of the vocabulary in each array that has one."""
        return {"student_weight": self.vocab_axis, "teacher_weight": self.vocab_axis}

    @property
    def vocab(self) -> int:
        return self.student_weight.shape[self.vocab_axis]

    @property
    def token_shape(self) -> tuple[int, ...]:
        return self.student_x.shape[:-1]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return math.prod(self.token_shape)

    @property
    def d(self) -> int:
        return self.student_x.shape[-1]

    @property
    def teacher_d(self) -> int:
        return self.teacher_x.shape[-1]

    @property
    def wide(self) -> Any:
        """The dtype of logits, sums and losses."""
        arrays = (self.student_x, self.student_weight, self.teacher_x, self.teacher_weight)
        return accumulator(*(x.dtype for x in arrays))

    @property
    def valid(self) -> Any:
        """True for tokens that count."""
        return jnp.ones(self.token_shape, bool) if self.mask is None else self.mask

    def weights(self) -> Any:
        """The weight of each token, 0 for those that do not count, whose own weights may be anything."""
        given = jnp.ones((), self.wide) if self.token_weights is None else self.token_weights.astype(self.wide)
        return jnp.where(self.valid, given, 0)


@dataclasses.dataclass(frozen=True)
class KlResults:
    """The results of a forward pass, or their cotangents; zeros for tokens that do not count.

    Attributes:
      student_lse, teacher_lse, difference: ``[*tokens]``, the residuals that any backend makes and takes.
      total, count: as in ``LossResults``.
    """

    student_lse: Any
    teacher_lse: Any
    difference: Any
    total: Any = None
    count: Any = None


jax.tree_util.register_dataclass(
    KlResults, data_fields=[field.name for field in dataclasses.fields(KlResults)], meta_fields=[]
)


def divergences(results: KlResults) -> Any:
    """The divergence of each token, without its weight."""
    return results.difference - results.teacher_lse + results.student_lse


def completed(inputs: KlInputs, *statistics: Any) -> KlResults:
    """The results of a forward pass, from the statistics of all tokens."""
    results = KlResults(*(jnp.where(inputs.valid, each, 0) for each in statistics))
    if inputs.summary == "statistics":
        return results
    weights = inputs.weights()
    loss = divergences(results) * weights
    if inputs.summary == "none":
        return dataclasses.replace(results, total=loss)
    return dataclasses.replace(results, total=loss.sum(), count=weights.sum())


def of_statistics(inputs: KlInputs, cotangents: KlResults) -> tuple[Any, Any, Any]:
    """The cotangents of both lse and of the difference."""
    if cotangents.total is None:
        given = (cotangents.student_lse, cotangents.teacher_lse, cotangents.difference)
        zeros = jnp.zeros(inputs.token_shape, inputs.wide)
        student, teacher, difference = (zeros if x is None else jnp.where(inputs.valid, x, 0) for x in given)
        return student, teacher, difference
    scale = inputs.weights() * jnp.where(inputs.valid, cotangents.total, 0)
    return scale, -scale, scale


def token_weights_gradient(inputs: KlInputs, results: KlResults, cotangents: KlResults) -> Any:
    """The gradient of the weights of tokens, from any backend's results; ``None`` if it is not used."""
    given = inputs.token_weights
    if given is None or not inputs.wants("token_weights"):
        return None
    if cotangents.total is None:
        return jnp.zeros_like(given)
    gradient = cotangents.total * divergences(results) + (0 if cotangents.count is None else cotangents.count)
    return jnp.where(inputs.valid, gradient, 0).astype(given.dtype)
