"""Readers of the weights of checkpoints in four and eight bits, as they are stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.arguments import as_array, has_arithmetic, is_integer
from tilewright.kernels.op.signatures import ArrayLike
from tilewright.kernels.weight_only.packing import MXFP4_GROUP, packed
from tilewright.kernels.weight_only.weights import PackedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each nibble of an AWQ word has, the lowest bits first."""


def from_gptq(
    qweight: ArrayLike,
    qzeros: ArrayLike,
    scales: ArrayLike,
    g_idx: ArrayLike | None = None,
    *,
    bits: int = 4,
    version: int = 1,
) -> PackedWeight:
    """A weight of a GPTQ checkpoint.

    Word i of a column has the codes of rows ``i · 32 / bits`` and on, the lowest bits first; those of zero points are
    packed in the same way along n. A weight is ``(code − zero) · scale``, codes and zeros without a sign.

    Args:
      qweight: int32 ``[k · bits / 32, n]``.
      qzeros: int32 ``[groups, n · bits / 32]``.
      scales: floating-point ``[groups, n]``.
      g_idx: int32 ``[k]``, the group of each row. Where groups are not runs of rows ("act-order", ``desc_act``) rows
        are stored by group, and the weight's ``order`` says which they were. ``None`` for groups of k / groups rows.
      bits: 4 or 8.
      version: 1 where zero points are stored less one ("gptq", and every checkpoint that says nothing), 2 where they
        are not ("gptq_v2").

    Raises:
      ValueError, TypeError: arrays that do not fit together, or rows of a group that are more or fewer than those of
        others; the message holds their shapes.
    """
    if bits not in (4, 8) or version not in (1, 2):
        raise ValueError(f"bits must be 4 or 8 and version 1 or 2, got {bits=}, {version=}")
    words, zero_words, scale = _arrays(qweight, qzeros, scales)
    per_word = 32 // bits
    k, (groups, n) = words.shape[0] * per_word, scale.shape
    if words.shape[1] != n or zero_words.shape != (groups, n // per_word) or n % per_word or groups < 1:
        raise ValueError(
            f"qweight must be [k / {per_word}, n], qzeros [groups, n / {per_word}] and scales [groups, n], got "
            f"{words.shape=}, {zero_words.shape=}, {scale.shape=}"
        )
    group, order = _order_of(g_idx, k, groups)
    codes = _fields(words, bits, range(per_word), axis=1).reshape(k, n)
    zeros = _fields(zero_words, bits, range(per_word), axis=2).reshape(groups, n) + (1 if version == 1 else 0)
    if order is not None:
        codes = codes[order]
    half = 1 << (bits - 1)
    format = "int4" if bits == 4 else "int8"
    codes = codes if bits == 4 else codes - half
    zeros = (zeros - half).astype(jnp.int16)
    return PackedWeight(packed(codes, format), scale, zeros, order, format=format, k=k, group=group)


def from_awq(qweight: ArrayLike, qzeros: ArrayLike, scales: ArrayLike) -> PackedWeight:
    """A weight of an AWQ checkpoint of four bits ("gemm").

    Each word has the codes of eight neighbouring columns of one row, that of column 0, 2, 4, 6, 1, 3, 5, 7 in this
    order from the lowest bits on; zero points likewise. A weight is ``(code − zero) · scale``.

    Args:
      qweight: int32 ``[k, n / 8]``.
      qzeros: int32 ``[groups, n / 8]``.
      scales: floating-point ``[groups, n]``.

    Raises:
      ValueError, TypeError: arrays that do not fit together; the message holds their shapes.
    """
    words, zero_words, scale = _arrays(qweight, qzeros, scales)
    (k, columns), (groups, n) = words.shape, scale.shape
    if columns * 8 != n or zero_words.shape != (groups, columns) or groups < 1 or k % groups:
        raise ValueError(
            "qweight must be [k, n / 8], qzeros [groups, n / 8], scales [groups, n], and k a multiple of groups, got "
            f"{words.shape=}, {zero_words.shape=}, {scale.shape=}"
        )
    places = np.argsort(AWQ_ORDER)  # of each column its nibble
    codes = _fields(words, 4, places, axis=2).reshape(k, n)
    zeros = _fields(zero_words, 4, places, axis=2).reshape(groups, n)
    zeros = (zeros - 8).astype(jnp.int16)
    return PackedWeight(packed(codes, "int4"), scale, zeros, format="int4", k=k, group=k // groups)


def from_mxfp4(blocks: ArrayLike, scales: ArrayLike) -> PackedWeight:
    """A weight in mxfp4 as gpt-oss's checkpoints have it.

    Args:
      blocks: uint8 ``[..., n, k / 32, 16]``; byte b has the codes of elements 2b (its lower half) and 2b + 1 of the 32
        that share a scale. n are the outputs of the layer.
      scales: uint8 ``[..., n, k / 32]``, exponents plus 127.

    Returns:
      ``[..., k, n]``.

    Raises:
      ValueError, TypeError: arrays that do not fit together; the message holds their shapes.
    """
    bytes_, exponents = as_array("blocks", blocks), as_array("scales", scales)
    for name, array in (("blocks", bytes_), ("scales", exponents)):
        if array.dtype != jnp.uint8:
            raise TypeError(f"{name} must be uint8, got {array.dtype=}")
    shape = bytes_.shape
    if len(shape) < 3 or shape[-1] != MXFP4_GROUP // 2 or exponents.shape != shape[:-1]:
        raise ValueError(
            f"blocks must be [..., n, k / 32, 16] and scales [..., n, k / 32], got {shape=}, {exponents.shape=}"
        )
    codes = jnp.stack([bytes_ & 15, bytes_ >> 4], axis=-1)
    codes = codes.reshape(*shape[:-2], shape[-2] * MXFP4_GROUP).swapaxes(-1, -2)
    found = exponents.swapaxes(-1, -2)
    return PackedWeight(packed(codes, "mxfp4"), found, format="mxfp4", k=codes.shape[-2], group=MXFP4_GROUP)


def _arrays(qweight: ArrayLike, qzeros: ArrayLike, scales: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Words of 32 bits, and scales."""
    words, zeros, scale = as_array("qweight", qweight), as_array("qzeros", qzeros), as_array("scales", scales)
    for name, array in (("qweight", words), ("qzeros", zeros)):
        if len(array.shape) != 2 or array.dtype not in (jnp.int32, jnp.uint32):
            raise TypeError(f"{name} must be int32 of rank 2, got {array.shape=}, {array.dtype=}")
    if len(scale.shape) != 2 or not has_arithmetic(scale.dtype):
        raise TypeError(f"scales must be floating-point of rank 2, got {scale.shape=}, {scale.dtype=}")
    # Exact, and of the size that kernels can load ahead of their use.
    return words, zeros, scale.astype(jnp.promote_types(scale.dtype, jnp.float32))


def _fields(words: jax.Array, bits: int, places: Any, axis: int) -> jax.Array:
    """The fields of words at some places, of which there are ``32 / bits``, along a new axis; int32."""
    fields = [(words.astype(jnp.uint32) >> int(bits * place)) & ((1 << bits) - 1) for place in places]
    return jnp.stack(fields, axis=axis).astype(jnp.int32)


def _order_of(g_idx: ArrayLike | None, k: int, groups: int) -> tuple[int, jax.Array | None]:
    """Rows of a group, and the order of rows by group; ``None`` if they are in that order."""
    if g_idx is None:
        if k % groups:
            raise ValueError(f"without g_idx every group has as many rows, got {k=}, {groups=}")
        return k // groups, None
    index = as_array("g_idx", g_idx)
    if isinstance(index, jax.core.Tracer) or index.shape != (k,) or not is_integer(index.dtype):
        raise ValueError(f"g_idx must hold numbers that are known, the group of each of {k} rows, got {index}")
    rows = np.asarray(index)
    order = np.argsort(rows, kind="stable")
    group = int(np.count_nonzero(rows == 0))
    # Of the last group there may be fewer rows.
    if group < 1 or -(-k // group) != groups or not np.array_equal(rows[order], np.arange(k) // group):
        raise ValueError(
            f"g_idx must name each of {groups} groups equally often, the last one may be short, got {rows}"
        )
    return group, None if np.array_equal(order, np.arange(k)) else jnp.asarray(order, jnp.int32)
