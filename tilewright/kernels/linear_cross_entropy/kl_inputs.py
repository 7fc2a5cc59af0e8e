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
import numpy as np
from jaxtyping import Array, Bool, Float

from tilewright.kernels.linear_cross_entropy.inputs import Summary
from tilewright.kernels.numerics.dots import accumulator


@dataclasses.dataclass(frozen=True, slots=True)
class KlOptions:
    """The options of a call that are static values; the fields that ``LossOptions`` has mean the same.

    A backend that does not read a field computes without it: each declines what it cannot do, by name.
    """

    summary: Summary = "scalar"
    temperature: float = 1.0
    vocab_first: bool = False
    logits_soft_cap: float | None = None
    is_distributed: bool = False


@dataclasses.dataclass(frozen=True)
class KlInputs:
    """A call after ``prepare``.

    Attributes:
      student_x, teacher_x: ``[*tokens, d]``, each with a d of its own.
      mask: ``[*tokens]``, False for tokens that count nowhere.
      gradients: to a backward pass, the names of the arrays whose gradients are used.
    """

    student_x: Float[Array, "*tokens d"]
    student_weight: Float[Array, "_ _"]
    teacher_x: Float[Array, "*tokens e"]
    teacher_weight: Float[Array, "_ _"]
    mask: Bool[Array, "*tokens"] | None
    token_weights: Float[Array, "*tokens"] | None
    options: KlOptions
    gradients: frozenset[str] = frozenset(
        {"student_x", "student_weight", "teacher_x", "teacher_weight", "token_weights"}
    )

    @property
    def vocab_axis(self) -> int:
        return 0 if self.options.vocab_first else 1

    @property
    def vocab(self) -> int:
        return self.student_weight.shape[self.vocab_axis]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        return self.student_x.shape[:-1]

    @property
    def wide(self) -> Any:
        """The dtype of logits, sums and losses."""
        arrays = (self.student_x, self.student_weight, self.teacher_x, self.teacher_weight)
        return accumulator(*(x.dtype for x in arrays))

    @property
    def valid(self) -> Any:
        """True for tokens that count."""
        return jnp.ones(self.tokens, bool) if self.mask is None else self.mask

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
    KlInputs,
    data_fields=["student_x", "student_weight", "teacher_x", "teacher_weight", "mask", "token_weights"],
    meta_fields=["options", "gradients"],
)
jax.tree_util.register_dataclass(
    KlResults, data_fields=[field.name for field in dataclasses.fields(KlResults)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class KlProblem:
    """The sizes and dtypes of a call, for selection."""

    tokens: int
    d: int
    teacher_d: int
    vocab: int
    dtypes: tuple[np.dtype, ...]
    has_mask: bool
    has_token_weights: bool
    options: KlOptions

    @classmethod
    def of(cls, inputs: KlInputs) -> "KlProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        arrays = (inputs.student_x, inputs.student_weight, inputs.teacher_x, inputs.teacher_weight)
        return cls(
            tokens=math.prod(inputs.tokens),
            d=inputs.student_x.shape[-1],
            teacher_d=inputs.teacher_x.shape[-1],
            vocab=inputs.vocab,
            dtypes=tuple(np.dtype(x.dtype) for x in arrays),
            has_mask=inputs.mask is not None,
            has_token_weights=inputs.token_weights is not None,
            options=inputs.options,
        )


def divergences(results: KlResults) -> Any:
    """The divergence of each token, without its weight."""
    return results.difference - results.teacher_lse + results.student_lse


def completed(inputs: KlInputs, *statistics: Any) -> KlResults:
    """The results of a forward pass, from the statistics of all tokens."""
    results = KlResults(*(jnp.where(inputs.valid, each, 0) for each in statistics))
    if inputs.options.summary == "statistics":
        return results
    weights = inputs.weights()
    loss = divergences(results) * weights
    if inputs.options.summary == "none":
        return dataclasses.replace(results, total=loss)
    return dataclasses.replace(results, total=loss.sum(), count=weights.sum())


def of_statistics(inputs: KlInputs, cotangents: KlResults) -> tuple[Any, Any, Any]:
    """The cotangents of both lse and of the difference."""
    if cotangents.total is None:
        given = (cotangents.student_lse, cotangents.teacher_lse, cotangents.difference)
        zeros = jnp.zeros(inputs.tokens, inputs.wide)
        student, teacher, difference = (zeros if x is None else jnp.where(inputs.valid, x, 0) for x in given)
        return student, teacher, difference
    scale = inputs.weights() * jnp.where(inputs.valid, cotangents.total, 0)
    return scale, -scale, scale


def token_weights_gradient(inputs: KlInputs, results: KlResults, cotangents: KlResults) -> Any:
    """The gradient of the weights of tokens, from any backend's results; ``None`` if it is not used."""
    given = inputs.token_weights
    if given is None or "token_weights" not in inputs.gradients:
        return None
    if cotangents.total is None:
        return jnp.zeros_like(given)
    gradient = cotangents.total * divergences(results) + (0 if cotangents.count is None else cotangents.count)
    return jnp.where(inputs.valid, gradient, 0).astype(given.dtype)
