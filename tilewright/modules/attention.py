"""Attention as functions: ``flash_attention``, the same over split sequences, and JAX's ``dot_product_attention``."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Imported under its own name: a program may replace `jax.nn.dot_product_attention` by ours.
from jax.nn import dot_product_attention as jax_dot_product_attention
from jax.typing import ArrayLike

from tilewright.kernels.flash_attention.context_parallel import context_parallel_attention
from tilewright.kernels.flash_attention.distributed.layout import unzigzag, zigzag
from tilewright.kernels.flash_attention.op import FlashAttention, flash_attention
from tilewright.kernels.op.signatures import results
from tilewright.ops.utils.promotion import default_promotion

__all__ = [
    "FlashAttention",
    "context_parallel_attention",
    "dot_product_attention",
    "flash_attention",
    "unzigzag",
    "zigzag",
]


@results({"": jax.Array, "return_residual": tuple[jax.Array, jax.Array]})
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Computes ``jax.nn.dot_product_attention`` by ``flash_attention``; see there for shapes.

    One result differs: a query that attends to nothing gives zeros and a residual of −inf, where JAX averages all
    values. Arrays of integers go to JAX, which rounds the probabilities to integers, if no implementation is named.

    Args:
      scale: may be an array, traced or not, and then has a gradient.
      local_window_size: ``w`` or ``(left, right)``; of a negative side the window begins or ends beyond the query.
      implementation: None is the best of ours, "xla" ours on XLA, and "cudnn" ours with cuDNN's kernels.

    Returns:
      The output in the query's shape; with ``return_residual`` also the log-sum-exp, ``[batch, q_length, heads]`` in
      the key's dtype, which carries no gradient.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: the implementation that was asked for cannot serve the call; the message holds the reasons.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None, 'xla' or 'cudnn'")
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if implementation is None and not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (query, key, value)):
        return jax_dot_product_attention(  # type: ignore[call-overload, misc]
            query, key, value, bias, mask,
            scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            return_residual=return_residual,
        )  # fmt: skip
    out_shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = _with_batch(query), _with_batch(key), _with_batch(value)
    if bias is not None and not jnp.issubdtype(jnp.asarray(bias).dtype, jnp.floating):
        bias = jnp.asarray(bias).astype(jnp.promote_types(query.dtype, jnp.float32))
    try:
        window, mask = _window_and_mask(local_window_size, mask, query.shape[1], key.shape[1])
        out: Any = flash_attention(
            query, key, value, bias, mask,
            causal=is_causal, sliding_window=window, softmax_scale=scale,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            return_lse=return_residual, platform=_IMPLEMENTATIONS[implementation],
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        error.args = (_in_jax_terms(str(error)), *error.args[1:])
        raise
    if not return_residual:
        return out.reshape(out_shape)
    out, lse = out
    residual = lax.stop_gradient(jnp.swapaxes(lse, 1, 2)).astype(key.dtype)
    return out.reshape(out_shape), residual.reshape(out_shape[:-1])


@default_promotion()
def _window_and_mask(window: Any, mask: Any, q_length: int, kv_length: int) -> tuple[Any, Any]:
    """An equivalent window without negative sides, and the mask that takes their place."""
    sides = window if isinstance(window, tuple | list) else (window, window)
    negative = [isinstance(side, int | np.integer) and side < 0 for side in sides]
    if len(sides) != 2 or not any(negative):
        return window, mask
    distance = np.arange(kv_length) - np.arange(q_length)[:, None]
    left, right = sides
    inside = np.ones_like(distance, bool)
    if left is not None:
        inside &= distance >= -left
    if right is not None:
        inside &= distance <= right
    return None, jnp.asarray(inside) if mask is None else jnp.logical_and(jnp.asarray(mask), inside)


_IMPLEMENTATIONS = {None: None, "xla": "xla", "cudnn": "cuda:cudnn"}
"""The ``platform`` for each implementation that JAX knows."""

_NAMES = {
    "flash_attention": "dot_product_attention",
    "softmax_scale": "scale",
    "sliding_window": "local_window_size",
    "causal ": "is_causal ",
    "causal=": "is_causal=",
    "static_argnames='causal'": "static_argnames='is_causal'",
    "return_lse": "return_residual",
}
"""The arguments of ``flash_attention`` as the drop-in's callers know them."""


def _in_jax_terms(message: str) -> str:
    for ours, theirs in _NAMES.items():
        message = message.replace(ours, theirs)
    return message


def _with_batch(array: jax.Array) -> jax.Array:
    return array if array.ndim >= 4 else array.reshape((1,) * (4 - array.ndim) + array.shape)
