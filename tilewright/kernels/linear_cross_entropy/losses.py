"""The loss of a token from the statistics of its logits, and the cotangents of these: the same for every backend.

| symbol | is |
| --- | --- |
| lse, y, S | log Σ exp(logits), the label's logit, the sum of the logits; all after the soft cap |
| s, z, V | label smoothing, weight of the z-loss, size of the vocabulary |
| t | ``lse - (1 - s) y - s S / V + z lse²``, the cross-entropy of a token |
| u, v | logits of student and teacher, after the soft cap, divided by the temperature |
| p, q | their softmax |
| D | Σ q (v - u), the difference of the logits in the mean of the teacher |
| t | ``D - lse(v) + lse(u)``, the divergence of a token |
| w | its weight: 0 if it does not count |
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.inputs import KlInputs, LossInputs, LossResults, VocabularyInputs


def completed(
    inputs: LossInputs, lse: jax.Array, label_logit: jax.Array, logit_sum: jax.Array | None, **gradients: Any
) -> LossResults:
    """The results of a forward pass of the cross-entropy, from the statistics of all tokens."""
    valid = inputs.valid
    wrong = (inputs.labels >= inputs.vocab) & (inputs.summary != "statistics")
    # Backends that leave ignored tokens out and those that do not give the same residuals.
    lse = jnp.where(valid, lse, 0)
    label_logit = jnp.where(wrong, jnp.nan, jnp.where(valid, label_logit, 0))
    logit_sum = jnp.where(valid, logit_sum, 0) if inputs.needs_sum and logit_sum is not None else None
    results = LossResults((lse, label_logit, logit_sum))
    if inputs.summary == "statistics":
        return results
    weights = inputs.weights()
    loss = jnp.where(valid, inputs.losses(results.statistics, inputs.vocab), 0) * weights
    return _with_losses(inputs, results, loss, weights, **gradients)


def completed_kl(inputs: KlInputs, student_lse: Any, teacher_lse: Any, difference: Any) -> LossResults:
    """The results of a forward pass of the divergence, from the statistics of all tokens."""
    found = [jnp.where(inputs.valid, each, 0) for each in (student_lse, teacher_lse, difference)]
    results = LossResults((found[0], found[1], found[2]))
    if inputs.summary == "statistics":
        return results
    weights = inputs.weights()
    return _with_losses(inputs, results, inputs.losses(results.statistics, inputs.vocab) * weights, weights)


def _with_losses(inputs: VocabularyInputs, results: LossResults, loss: Any, weights: Any, **more: Any) -> LossResults:
    if inputs.summary == "none":
        return dataclasses.replace(results, total=loss)
    return dataclasses.replace(results, total=loss.sum(), count=weights.sum(), **more)


def of_statistics(
    inputs: LossInputs, lse: jax.Array, cotangents: LossResults, vocab: int | None = None
) -> tuple[Any, Any, Any]:
    """The cotangents of lse, y and S of the tokens in the inputs; the last is ``None`` without label smoothing.

    Args:
      vocab: the classes of the whole vocabulary, if the inputs have a part.
    """
    valid = inputs.valid
    # Selected, not multiplied: cotangents of ignored tokens may be NaN.
    of_lse, of_label, of_sum = (
        jnp.zeros_like(lse) if each is None else jnp.where(valid, each, 0) for each in cotangents.statistics
    )
    if cotangents.total is not None:
        scale = inputs.weights() * jnp.where(valid, cotangents.total, 0)
        smoothing = inputs.label_smoothing
        of_lse = of_lse + scale * (1 + 2 * inputs.z_loss * lse) if inputs.z_loss else of_lse + scale
        of_label = of_label - scale * (1 - smoothing)
        of_sum = of_sum - scale * (smoothing / (vocab or inputs.vocab))
    return of_lse, of_label, of_sum if inputs.needs_sum else None


def kept_gradients(results: LossResults, cotangents: LossResults) -> dict[str, Any]:
    """The gradients that the forward pass of a sum computed, times the one factor that they lack."""
    # In float32 until here, so that a factor such as a loss scale meets no rounded gradients.
    kept = {"x": results.d_x, "weight": results.d_weight, "bias": results.d_bias}
    return {name: None if each is None else each * cotangents.total for name, each in kept.items()}


def of_kl_statistics(inputs: KlInputs, cotangents: LossResults) -> tuple[Any, Any, Any]:
    """The cotangents of both lse and of D."""
    if cotangents.total is None:
        zeros = jnp.zeros(inputs.token_shape, inputs.wide)
        student, teacher, difference = (
            zeros if x is None else jnp.where(inputs.valid, x, 0) for x in cotangents.statistics
        )
        return student, teacher, difference
    scale = inputs.weights() * jnp.where(inputs.valid, cotangents.total, 0)
    return scale, -scale, scale


def token_weights_gradient(
    inputs: LossInputs | KlInputs, results: LossResults, cotangents: LossResults, vocab: int | None = None
) -> Any:
    """The gradient of the weights of tokens, from any backend's results; ``None`` if it is not used."""
    given = inputs.token_weights
    if given is None or not inputs.wants("token_weights"):
        return None
    if cotangents.total is None:
        return jnp.zeros_like(given)
    loss = inputs.losses(results.statistics, vocab or inputs.vocab)
    gradient = cotangents.total * loss + (0 if cotangents.count is None else cotangents.count)
    return jnp.where(inputs.valid, gradient, 0).astype(given.dtype)


def reduced(inputs: VocabularyInputs, total: jax.Array, count: jax.Array) -> jax.Array:
    """The loss from the sum of losses and that of weights; a mean over nothing is 0."""
    if inputs.reduction != "mean":
        return total
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def of_sums(inputs: VocabularyInputs, results: LossResults, of_loss: jax.Array) -> tuple[Any, Any]:
    """The cotangents of what ``reduced`` takes, from that of the loss."""
    if results.count is None:
        return of_loss, None
    _, pull_back = jax.vjp(lambda total, count: reduced(inputs, total, count), results.total, results.count)
    found: tuple[Any, Any] = pull_back(of_loss)
    return found
