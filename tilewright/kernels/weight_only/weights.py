"""Weights in four and eight bits: how they are made of an array, and what they stand for."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.op.arguments import as_array, flag, has_arithmetic, integer
from tilewright.kernels.op.signatures import ArrayLike, DTypeLike
from tilewright.kernels.weight_only.packing import (
    FORMATS,
    MXFP4_GROUP,
    WeightFormat,
    dequantized,
    packed,
)

TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight ``[..., k, n]`` as codes of four or eight bits, ``(code − zero) · scale``; a pytree.

    Indexing, ``vmap`` and ``scan`` of all leaves along the leading axes keep its meaning. ``matmul`` takes one with two
    axes in place of rhs.

    Attributes:
      codes: uint8 ``[..., units, n, 32]``, in the order of ``kernels/weight_only/packing.py``.
      scales: ``[..., groups, n]``, floating-point; in mxfp4 uint8, the bytes of E8M0: an exponent plus 127, 255 is NaN.
      zeros: ``[..., groups, n]``, the numbers of int4 (−8 to 7) or int8 that stand for zero; ``None`` for 0.
      order: int32 ``[..., k]``: row r of the stored weight is row ``order[r]`` of the weight; ``None`` for equal.
      format: "int4", "int8" or "mxfp4".
      k: rows of the weight.
      group: rows that share a scale; ``None`` for all of them.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    order: jax.Array | None = None
    format: str = dataclasses.field(default="int4", metadata={"static": True})
    k: int = dataclasses.field(default=0, metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., k, n]``."""
        return (*self.codes.shape[:-3], self.k, self.codes.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros and order together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The weight ``[..., k, n]``, computed in float32 or a wider ``dtype`` and rounded to it once."""
        weight = dequantized(self.codes, self.scales, self.zeros, self.format, self.group, self.k, dtype)
        weight = weight.swapaxes(-1, -2)
        if self.order is None:
            return weight
        return jnp.take_along_axis(weight, jnp.argsort(self.order, axis=-1)[..., None], axis=-2)


def quantize_weight(
    weight: ArrayLike,
    *,
    format: WeightFormat = "int4",
    group: int | None = 128,
    symmetric: bool = True,
    scale_dtype: DTypeLike = "float32",
) -> PackedWeight:
    """A weight in four or eight bits, by rounding to the nearest, ties to even.

    - "int4" and "int8", symmetric: the scale is the greatest magnitude of a group divided by 7 or 127.
    - "int4" and "int8" with zero points: the range of a group, with 0 in it, is divided by 15 or 255, and 0 is a code.
    - "mxfp4" (OCP MX): e2m1 with a power of two for 32 elements, that of the greatest magnitude divided by 4; what is
      greater than 6 of it is 6. ``group``, ``symmetric`` and ``scale_dtype`` do not matter.

    Scales are rounded to ``scale_dtype`` first, and codes are those of the rounded scales. A group of zeros has the
    scale 1; an infinity counts as the greatest code of its sign and in no scale; a NaN makes the scale of its group
    NaN.

    Args:
      weight: ``[..., k, n]``, floating-point of 16 bits or more.
      format: "int4", "int8" or "mxfp4".
      group: elements along k that share a scale; ``None`` for all of them ("per channel").
      symmetric: without zero points.
      scale_dtype: of the scales. Kernels load those of float32 ahead of their use, which 16 bits are too few for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    array = as_array("weight", weight)
    if len(array.shape) < 2 or not has_arithmetic(array.dtype):
        raise ValueError(
            f"weight must be a floating-point array [..., k, n] of 16 bits or more, got {array.shape=}, {array.dtype=}"
        )
    if format not in get_args(WeightFormat.__value__):
        raise ValueError(f"format must be one of {get_args(WeightFormat.__value__)}, got {format!r}")
    group = None if group is None else integer("group", group)
    if group is not None and group < 1:
        raise ValueError(f"group must be positive or None, got {group=}")
    dtype = jnp.dtype(scale_dtype)
    if not has_arithmetic(dtype):
        raise ValueError(f"scale_dtype must be floating-point of 16 bits or more, got {scale_dtype!r}")
    if format == "mxfp4":
        codes, scales = _mxfp4_codes(array.astype(jnp.float32))
        return PackedWeight(packed(codes, format), scales, format=format, k=array.shape[-2], group=MXFP4_GROUP)
    codes, scales, zeros = _integer_codes(array.astype(jnp.float32), format, group, flag("symmetric", symmetric), dtype)
    return PackedWeight(packed(codes, format), scales, zeros, format=format, k=array.shape[-2], group=group)


def _by_group(weight: jax.Array, group: int | None) -> jax.Array:
    """``[..., groups, rows of a group, n]``, with zeros behind the last row."""
    *leading, k, n = weight.shape
    group = max(k, 1) if group is None else group
    weight = jnp.pad(weight, [(0, 0)] * len(leading) + [(0, -k % group), (0, 0)])
    return weight.reshape(*leading, weight.shape[-2] // group, group, n)


def _rows(codes: jax.Array, k: int) -> jax.Array:
    *leading, groups, group, n = codes.shape
    return lax.slice_in_dim(codes.reshape(*leading, groups * group, n), 0, k, axis=-2)


def _finite(groups: jax.Array) -> jax.Array:
    """Infinities count in no scale; a NaN does."""
    return jnp.where(jnp.isinf(groups), 0.0, groups)


def _integer_codes(
    weight: jax.Array, format: str, group: int | None, symmetric: bool, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes ``[..., k, n]`` without a sign in int4, scales, and zeros in the numbers of codes."""
    half = 1 << (FORMATS[format].bits - 1)
    groups = _by_group(weight, group)
    if symmetric:
        reach = jnp.max(jnp.abs(_finite(groups)), axis=-2, initial=0.0) / (half - 1)
        low, high = jnp.zeros_like(reach), reach
    else:
        low = jnp.min(_finite(groups), axis=-2, initial=0.0)
        high = jnp.max(_finite(groups), axis=-2, initial=0.0)
        reach = high / (2 * half - 1) - low / (2 * half - 1)
    tiny = float(jnp.finfo(dtype).tiny)
    scales = jnp.where(reach == 0.0, 1.0, jnp.maximum(reach, tiny)).astype(dtype)
    wide = scales.astype(jnp.float32)
    # Not a quotient by a number below the least normal one, which a device may flush: reach is at least `tiny`.
    zeros = None if symmetric else jnp.clip(jnp.round(-low / wide), 0, 2 * half - 1) - half
    shift = 0.0 if zeros is None else zeros[..., None, :]
    codes = jnp.clip(jnp.round(groups / wide[..., None, :]) + shift, -half, half - 1)
    codes = jnp.where(jnp.isnan(codes), 0.0, codes).astype(jnp.int32)
    codes = codes + half if format == "int4" else codes
    return _rows(codes & (2 * half - 1), weight.shape[-2]), scales, None if zeros is None else _stored(zeros)


def _stored(zeros: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(zeros), 0.0, zeros).astype(jnp.int16)


def _mxfp4_codes(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes ``[..., k, n]`` and exponents."""
    groups = _by_group(weight, MXFP4_GROUP)
    amax = jnp.max(jnp.abs(_finite(groups)), axis=-2, initial=0.0)
    # The exponent of the greatest magnitude, less 2, which is that of the greatest e2m1.
    biased = (lax.bitcast_convert_type(amax, jnp.int32) >> 23) - 2
    biased = jnp.where(amax < TINY, 127, jnp.clip(biased, 1, 254))
    # Both factors are normal numbers, and neither product is rounded.
    inverse = lax.bitcast_convert_type((254 - biased) << 23, jnp.float32)[..., None, :]
    magnitude = jnp.minimum(jnp.abs(groups) * inverse, 6.0)
    # Nearest in steps of a half, one and two; ties to even codes, which are even multiples of the step.
    step = jnp.where(magnitude < 2.0, 0.5, jnp.where(magnitude < 4.0, 1.0, 2.0))
    rounded = jnp.round(magnitude / step) * step
    halves = jnp.where(jnp.isnan(rounded), 0.0, rounded * 2).astype(jnp.int32)
    code = sum((halves >= bound).astype(jnp.int32) for bound in (1, 2, 3, 4, 6, 8, 12))
    sign = jnp.signbit(groups).astype(jnp.int32) << 3
    scales = jnp.where(jnp.isnan(amax), 255, biased).astype(jnp.uint8)
    return _rows(code | sign, weight.shape[-2]), scales
