"""Parts of a softmax that every attention backend needs outside of its kernel: dtypes, shifts and sinks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The accumulation dtype: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def finite_shift(maximum: jax.Array) -> jax.Array:
    """The shift to subtract from a row's logits: 0 if all of them are −inf, to avoid NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def sinks_statistics(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum and the sum of exponentials of the sinks along the last axis."""
    maximum = jnp.max(sinks, axis=-1, initial=-jnp.inf)
    return maximum, jnp.sum(jnp.exp(sinks - finite_shift(maximum)[..., None]), axis=-1)


def sinks_lse(softmax_aux: jax.Array | None) -> Any:
    """The logsumexp of each head's sinks, ``[heads]`` float32; None without sinks."""
    return None if softmax_aux is None else jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=1)
