"""Transformations of operands and results around kernels that several backends share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import inside_rows

INT32_LIMIT = 1 << 31

_EXACT = ("HIGH", "F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
"""Prefixes of precisions for which TensorFloat-32 matmuls of float32 operands are not precise enough."""


def needs_exact_matmuls(inputs: AttentionInputs) -> bool:
    """True if float32 operands must not be rounded before a matmul, by XLA's meaning of the precision."""
    if inputs.dtype != np.float32:
        return False
    precision = inputs.precision
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    name = getattr(precision, "name", str(precision)).upper()
    return name in ("FLOAT32", "TENSORFLOAT32_X3") or name.startswith(_EXACT)


def with_positive_scale(inputs: AttentionInputs) -> AttentionInputs:
    """The same logits with a non-negative scale: some kernels take the row maximum before they scale."""
    scale = inputs.softmax_scale
    return inputs if scale >= 0 else inputs.replace(query=-inputs.query, softmax_scale=-scale)


def backward_arrays(inputs: AttentionInputs, results: Any, cotangents: Any) -> dict[str, Any]:
    """The arrays that a backward kernel reads, except for logits; row statistics in float32, ``d_lse`` or None."""
    (out, lse), (d_out, d_lse) = results, cotangents
    return {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "out": out, "d_out": d_out,
        "lse": lse.astype(jnp.float32), "d_lse": None if d_lse is None else d_lse.astype(jnp.float32),
    }  # fmt: skip


def cleared(array: jax.Array, inside: jax.Array | None) -> jax.Array:
    """``[batch, length, heads, dim]`` with zeros outside: selected, because what is there may be NaN.

    Args:
      inside: ``[batch | 1, length]`` of `inside_rows`, or None.
    """
    return array if inside is None else jnp.where(inside[:, :, None, None], array, jnp.zeros((), array.dtype))


def with_cleared_values(inputs: AttentionInputs, keys: bool = False) -> AttentionInputs:
    """The call with zeros in the values of keys outside (`inside_rows`).

    In the forward pass that suffices: their probabilities are 0, and so are those of queries outside, where logits are
    selected by the mask; but 0 times NaN is NaN.

    Args:
      keys: whether the keys are cleared, too, for kernels that are not known to select.
    """
    _, kv_inside = inside_rows(inputs.mask, inputs.q_length, inputs.kv_length)
    if kv_inside is None:
        return inputs
    names = ("key", "value") if keys else ("value",)
    return inputs.replace(**{name: cleared(getattr(inputs, name), kv_inside) for name in names})


def with_cleared_rows(inputs: AttentionInputs, d_out: jax.Array) -> tuple[AttentionInputs, jax.Array]:
    """The call and the gradient of its output with zeros in all rows outside (`inside_rows`), for a backward pass."""
    q_inside, kv_inside = inside_rows(inputs.mask, inputs.q_length, inputs.kv_length)
    arrays = {"query": cleared(inputs.query, q_inside)} if q_inside is not None else {}
    if kv_inside is not None:
        arrays |= {"key": cleared(inputs.key, kv_inside), "value": cleared(inputs.value, kv_inside)}
    return inputs.replace(**arrays) if arrays else inputs, cleared(d_out, q_inside)


def pad_last_dim(array: jax.Array, dim: int) -> Any:
    """Pads the last axis with zeros to ``dim``."""
    if array.shape[-1] == dim:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, dim - array.shape[-1])])


def into_batch(array: jax.Array, is_mapped: bool, size: int, batch: int) -> Any:
    """``[size * batch, ...]`` from an array with first dimension ``batch`` or 1, with or without a mapped axis before
    it.
    """
    array = array if is_mapped else array[None]
    trailing = array.shape[2:]
    return jnp.broadcast_to(array, (size, batch, *trailing)).reshape(size * batch, *trailing)


def over_batch(
    call: Callable[[dict[str, Any]], tuple[Any, ...]], batch: int, arrays: dict[str, Any], shared: frozenset[str]
) -> tuple[Any, ...]:
    """Calls ``call(arrays)`` so that ``vmap`` folds a mapped axis into the batch.

    Args:
      arrays: by name; the first dimension of each is ``batch``, or 1.
      shared: names of arrays that stay unchanged if their first dimension is 1 and they are not mapped.
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
        # Through `over_batch` again, for a vmap around this one.
        results = over_batch(call, size * batch, folded, shared)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (True,) * len(results)

    return launch(arrays)


def by_row(rows: jax.Array) -> Any:
    """``[batch, heads, length]`` transposed to broadcast with ``[batch, length, heads, head_dim]``."""
    return rows.transpose(0, 2, 1)[..., None]


def min_lengths(lengths: Sequence[Any], batch: int, length: int) -> Any:
    """The minimum of several lengths, clipped to [0, length]: int32 ``[batch]``."""
    given = [jnp.clip(each, 0, length).astype(jnp.int32) for each in lengths if each is not None]
    return functools.reduce(jnp.minimum, given, jnp.full((batch,), length, jnp.int32))


def with_fully_masked_rows(out: jax.Array, lse: jax.Array, visible: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Sets fully masked rows, in which a kernel's results are unspecified, to 0 and −∞.

    Args:
      visible: ``[batch|1, heads|1, q_length]``, True for rows with a visible key; None if every row has one.
    """
    if visible is None:
        return out, lse
    return jnp.where(by_row(visible), out, jnp.zeros((), out.dtype)), jnp.where(visible, lse, -jnp.inf)


class BackwardRows(NamedTuple):
    """The rows that a backward kernel of a library reads, besides the queries.

    Attributes:
      out, d_out: in the query's dtype.
      lse, d_lse: in float32.
      fully_masked: ``[batch, heads, q_length]``, True for fully masked rows; None without any.
    """

    out: jax.Array
    d_out: jax.Array
    lse: jax.Array
    d_lse: jax.Array | None
    fully_masked: jax.Array | None


def backward_rows(dtype: DTypeLike, results: Any, cotangents: Any, may_mask_rows: bool) -> BackwardRows:
    """Rows of results and cotangents, with values by which fully masked rows add 0 to every gradient.

    With lse = ∞ every probability exp(logit − ∞) is 0.

    Args:
      dtype: the query's.
      may_mask_rows: whether a row may be fully masked.
    """
    out, d_out = results[0].astype(dtype), cotangents[0].astype(dtype)
    lse = results[1].astype(jnp.float32)
    d_lse = None if cotangents[1] is None else cotangents[1].astype(jnp.float32)
    if not may_mask_rows:
        return BackwardRows(out, d_out, lse, d_lse, None)
    fully_masked = jnp.isneginf(lse)
    out, d_out = (jnp.where(by_row(fully_masked), jnp.zeros((), each.dtype), each) for each in (out, d_out))
    lse = jnp.where(fully_masked, jnp.inf, lse)
    return BackwardRows(out, d_out, lse, None if d_lse is None else jnp.where(fully_masked, 0.0, d_lse), fully_masked)


def without_masked(
    d_query: jax.Array,
    d_key: jax.Array,
    d_value: jax.Array,
    fully_masked: jax.Array | None,
    kv_lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sets the gradients of masked queries and keys, which a kernel need not write, to 0.

    Args:
      fully_masked: as in `BackwardRows`.
      kv_lengths: ``[batch]``; None if every key is within its length.
    """
    if fully_masked is not None:
        d_query = jnp.where(by_row(fully_masked), jnp.zeros((), d_query.dtype), d_query)
    if kv_lengths is not None:
        masked = (jnp.arange(d_key.shape[1], dtype=jnp.int32) >= kv_lengths[:, None])[:, :, None, None]
        d_key, d_value = (jnp.where(masked, jnp.zeros((), each.dtype), each) for each in (d_key, d_value))
    return d_query, d_key, d_value


def bias_gradient(d_scores: jax.Array, bias: jax.Array) -> Any:
    """The gradient of a bias from that of the logits, summed in float32 over the dimensions that share the bias."""
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size != d_scores.shape[axis])
    return jnp.sum(d_scores, axis=shared, keepdims=True, dtype=jnp.float32).astype(bias.dtype)
