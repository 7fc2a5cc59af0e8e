"""What several backends ask of their operands, and do to them before a kernel gets them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from tilewright.kernels.flash_attention.inputs import AttentionInputs, AttentionOptions

INT32_LIMIT = 1 << 31

_EXACT = ("HIGH", "F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
"""Beginnings of the names of precisions that float32 products in TensorFloat-32 would fall short of."""


def wants_exact_products(options: AttentionOptions, dtype: np.dtype) -> bool:
    """Whether float32 operands must not be rounded before they are multiplied, as XLA reads a precision."""
    if dtype != np.float32:
        return False
    precision = options.precision
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    name = getattr(precision, "name", str(precision)).upper()
    return name in ("FLOAT32", "TENSORFLOAT32_X3") or name.startswith(_EXACT)


def with_positive_scale(inputs: AttentionInputs) -> AttentionInputs:
    """The same logits without a negative scale: some kernels look for the greatest product before they scale it."""
    scale = inputs.options.softmax_scale
    if scale >= 0:
        return inputs
    return dataclasses.replace(
        inputs, query=-inputs.query, options=dataclasses.replace(inputs.options, softmax_scale=-scale)
    )


def backward_arrays(inputs: AttentionInputs, results: Any, cotangents: Any) -> dict[str, Any]:
    """What a backward kernel reads but for what tells of scores; statistics of rows in float32, ``d_lse`` or None."""
    (out, lse), (d_out, d_lse) = results, cotangents
    return {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "out": out, "d_out": d_out,
        "lse": lse.astype(jnp.float32), "d_lse": None if d_lse is None else d_lse.astype(jnp.float32),
    }  # fmt: skip


def pad_last_dim(array: jax.Array, dim: int) -> Any:
    """With zeros up to ``dim`` at the end of the last axis."""
    if array.shape[-1] == dim:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, dim - array.shape[-1])])


def into_batch(array: jax.Array, is_mapped: bool, size: int, batch: int) -> Any:
    """``[size * batch, ...]`` of an array whose first dimension is ``batch`` or 1, behind a mapped axis or without."""
    array = array if is_mapped else array[None]
    own = array.shape[2:]
    return jnp.broadcast_to(array, (size, batch, *own)).reshape(size * batch, *own)


def over_batch(
    call: Callable[[dict[str, Any]], tuple[Any, ...]], batch: int, arrays: dict[str, Any], shared: frozenset[str]
) -> tuple[Any, ...]:
    """``call(arrays)``, to which ``vmap`` gives a mapped axis as a part of the batch.

    Args:
      arrays: by name; the first dimension of each is ``batch``, or 1.
      shared: names of those that stay as they are where they have only one and are not mapped.
    """

    @custom_vmap
    def launch(arrays: dict[str, Any]) -> tuple[Any, ...]:
        return call(arrays)

    @launch.def_vmap
    def _(size: int, mapped: Sequence[dict[str, bool]], arrays: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        folded = {
            name: array
            if name in shared and not mapped[0][name] and array.shape[0] == 1
            else into_batch(array, mapped[0][name], size, batch)
            for name, array in arrays.items()
        }
        results = over_batch(call, size * batch, folded, shared)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (True,) * len(results)

    return launch(arrays)


def by_row(rows: jax.Array) -> Any:
    """``[batch, heads, length]`` as it goes with ``[batch, length, heads, head_dim]``."""
    return rows.transpose(0, 2, 1)[..., None]


def min_lengths(lengths: Sequence[Any], batch: int, length: int) -> Any:
    """int32 ``[batch]``: the least of several lengths, none of them negative or beyond ``length``."""
    given = [jnp.clip(each, 0, length).astype(jnp.int32) for each in lengths if each is not None]
    return functools.reduce(jnp.minimum, given, jnp.full((batch,), length, jnp.int32))


def with_fully_masked_rows(out: jax.Array, lse: jax.Array, visible: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Results of a kernel that need not be right in fully masked rows: 0 and −∞ there.

    Args:
      visible: ``[batch|1, heads|1, q_length]``, where a row has a visible key; None where each does.
    """
    if visible is None:
        return out, lse
    return jnp.where(by_row(visible), out, jnp.zeros((), out.dtype)), jnp.where(visible, lse, -jnp.inf)


def without_fully_masked_rows(
    out: jax.Array, d_out: jax.Array, lse: jax.Array, d_lse: jax.Array | None, fully_masked: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """What a backward kernel reads, such that fully masked rows add 0 to every gradient.

    With ``exp(logit − ∞) = 0`` for every probability there is nothing to multiply it by.

    Args:
      fully_masked: ``[batch, heads, q_length]``; None where there is no such row.
    """
    if fully_masked is None:
        return out, d_out, lse, d_lse
    out, d_out = (jnp.where(by_row(fully_masked), jnp.zeros((), each.dtype), each) for each in (out, d_out))
    lse = jnp.where(fully_masked, jnp.inf, lse)
    return out, d_out, lse, None if d_lse is None else jnp.where(fully_masked, 0.0, d_lse)


def without_masked(
    d_query: jax.Array,
    d_key: jax.Array,
    d_value: jax.Array,
    fully_masked: jax.Array | None,
    kv_lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients with 0 for queries and keys that take no part, of which a kernel need not write any.

    Args:
      fully_masked: as in ``without_fully_masked_rows``.
      kv_lengths: ``[batch]``; None where every key takes part.
    """
    if fully_masked is not None:
        d_query = jnp.where(by_row(fully_masked), jnp.zeros((), d_query.dtype), d_query)
    if kv_lengths is not None:
        hidden = (jnp.arange(d_key.shape[1], dtype=jnp.int32) >= kv_lengths[:, None])[:, :, None, None]
        d_key, d_value = (jnp.where(hidden, jnp.zeros((), each.dtype), each) for each in (d_key, d_value))
    return d_query, d_key, d_value


def bias_gradient(d_scores: jax.Array, bias: jax.Array) -> Any:
    """The gradient of a bias from that of what it is added to, summed in float32 over what shares the bias."""
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size != d_scores.shape[axis])
    return jnp.sum(d_scores, axis=shared, keepdims=True, dtype=jnp.float32).astype(bias.dtype)
