"""The storage of codes of four and eight bits, and what codes mean.

Codes of a weight ``[k, n]`` are stored as ``[units, n, 32]`` bytes. A unit is 64 rows of the weight in four bits, or 32
in eight. Its rows are in planes of 16; the bytes of a column are 16 words of 16 bits, and word j has row j of each
plane, that of the first plane in its lowest bits.

A kernel reads it so: for any step over k the columns of a tile are contiguous memory. Two neighbouring words are one
register of a thread, and with one shift and one mask become two neighbouring rows of a plane in the places that tensor
cores want them in. Nothing moves between threads or through shared memory after conversion; a matmul over a unit is
the sum of the matmuls of its planes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

type WeightFormat = Literal["int4", "int8", "mxfp4"]

PLANE = 16
"""Rows of a plane, the depth of an MMA."""

UNIT_BYTES = 32
"""Bytes of a unit in one column."""

MXFP4_GROUP = 32
"""Elements along k that share a scale in mxfp4."""


class Packing(NamedTuple):
    """The storage of a format.

    Attributes:
      bits: of a code.
      padding: the code behind the last row, of value zero.
    """

    bits: int
    padding: int

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return UNIT_BYTES * 8 // self.bits

    @property
    def planes(self) -> int:
        """Planes of a unit."""
        return self.unit // PLANE

    def units(self, k: Any) -> Any:
        return -(-k // self.unit)


FORMATS: Mapping[str, Packing] = MappingProxyType(
    {"int4": Packing(4, 8), "int8": Packing(8, 0), "mxfp4": Packing(4, 0)}
)


def packed(codes: jax.Array, format: str) -> jax.Array:
    """Codes ``[..., k, n]``, of which the lowest bits count, as uint8 ``[..., units, n, 32]``."""
    packing = FORMATS[format]
    *leading, k, n = codes.shape
    units = packing.units(k)
    ends = [(0, 0)] * len(leading) + [(0, units * packing.unit - k), (0, 0)]
    codes = jnp.pad(codes.astype(jnp.uint8), ends, constant_values=packing.padding)
    planes = codes.reshape(*leading, units, packing.planes, PLANE, n)
    if packing.bits == 4:
        # Planes 2b and 2b + 1 are the halves of byte b of a word.
        planes = (planes[..., ::2, :, :] & 15) | (planes[..., 1::2, :, :] << 4)
    # [..., units, byte of a word, word, n]
    return jnp.moveaxis(planes, -3, -2).reshape(*leading, units, UNIT_BYTES, n).swapaxes(-1, -2)


def unpacked(storage: jax.Array, format: str, k: int) -> jax.Array:
    """The codes of storage as ``[..., n, k]``, which is the order that is nearest to it; int32, without a sign."""
    packing = FORMATS[format]
    *leading, units, n, _ = storage.shape
    words = storage.reshape(*leading, units, n, PLANE, 2).astype(jnp.int32)
    planes = jnp.moveaxis(words, -1, -2)  # [..., units, n, byte of a word, word]
    if packing.bits == 4:
        planes = jnp.stack([planes & 15, planes >> 4], axis=-2)
    codes = jnp.moveaxis(planes.reshape(*leading, units, n, packing.unit), -3, -2)
    return lax.slice_in_dim(codes.reshape(*leading, n, units * packing.unit), 0, k, axis=-1)


def values_of(codes: jax.Array, format: str, dtype: Any) -> jax.Array:
    """The numbers that codes without a sign mean, before zero points and scales; exact in ``dtype``.

    In int4 a code is a number plus 8, in int8 two's complement, in mxfp4 e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from 8
    on, the same with a sign.
    """
    if format == "int4":
        return (codes - 8).astype(dtype)
    if format == "int8":
        return (((codes & 255) ^ 128) - 128).astype(dtype)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = halves.astype(dtype) * jnp.asarray(0.5, dtype)
    return jnp.where(codes & 8 != 0, -magnitude, magnitude)


def scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Values times scales of a shape that broadcasts; bytes are exponents of E8M0, plus 127, and 255 is NaN."""
    if scales.dtype != jnp.uint8:
        return values * scales.astype(values.dtype)
    biased = scales.astype(jnp.int32)
    # 2^-127 and 2^127 times a code are numbers, but 2^-127 is no normal float32: in two steps none is lost.
    first = biased >> 1
    for part in (first - 63, biased - first - 64):
        power = lax.bitcast_convert_type((part + 127) << 23, jnp.float32)
        values = values * power.astype(values.dtype)
    return jnp.where(biased == 255, jnp.asarray(jnp.nan, values.dtype), values)


def groups_of(k: Any, group: int | None) -> Any:
    """The number of scales along k."""
    return 1 if group is None else -(-k // group)


def dequantized(
    storage: jax.Array, scales: jax.Array, zeros: jax.Array | None, format: str, group: int | None, k: int, dtype: Any
) -> jax.Array:
    """The weight as ``[..., n, k]``: ``(value − zero) · scale`` in float32 or a wider ``dtype``, rounded to it once.

    Args:
      storage: of ``packed``.
      scales, zeros: ``[..., groups, n]``; zeros may be ``None``.
      group: rows that share a scale; ``None`` for all. The last group may be short.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    values = values_of(unpacked(storage, format, k), format, wide)

    def by_row(numbers: jax.Array) -> jax.Array:
        numbers = numbers.swapaxes(-1, -2)
        return numbers if group is None else jnp.repeat(numbers, group, axis=-1)[..., :k]

    if zeros is not None:
        values = values - by_row(zeros.astype(wide))
    if scales.dtype != jnp.uint8:
        scales = scales.astype(wide)  # before they are repeated: their gradient is a sum over rows, in this dtype
    return scaled(values, by_row(scales)).astype(dtype)
