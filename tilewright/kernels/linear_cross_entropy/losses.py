"""The loss of a token from the statistics of its logits, and the cotangents of these: the same for every backend.

| symbol | is |
| --- | --- |
| lse, y, S | log Σ exp(logits), the label's logit, the sum of the logits; all after the soft cap |
| s, z, V | label smoothing, weight of the z-loss, size of the vocabulary |
| t | ``lse - (1 - s) y - s S / V + z lse²``, the loss of a token |
| w | its weight: 0 if it is ignored |
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossResults, Reduction
from tilewright.kernels.numerics.dots import accumulator


def wide_dtype(inputs: LossInputs) -> Any:
    """The dtype of logits, sums and losses."""
    return accumulator(inputs.x.dtype, inputs.weight.dtype)


def weights(labels: jax.Array, token_weights: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """The weight of each token, 0 for those that are ignored, whose own weights may be anything."""
    valid = labels != IGNORED
    return valid.astype(dtype) if token_weights is None else jnp.where(valid, token_weights.astype(dtype), 0)


def losses(
    inputs: LossInputs, vocab: int, lse: jax.Array, label_logit: jax.Array, logit_sum: jax.Array | None
) -> jax.Array:
    """The loss of each token, without its weight; ``vocab`` is the size of the vocabulary with all its parts."""
    smoothing = inputs.label_smoothing
    # The difference first: what is large in both cancels before anything small is added.
    loss = lse - label_logit
    if smoothing and logit_sum is not None:
        loss = loss + smoothing * (label_logit - logit_sum / vocab)
    return loss + inputs.z_loss * lse**2 if inputs.z_loss else loss


def completed(
    inputs: LossInputs, lse: jax.Array, label_logit: jax.Array, logit_sum: jax.Array | None, **gradients: Any
) -> LossResults:
    """The results of a forward pass, from the statistics of all tokens."""
    valid = inputs.labels != IGNORED
    wrong = (inputs.labels >= inputs.vocab) & (inputs.summary != "statistics")
    # Backends that leave ignored tokens out and those that do not give the same residuals.
    lse = jnp.where(valid, lse, 0)
    label_logit = jnp.where(wrong, jnp.nan, jnp.where(valid, label_logit, 0))
    logit_sum = jnp.where(valid, logit_sum, 0) if inputs.needs_sum and logit_sum is not None else None
    if inputs.summary == "statistics":
        return LossResults(lse, label_logit, logit_sum)
    weight = weights(inputs.labels, inputs.token_weights, lse.dtype)
    loss = jnp.where(valid, losses(inputs, inputs.vocab, lse, label_logit, logit_sum), 0) * weight
    if inputs.summary == "none":
        return LossResults(lse, label_logit, logit_sum, loss)
    return LossResults(lse, label_logit, logit_sum, loss.sum(), weight.sum(), **gradients)


def of_statistics(
    inputs: LossInputs,
    labels: jax.Array,
    token_weights: jax.Array | None,
    lse: jax.Array,
    cotangents: LossResults,
) -> tuple[Any, Any, Any]:
    """The cotangents of lse, y and S of some of a call's tokens; the last is ``None`` without label smoothing."""
    valid = labels != IGNORED
    # Selected, not multiplied: cotangents of ignored tokens may be NaN.
    of_lse, of_label, of_sum = (
        jnp.zeros_like(lse) if each is None else jnp.where(valid, each, 0)
        for each in (cotangents.lse, cotangents.label_logit, cotangents.logit_sum)
    )
    if cotangents.total is not None:
        scale = weights(labels, token_weights, lse.dtype) * jnp.where(valid, cotangents.total, 0)
        smoothing = inputs.label_smoothing
        of_lse = of_lse + scale * (1 + 2 * inputs.z_loss * lse) if inputs.z_loss else of_lse + scale
        of_label = of_label - scale * (1 - smoothing)
        of_sum = of_sum - scale * (smoothing / inputs.vocab)
    return of_lse, of_label, of_sum if inputs.needs_sum else None


def token_weights_gradient(inputs: LossInputs, results: LossResults, cotangents: LossResults) -> Any:
    """The gradient of the weights of tokens, from any backend's results; ``None`` if it is not used."""
    given = inputs.token_weights
    if given is None or not inputs.wants("token_weights"):
        return None
    if cotangents.total is None:
        return jnp.zeros_like(given)
    loss = losses(inputs, inputs.vocab, results.lse, results.label_logit, results.logit_sum)
    gradient = cotangents.total * loss + (0 if cotangents.count is None else cotangents.count)
    return jnp.where(inputs.labels != IGNORED, gradient, 0).astype(given.dtype)


def reduced(total: jax.Array, count: jax.Array, reduction: Reduction) -> jax.Array:
    """The loss from the sum of losses and that of weights; a mean over nothing is 0."""
    if reduction != "mean":
        return total
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def of_sums(total: jax.Array, count: jax.Array | None, reduction: Reduction, of_loss: jax.Array) -> tuple[Any, Any]:
    """The cotangents of what ``reduced`` takes, from that of the loss."""
    if count is None:
        return of_loss, None
    _, pull_back = jax.vjp(lambda total, count: reduced(total, count, reduction), total, count)
    found: tuple[Any, Any] = pull_back(of_loss)
    return found
