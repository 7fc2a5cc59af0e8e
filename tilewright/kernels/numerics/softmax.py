"""Parts of a softmax that every attention backend needs outside of its kernel: dtypes, shifts and sinks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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


def merged_over_axes(
    out: jax.Array, lse: jax.Array, axes: str | tuple[str, ...], sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` over the keys of all devices along mesh axes, from those of each device's keys.

    One maximum of lse and one sum of ``[..., heads, value_dim + 1]``, in float32 or wider.

    Args:
      out: ``[..., heads, value_dim]``, rounded to the dtype of the result.
      lse: ``[..., heads]``.
      axes: of the surrounding ``shard_map``.
      sinks: ``[heads, n]``, the same on every device and in no device's lse; they count once.
    """
    value_dim = out.shape[-1]

    def sums(weighted: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        # One array, so that it is one collective.
        summed = lax.psum(jnp.concatenate([weighted, weight], axis=-1), axes)
        return summed[..., :value_dim], summed[..., value_dim:]

    return _merged(out, lse, sinks, lambda x: lax.pmax(x, axes), sums)


def merged_parts(outs: jax.Array, lses: jax.Array, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """`merged_over_axes` of partial results along a first axis."""
    return _merged(outs, lses, sinks, lambda x: jnp.max(x, 0), lambda *xs: (jnp.sum(xs[0], 0), jnp.sum(xs[1], 0)))


def _merged(
    out: jax.Array,
    lse: jax.Array,
    sinks: jax.Array | None,
    maximum: Callable[[jax.Array], jax.Array],
    sums: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    dtype = accumulation_dtype(out.dtype)
    row_max = maximum(lax.stop_gradient(lse))
    if sinks is not None:
        sinks_max, sinks_total = sinks_statistics(sinks.astype(dtype))
        row_max = jnp.maximum(row_max, lax.stop_gradient(sinks_max))
    # The shift cancels, and a maximum over devices has no derivative in JAX.
    shift = finite_shift(row_max)
    weight = jnp.exp(lse - shift)[..., None]
    summed, weights = sums(out.astype(dtype) * weight, weight)
    total = weights[..., 0]
    if sinks is not None:
        total = total + sinks_total * jnp.exp(sinks_max - shift)
    whole = summed / jnp.where(total == 0.0, 1.0, total)[..., None]
    return whole.astype(out.dtype), jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(total))
