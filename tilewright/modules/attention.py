"""Attention as functions: ``flash_attention``, and ``dot_product_attention`` in the place of JAX's."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# By its own name: a program may put ours in its place.
from jax.nn import dot_product_attention as jax_dot_product_attention
from jax.typing import ArrayLike

from tilewright.kernels.flash_attention.op import FlashAttention, Output, Results
from tilewright.modules.public import public_function

_FLASH_ATTENTION = FlashAttention()


@public_function(FlashAttention.prepare, attention_fn=True)
def flash_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Output | Results:
    """Exact attention, softmax(scale · query · keyᵀ + bias) · value, in memory linear in the lengths.

    Runs on the default executor, eagerly and under every JAX transform. Gradients with respect to query, key, value,
    bias and softmax_aux are exact. Logits and sums are float32.

    Args:
      query: ``[batch, q_length, heads, head_dim]``; the batch dimension may be absent from all arrays of a call.
      key: ``[batch, kv_length, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``, and consecutive query heads
        share a key head (GQA, arXiv 2305.13245).
      value: ``[batch, kv_length, kv_heads, value_dim]``.
      bias: added to the scaled logits; broadcastable to ``[batch, heads, q_length, kv_length]``.
      mask: True where a query attends to a key, broadcastable to the same shape; or a ``kernels.masks.Mask``.
        All ways to mask combine: a key is visible where each of them says so.
      causal: query ``i`` sees the keys up to ``i``, as the alignment counts them.
      causal_alignment: "top_left" puts the first query at the first key; "bottom_right" the last at the last, of each
        batch element if there are lengths and of each sequence if they are packed. Segment ids do not move it.
      sliding_window: ``(left, right)`` keys visible to either side, both ends inclusive, None for no bound;
        ``w`` means ``(w, w)``, or ``(w, 0)`` when causal. Counted from the same alignment.
      softmax_scale: 1/√head_dim by default. A JAX array is an operand: multiplied into the query in the query's dtype,
        with a gradient.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and bias (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      q_segment_ids: ``[batch, q_length]`` integers; a query sees the keys with its own number.
      kv_segment_ids: ``[batch, kv_length]``.
      query_seq_lengths: ``[batch]`` integers; later queries attend to nothing.
      key_value_seq_lengths: ``[batch]``; later keys are invisible.
      cum_seqlens_q: ``[sequences + 1]`` boundaries of sequences laid end to end in a batch of one; what lies outside
        attends to nothing. Pass the very same array as ``cum_seqlens_k`` for self-attention.
      cum_seqlens_k: the boundaries among the keys.
      dropout_prob: the part of the normalised probabilities to drop, in [0, 1).
      dropout_seed: an int, ``uint32[2]`` or a ``jax.random`` key; with ``(batch, head, row, column)`` it decides
        what is dropped, on every backend alike.
      return_lse: also return the natural log-sum-exp of the logits, float32 ``[batch, heads, q_length]``.
      precision: of the matrix products, as for ``jax.numpy.matmul``.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.
      dropout_rng: no option: Flax passes its generator by this name, and a call with one is an error that names
        ``tilewright.integrations.flax.dot_product_attention``.

    Returns:
      ``[batch, q_length, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A query that
      attends to nothing gives zeros, −inf (the log-sum-exp of its sinks if there are any) and zero gradients.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.

    The algorithm is that of FlashAttention-2 (arXiv 2307.08691).
    """
    return _FLASH_ATTENTION(*args, cfg=cfg, **kwargs)


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
    """``jax.nn.dot_product_attention``, computed by ``flash_attention``; see there for shapes.

    One result differs: a query that attends to nothing gives zeros and a residual of −inf, where JAX averages all
    values. Arrays of integers go to JAX, which rounds the probabilities to integers.

    Args:
      scale: may be an array, traced or not, and then has a gradient.
      local_window_size: ``w`` or ``(left, right)``; of a negative side the window begins or ends beyond the query.
      implementation: None is the best of ours, "xla" ours on XLA; "cudnn" hands the call to JAX, which owns it.

    Returns:
      The output in the query's shape; with ``return_residual`` also the log-sum-exp, ``[batch, q_length, heads]`` in
      the key's dtype, which carries no gradient.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"{implementation=} must be None, 'xla' or 'cudnn'")
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if implementation == "cudnn" or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (query, key, value)):
        return jax_dot_product_attention(  # type: ignore[call-overload, misc]
            query, key, value, bias, mask,
            scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, return_residual=return_residual,
        )  # fmt: skip
    out_shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = _with_batch(query), _with_batch(key), _with_batch(value)
    if bias is not None and not jnp.issubdtype(jnp.asarray(bias).dtype, jnp.floating):
        bias = jnp.asarray(bias).astype(jnp.promote_types(query.dtype, jnp.float32))
    try:
        window, mask = _window_and_mask(local_window_size, mask, query.shape[1], key.shape[1])
        out = _FLASH_ATTENTION(
            query, key, value, bias, mask,
            causal=is_causal, sliding_window=window, softmax_scale=scale,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            return_lse=return_residual, platform=implementation,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        error.args = (_in_jax_terms(str(error)), *error.args[1:])
        raise
    if not return_residual:
        return out.reshape(out_shape)
    out, lse = out
    residual = lax.stop_gradient(jnp.swapaxes(lse, 1, 2)).astype(key.dtype)
    return out.reshape(out_shape), residual.reshape(out_shape[:-1])


def _window_and_mask(window: Any, mask: Any, q_length: int, kv_length: int) -> tuple[Any, Any]:
    """A window and a mask that say what a window with negative sides and the mask say."""
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
    return None, jnp.asarray(inside) if mask is None else jnp.logical_and(mask, inside)


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
