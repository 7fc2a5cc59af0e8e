"""The oracle: the losses by their definition, with the logits in memory, in ``jax.numpy``."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs
from tilewright.kernels.linear_cross_entropy.kl_inputs import KlInputs


def logits_of(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, inputs: LossInputs | KlInputs, dtype: DTypeLike
) -> Any:
    """``[*tokens, vocab]``, after the soft cap."""
    logits = jnp.matmul(x.astype(dtype), weight.astype(dtype).T if inputs.vocab_first else weight.astype(dtype))
    logits = logits if bias is None else logits + bias.astype(dtype)
    cap = inputs.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def statistics_reference(inputs: LossInputs) -> tuple[Any, Any, Any]:
    """lse, the label's logit and the sum of the logits; zeros for tokens that are ignored."""
    labels = inputs.labels
    dtype = jnp.promote_types(jnp.promote_types(inputs.x.dtype, inputs.weight.dtype), jnp.float32)
    valid = labels != IGNORED
    x = jnp.where(valid[..., None], inputs.x, 0)  # selected before the matmul, so that 0 · NaN counts nowhere
    logits = logits_of(x, inputs.weight, inputs.bias, inputs, dtype)
    fill = 0.0 if inputs.summary == "statistics" else jnp.nan
    index = jnp.where(valid, labels, 0)[..., None]
    label_logit = jnp.take_along_axis(logits, index, -1, mode="fill", fill_value=fill)[..., 0]
    found = jax.nn.logsumexp(logits, -1), label_logit, logits.sum(-1)
    lse, label_logit, logit_sum = (jnp.where(valid, each, 0) for each in found)
    return lse, label_logit, logit_sum


def losses_reference(inputs: LossInputs) -> tuple[Any, Any]:
    """The weighted loss of every token, and lse."""
    lse, label_logit, logit_sum = statistics_reference(inputs)
    smoothing = inputs.label_smoothing
    loss = (1 - smoothing) * (lse - label_logit) + inputs.z_loss * lse**2
    if smoothing:
        loss = loss - smoothing * (logit_sum / inputs.vocab - lse)
    if inputs.token_weights is not None:
        loss = loss * inputs.token_weights.astype(loss.dtype)
    return jnp.where(inputs.labels != IGNORED, loss, 0), lse
