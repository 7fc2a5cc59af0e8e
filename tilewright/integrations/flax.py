"""Attention for Flax, Linen and NNX alike: an ``attention_fn``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Imported under their own names: a program may replace them by ours.
from flax.linen import dot_product_attention as linen_attention
from flax.nnx import dot_product_attention as nnx_attention
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.op.arguments import PlatformLike, PrecisionLike, number
from tilewright.modules import flash_attention
from tilewright.ops.utils.promotion import default_promotion


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: object = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    *,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    platform: PlatformLike | Sequence[PlatformLike] | None = None,
) -> jax.Array:
    """Computes Flax's ``dot_product_attention``, of Linen and of NNX, by ``flash_attention``.

    For ``nn.MultiHeadDotProductAttention(attention_fn=...)`` and ``nnx.MultiHeadAttention(attention_fn=...)``. These
    layers pass what Flax's function takes; ``functools.partial`` adds lengths, segment ids and the platform. Two
    results differ from Flax's: a query that attends to nothing gives zeros, where Flax averages all values; and dropout
    drops other positions, by the kernels' own generator, which ``dropout_rng`` seeds: the same share, and the same
    positions for the same key.

    Attention weights are never in memory here. Where they are wanted (``sow_weights=True``, which gives a ``module``,
    or einsums), and for complex numbers, Flax's own function computes everything, with its memory and its dropout.

    Args:
      query: ``[batch..., q_length, heads, head_dim]``, with any number of batch dimensions or none.
      key: ``[batch..., kv_length, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
      value: ``[batch..., kv_length, kv_heads, value_dim]``.
      bias: added to the logits; broadcastable to ``[batch..., heads, q_length, kv_length]``.
      mask: of the same shapes and any dtype; nonzero means visible.
      broadcast_dropout: taken and not used: no two elements or heads drop the same positions.
      dropout_rng: a ``jax.random`` key, wanted where dropout is active.
      dropout_rate: the part of the probabilities to drop, in [0, 1).
      deterministic: whether there is no dropout.
      dtype: of the computation; inferred if ``None``.
      precision: of the matmuls.
      module: the layer that sows the weights, of Linen or NNX; then Flax's own function runs, as with the three below.
      force_fp32_for_softmax: for Flax's own function; logits and sums are float32 always in ours.
      einsum_dot_general: Linen's, for quantized products.
      qk_attn_weights_einsum: Linen's, in place of ``jnp.einsum``.
      attn_weights_value_einsum: Linen's, in place of ``jnp.einsum``.
      promote_dtype: NNX's function that brings ``(query, key, value)`` to one dtype.
      is_causal: query ``i`` sees the keys up to ``i``.
      query_seq_lengths: ``[batch...]`` integers; later queries attend to nothing, and their results are zeros.
      key_value_seq_lengths: ``[batch...]`` integers; later keys are invisible.
      q_segment_ids: ``[batch..., q_length]`` integers; a query sees the keys with its own number.
      kv_segment_ids: ``[batch..., kv_length]`` integers.
      platform: see ``flash_attention``.

    Returns:
      ``[batch..., q_length, heads, value_dim]``.

    Raises:
      ValueError, TypeError: an option that Flax's own function lacks where that runs, dropout without a key, or see
        ``flash_attention``.
    """
    linens: dict[str, Any] = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    wants = [name for name, value in {"module": module, **linens}.items() if value is not None]
    if wants or any(jnp.iscomplexobj(array) for array in (query, key, value)):
        of_nnx = isinstance(module, nnx.Module)
        _refuse(
            wants[0] if wants else "complex numbers",
            is_causal=is_causal and not of_nnx,
            promote_dtype=promote_dtype and not of_nnx,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            platform=platform,
        )
        both: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "bias": bias,
            "mask": mask,
            "broadcast_dropout": broadcast_dropout,
            "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate,
            "deterministic": deterministic,
            "dtype": dtype,
            "precision": precision,
            "module": module,
        }
        if of_nnx:
            promotes: dict[str, Any] = {} if promote_dtype is None else {"promote_dtype": promote_dtype}
            return nnx_attention(is_causal=is_causal, **both, **promotes)
        return linen_attention(force_fp32_for_softmax=force_fp32_for_softmax, **both, **linens)
    arrays: Sequence[jax.Array] = [jnp.asarray(array) for array in (query, key, value)]
    arrays = _promoted(arrays, dtype) if promote_dtype is None else promote_dtype(tuple(arrays), dtype=dtype)
    _check_shapes(*arrays)
    *batch, q_length, _, _ = arrays[0].shape
    drops = _drops(dropout_rate, deterministic)
    if drops and dropout_rng is None:
        raise ValueError(f"a dropout_rng is required for {dropout_rate=}; pass deterministic=True for no dropout")
    rows = [array.reshape(-1, *array.shape[-3:]) if len(batch) > 1 else array for array in arrays]
    out = flash_attention(
        rows[0],
        rows[1],
        rows[2],
        None if bias is None else _scores(jnp.asarray(bias), batch),
        None if mask is None else _scores(_boolean(jnp.asarray(mask)), batch),
        causal=is_causal,
        query_seq_lengths=_of_batch("query_seq_lengths", query_seq_lengths, batch),
        key_value_seq_lengths=_of_batch("key_value_seq_lengths", key_value_seq_lengths, batch),
        q_segment_ids=_of_batch("q_segment_ids", q_segment_ids, batch, q_length),
        kv_segment_ids=_of_batch("kv_segment_ids", kv_segment_ids, batch, arrays[1].shape[-3]),
        dropout_prob=dropout_rate if drops else 0.0,
        dropout_seed=jax.random.bits(dropout_rng, (2,), jnp.uint32) if drops and dropout_rng is not None else None,
        precision=precision,
        platform=platform,
    )
    return out.reshape(*batch, q_length, rows[0].shape[-2], rows[2].shape[-1])


def _refuse(wants: str, **options: Any) -> None:
    """Raises for options that Flax's own function lacks."""
    for name, value in options.items():
        if value is not None and value is not False:
            weights = "sow_weights=True" if wants == "module" else wants
            raise ValueError(f"for {weights} Flax's own dot_product_attention is called, which has no {name}")


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raises for what ``flash_attention`` would describe in shapes that the caller has not given."""
    got = f"got {query.shape=}, {key.shape=}, {value.shape=}"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(f"query, key and value must have the same rank, [batch..., length, heads, head_dim], {got}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"the batch dims of query, key and value must match, {got}")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key and value: their lengths must match, {got}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key: their depths must match, {got}")
    if key.shape[-2] != value.shape[-2] or 0 in key.shape[-2:] or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"key and value must have as many heads, of which those of query must be a multiple, {got}")


def _drops(rate: object, deterministic: bool) -> bool:
    """True where dropout is active; the rate is checked in any case."""
    rate = number("dropout_rate", rate) if not isinstance(rate, float) or math.isfinite(rate) else rate
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got dropout_rate={rate}")
    return not deterministic and rate > 0.0


def _of_batch(name: str, array: ArrayLike | None, batch: list[int], *sizes: int) -> jax.Array | None:
    """An array for each batch element, with one batch dimension at most."""
    if array is None:
        return None
    found = jnp.asarray(array)
    if found.shape != (*batch, *sizes):
        raise ValueError(f"{name} must have the shape {(*batch, *sizes)}, got {name}.shape={found.shape}")
    return found.reshape(-1, *sizes) if len(batch) > 1 else found


@default_promotion()
def _promoted(arrays: Sequence[jax.Array], dtype: DTypeLike | None) -> list[jax.Array]:
    """The arrays in one floating-point dtype."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return [array.astype(dtype) for array in arrays]


def _boolean(mask: jax.Array) -> jax.Array:
    return mask if mask.dtype == jnp.bool_ else mask != 0


def _scores(array: jax.Array, batch: list[int]) -> jax.Array:
    """An array that broadcasts to ``[batch..., heads, q_length, kv_length]``, with one batch dimension at most."""
    if len(batch) < 2:
        return array
    padded = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    own, scores = padded.shape[:-3], padded.shape[-3:]
    if set(own) != {1}:
        padded = jnp.broadcast_to(padded, (*batch, *scores))
    return padded.reshape(-1, *scores)
