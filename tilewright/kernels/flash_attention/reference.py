"""The oracle: attention written out in ``jax.numpy``, one score matrix (or block of rows) at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import inside_rows
from tilewright.kernels.flash_attention.operands import cleared
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.flash_attention.results import hides
from tilewright.kernels.numerics.dropout import head_keys, keep_mask_tile

type Results = tuple[Float[Array, "batch q_length heads value_dim"], Float[Array, "batch heads q_length"]]

DIRECT_SCORES = 1 << 24
"""Number of scores up to which the matrix is formed at once: 64 MB in float32; a backward pass holds about five such
arrays.
"""

ROW_BLOCK_SCORES = 1 << 22
"""Number of scores per block of rows beyond that."""


def attention_reference(inputs: AttentionInputs, compute_dtype: DTypeLike | None = None) -> Results:
    """``(out, lse)`` by the definition, in ``compute_dtype``: float32 by default, float64 if the query is.

    Neither result is rounded to the query's dtype. Differentiable in every float input; a fully masked row has zeros, a
    log-sum-exp of −inf (that of its sinks if there are any) and zero gradients. Long score matrices are processed in
    blocks of rows, recomputed in the backward pass, so memory is linear in the length. Matmuls have the call's
    precision or else JAX's default; use "highest" around the call if that is not exact.
    """
    q_inside, kv_inside = inside_rows(inputs.mask, inputs.q_length, inputs.kv_length)
    sides = (("query", q_inside), ("key", kv_inside), ("value", kv_inside))
    inputs = inputs.replace(**{name: cleared(getattr(inputs, name), inside) for name, inside in sides})
    out, lse = _all_rows(inputs, compute_dtype)
    # Also of the gradient of the output.
    return cleared(out, q_inside), lse


def _all_rows(inputs: AttentionInputs, compute_dtype: DTypeLike | None) -> Results:
    dtype = jnp.dtype(compute_dtype or jnp.promote_types(inputs.query.dtype, jnp.float32))
    batch, q_length, heads, _ = inputs.query.shape
    scores_per_row = max(batch * heads * inputs.key.shape[1], 1)
    if q_length * scores_per_row <= DIRECT_SCORES:
        return _rows(inputs, dtype, 0, q_length)

    block = max(ROW_BLOCK_SCORES // scores_per_row, 1)
    count, rest = divmod(q_length, block)
    one_block = jax.checkpoint(lambda start: _rows(inputs, dtype, start, block))
    out, lse = lax.map(one_block, jnp.arange(count, dtype=jnp.int32) * block)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, count * block, heads, -1)
    lse = jnp.moveaxis(lse, 0, 2).reshape(batch, heads, count * block)
    if rest:
        last_out, last_lse = jax.checkpoint(lambda: _rows(inputs, dtype, count * block, rest))()
        out, lse = jnp.concatenate([out, last_out], 1), jnp.concatenate([lse, last_lse], 2)
    return out, lse


def reference_gradients(
    inputs: AttentionInputs,
    d_out: Array,
    d_lse: Array | None = None,
    compute_dtype: DTypeLike | None = None,
    argnames: Sequence[str] = ("query", "key", "value", "bias", "softmax_aux", "position_bias"),
) -> dict[str, Array]:
    """Gradients of the named inputs that are not None, unrounded (in ``compute_dtype``), by JAX's own derivative.

    That of ``position_bias`` is the gradient of its values.
    """
    names = [name for name in argnames if getattr(inputs, name) is not None]
    dtype = jnp.dtype(compute_dtype or jnp.promote_types(inputs.query.dtype, jnp.float32))
    values: dict[str, Any] = {name: _differentiable(getattr(inputs, name)).astype(dtype) for name in names}

    def results(values):
        # A float32 copy of the inputs, so that the gradients come back unrounded.
        if inputs.position_bias is not None and "position_bias" in values:
            bias = dataclasses.replace(inputs.position_bias, values=values["position_bias"])
            values = values | {"position_bias": bias}
        return attention_reference(inputs.replace(**values), dtype)

    (_, lse), vjp = jax.vjp(results, values)
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse.astype(lse.dtype)
    return vjp((d_out.astype(dtype), d_lse))[0]


def _differentiable(part: Array | PositionBias) -> Array:
    """The array of an input that has a gradient."""
    return part.values if isinstance(part, PositionBias) else part


def _rows(inputs: AttentionInputs, dtype: jnp.dtype, start: int | Array, size: int) -> Results:
    """Results of the queries ``start`` to ``start + size``; ``start`` may be traced."""
    query = lax.dynamic_slice_in_dim(inputs.query, start, size, 1).astype(dtype)
    key, value = inputs.key.astype(dtype), inputs.value.astype(dtype)
    batch, _, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    # Query heads that share a key head are adjacent.
    grouped = query.reshape(batch, size, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, precision=inputs.precision)
    scores = scores.reshape(batch, heads, size, kv_length) * jnp.asarray(inputs.softmax_scale, dtype)
    hidden = None
    if inputs.bias is not None:
        bias = inputs.bias
        rows = bias if bias.shape[2] == 1 else lax.dynamic_slice_in_dim(bias, start, size, 2)
        hidden = hides(rows)
        scores = scores + rows.astype(dtype)
    if inputs.position_bias is not None:
        # Differences are exact only in the dtype of the logits.
        position_bias = dataclasses.replace(inputs.position_bias, values=inputs.position_bias.values.astype(dtype))
        tile = position_bias.tile(start, size, 0, kv_length, kv_length)
        hidden = hides(tile) if position_bias.kind == "relative" else None
        scores = scores + tile
    if inputs.logits_soft_cap is not None:
        scores = inputs.logits_soft_cap * jnp.tanh(scores / inputs.logits_soft_cap)
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    if inputs.mask is not None:
        scores = jnp.where(inputs.mask.tile(start, size, 0, kv_length), scores, -jnp.inf)
    probabilities, lse = _softmax(scores, inputs.softmax_aux)
    if inputs.dropout_seed is not None:
        kept = _kept(inputs, inputs.dropout_seed, start, size)
        probabilities = jnp.where(kept, probabilities / (1.0 - inputs.drawn_dropout), 0.0).astype(dtype)
    grouped_probabilities = probabilities.reshape(batch, kv_heads, heads // kv_heads, size, kv_length)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", grouped_probabilities, value, precision=inputs.precision)
    return out.reshape(batch, size, heads, value.shape[-1]), lse


def _softmax(scores: Array, softmax_aux: Array | None) -> tuple[Array, Array]:
    """Probabilities and log-sum-exp over the last axis; a masked score (−inf) has no probability and no gradient."""
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    if softmax_aux is not None:
        sinks = softmax_aux.astype(scores.dtype)[None, :, None, :]
        row_max = jnp.maximum(row_max, jnp.max(sinks, axis=-1, keepdims=True))
    # The shift cancels in both results. A row without a finite score is not shifted: −inf − −inf is NaN.
    shift = lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max).astype(scores.dtype))
    exponentials = jnp.exp(scores - shift)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if softmax_aux is not None:
        total = total + jnp.sum(jnp.exp(sinks - shift), axis=-1, keepdims=True)
    safe_total = jnp.where(total == 0.0, 1.0, total).astype(scores.dtype)
    lse = jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(safe_total))
    return exponentials / safe_total, lse[..., 0]


def _kept(inputs: AttentionInputs, seed: Array, start: int | Array, size: int) -> Array:
    """Marks the probabilities of these rows that the dropout keeps."""
    batch, kv_length, heads = inputs.query.shape[0], inputs.key.shape[1], inputs.query.shape[2]
    keys = head_keys(seed, jnp.arange(batch)[:, None], jnp.arange(heads)[None, :])
    return keep_mask_tile(keys, start, 0, (size, kv_length), inputs.drawn_dropout)
