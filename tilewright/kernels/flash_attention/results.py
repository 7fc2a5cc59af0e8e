"""The residuals that all backends of flash attention share, and gradients that need no kernel."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import inside_rows
from tilewright.kernels.numerics.softmax import accumulation_dtype, sinks_statistics

LOWEST_LSE = -float(1 << 24)
"""Log-sum-exp below which a row has no gradient.

Numbers of that size are 2 apart: it has lost the number of keys whose logits are at the maximum, as in a row that a
bias of −1e9 or of the lowest number of a dtype hides. P = exp(logit − lse) would then be 1 for each of these keys.
"""

HIDING_BIAS = float(np.finfo(np.float32).min / 2)
"""A bias at or below masks its key, whatever else is done to the logit: programs that mask by an additive constant,
such as −0.7 times the largest float32 (MaxText) or the lowest number of a dtype, add it behind a soft cap.

Such a bias rounds any logit away, so without a soft cap a sum is at or below it exactly where the bias is.
"""

type Results = tuple[Float[Array, "batch q_length heads value_dim"], Float[Array, "batch heads q_length"]]


def hides(bias: Array) -> Any:
    """True where a bias masks its key (`HIDING_BIAS`)."""
    return bias.astype(accumulation_dtype(bias.dtype)) <= HIDING_BIAS


def empty_forward(inputs: AttentionInputs) -> Results:
    """The results for a call without keys or without elements."""
    batch, q_length, heads, _ = inputs.query.shape
    dtype = accumulation_dtype(inputs.query.dtype)
    out = jnp.zeros((batch, q_length, heads, inputs.value.shape[-1]), inputs.query.dtype)
    if inputs.softmax_aux is None:
        return out, jnp.full((batch, heads, q_length), -jnp.inf, dtype)
    maximum, total = sinks_statistics(inputs.softmax_aux.astype(dtype))
    return out, jnp.broadcast_to((maximum + jnp.log(total))[None, :, None], (batch, heads, q_length))


def empty_backward(
    inputs: AttentionInputs, out: Array, lse: Array, d_out: Array, d_lse: Array | None
) -> dict[str, Array | None]:
    """The gradients for a call without keys or without elements."""
    delta, exponent = row_terms(inputs, out, lse, d_out, d_lse)
    return {
        "query": jnp.zeros_like(inputs.query),
        "key": jnp.zeros_like(inputs.key),
        "value": jnp.zeros_like(inputs.value),
        "bias": None if inputs.bias is None else jnp.zeros_like(inputs.bias),
        "softmax_aux": sinks_gradient(inputs, delta, exponent),
        "position_bias": None if inputs.position_bias is None else jnp.zeros_like(inputs.position_bias.values),
    }


def row_terms(
    inputs: AttentionInputs, out: Array, lse: Array, d_out: Array, d_lse: Array | None
) -> tuple[Array, Array]:
    """Delta, rowsum(dO ∘ O) − dlse, and lse with −inf replaced by +inf, each ``[batch, heads, q_length]``.

    A row without a gradient then has the probability exp(x − inf) = 0 everywhere. Outside of the lengths and of packed
    sequences dO may hold anything.
    """
    dtype = accumulation_dtype(inputs.query.dtype)
    delta, lse = jnp.sum(out.astype(dtype) * d_out.astype(dtype), axis=-1).transpose(0, 2, 1), lse.astype(dtype)
    q_inside, _ = inside_rows(inputs.mask, inputs.q_length, inputs.kv_length)
    if q_inside is not None:
        delta = jnp.where(q_inside[:, None], delta, 0.0)
    if d_lse is not None:
        delta = delta - d_lse.astype(dtype)
    return zero_fully_masked_rows(delta, lse)


def zero_fully_masked_rows(term: Array, lse: Array) -> tuple[Array, Array]:
    """A row term set to 0 and lse set to +inf for rows whose lse is below `LOWEST_LSE`: −inf if fully masked."""
    masked = lse < LOWEST_LSE
    return jnp.where(masked, 0.0, term), jnp.where(masked, jnp.inf, lse)


def sinks_gradient(inputs: AttentionInputs, delta: Array, exponent: Array) -> Array | None:
    """The gradient of the sinks, ``[heads, sinks]``: a sink is a key whose value is zero."""
    if inputs.softmax_aux is None:
        return None
    # As of any logit, dS = P ∘ (dP − delta); dP = dO·vᵀ is 0.
    sinks = inputs.softmax_aux.astype(delta.dtype)
    probabilities = jnp.exp(sinks[None, :, None, :] - exponent[..., None])
    return -jnp.sum(probabilities * delta[..., None], axis=(0, 2)).astype(inputs.softmax_aux.dtype)
