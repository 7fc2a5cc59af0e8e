"""The oracles of drawing: limits by sorting the row, and the greatest sum of logit and noise."""

import jax
import jax.numpy as jnp

from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.sampling.inputs import Draw, LinearSampleInputs, SampleInputs
from tilewright.kernels.sampling.noise import gumbel


def sample_reference(inputs: SampleInputs) -> Draw:
    """The draw in float32."""
    logits = jnp.where(jnp.isnan(inputs.logits), -jnp.inf, inputs.logits.astype(jnp.float32))
    temperature = jnp.ones(inputs.leading, jnp.float32) if inputs.temperature is None else inputs.temperature
    greedy = ~(temperature > 0.0)
    largest = logits.max(-1, keepdims=True)
    distance = jnp.where(logits == largest, 0.0, logits - largest) / jnp.where(greedy, 1.0, temperature)[..., None]
    distance = jnp.where(_kept(inputs, logits, distance), distance, -jnp.inf)
    noise = gumbel(inputs.key[..., None, :], jnp.arange(inputs.vocab, dtype=jnp.uint32))
    tokens = jnp.argmax(distance + jnp.where(greedy[..., None], 0.0, noise), -1).astype(jnp.int32)
    is_empty = largest[..., 0] == -jnp.inf
    tokens = jnp.where(is_empty, 0, tokens)
    if not inputs.return_log_probs:
        return Draw(tokens, None)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(distance), tokens[..., None], -1)[..., 0]
    return Draw(tokens, jnp.where(is_empty, -jnp.inf, log_probs))


def linear_sample_reference(inputs: LinearSampleInputs) -> Draw:
    """The draw from logits in memory."""
    wide = accumulator(inputs.x.dtype, inputs.weight.dtype)
    weight = inputs.weight.astype(wide)
    logits = jnp.matmul(inputs.x.astype(wide), weight.T if inputs.vocab_first else weight)
    logits = logits if inputs.bias is None else logits + inputs.bias.astype(wide)
    cap = inputs.logits_soft_cap
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    return sample_reference(SampleInputs(logits, inputs.key, inputs.temperature, return_log_probs=True))


def _kept(inputs: SampleInputs, logits: jax.Array, distance: jax.Array) -> jax.Array:
    """Marks what is kept, by thresholds that are found in sorted rows."""
    descending = -jnp.sort(-logits)
    threshold = descending[..., -1]
    if inputs.top_k is not None:
        k = jnp.where(inputs.top_k < 1, inputs.vocab, jnp.minimum(inputs.top_k, inputs.vocab))
        threshold = jnp.take_along_axis(descending, k[..., None] - 1, -1)[..., 0]
    if inputs.top_p is not None:
        weights = jnp.where(descending >= threshold[..., None], jnp.exp(-jnp.sort(-distance)), 0.0)
        reached = jnp.cumsum(weights, -1) >= inputs.top_p[..., None] * weights.sum(-1, keepdims=True)
        # Of a sum that rounding keeps below the goal all is kept.
        last = jnp.where(reached.any(-1), jnp.argmax(reached, -1), inputs.vocab - 1)
        found = jnp.take_along_axis(descending, last[..., None], -1)[..., 0]
        threshold = jnp.where(inputs.top_p < 1.0, jnp.maximum(threshold, found), threshold)
    kept = logits >= threshold[..., None]
    return kept if inputs.min_p is None else kept & (jnp.exp(distance) >= jnp.minimum(inputs.min_p, 1.0)[..., None])
