"""Codes of few bits with the scales that they are multiplied by."""

import dataclasses
import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

type Format = Literal["e4m3", "e5m2", "int8"]
type Scaling = Literal["tensor", "row", "block"]

SCALE_BLOCK = 128
"""Elements of an axis that share a scale with ``scaling="block"``."""


class Codes(NamedTuple):
    """The codes of a format.

    Attributes:
      largest: the greatest code; of int8 127, so that codes are symmetric.
    """

    dtype: np.dtype
    largest: float

    @property
    def is_floating(self) -> bool:
        return self.dtype.kind != "i"


FORMATS: Mapping[str, Codes] = MappingProxyType(
    {
        "e4m3": Codes(jnp.dtype(jnp.float8_e4m3fn), 448.0),
        "e5m2": Codes(jnp.dtype(jnp.float8_e5m2), 57344.0),
        "int8": Codes(jnp.dtype(jnp.int8), 127.0),
    }
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as codes of eight bits and scales, ``values · scales``; a pytree.

    ``vmap``, ``scan`` and indexing of every leaf along axes before the last ones keep its meaning: the description
    concerns the last axes only.

    Attributes:
      values: the codes.
      scales: float32, of the rank of ``values``: along each axis one for every ``block`` elements.
      format: "e4m3", "e5m2" or "int8".
      block: for each of the last axes the elements that share a scale, ``None`` for the whole axis. The last block may
        be short. Axes before these have scales of their own for each index.
    """

    values: jax.Array
    scales: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    block: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the codes."""
        return jnp.dtype(self.values.dtype)

    @property
    def mT(self) -> "Quantized":
        """The same numbers with the last two axes swapped; no code changes."""
        block = (1,) * (2 - len(self.block)) + self.block
        swapped = jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), self)
        return dataclasses.replace(swapped, block=(*block[:-2], block[-1], block[-2]))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The numbers themselves, computed in float32 or a wider ``dtype`` and rounded to it once."""
        wide = jnp.promote_types(dtype, jnp.float32)
        return (self.values.astype(wide) * expanded(self.scales.astype(wide), self.block, self.shape)).astype(dtype)


export.register_pytree_node_serialization(
    Quantized,
    serialized_name="tilewright.Quantized",
    serialize_auxdata=lambda described: json.dumps(described).encode(),
    deserialize_auxdata=lambda blob: _described(*json.loads(blob)),
)


def _described(format: str, block: list[int | None]) -> tuple[str, tuple[int | None, ...]]:
    return format, tuple(block)


def by_axis(block: tuple[int | None, ...], shape: tuple[Any, ...]) -> tuple[int | None, ...]:
    """The elements of every axis that share a scale, from those of the last axes."""
    return (1,) * (len(shape) - len(block)) + block


def scales_shape(block: tuple[int | None, ...], shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of the scales of an array of ``shape``."""
    pairs = zip(by_axis(block, shape), shape, strict=True)
    return tuple(1 if each is None else blocks(size, each) for each, size in pairs)


def blocks(size: Any, each: int) -> Any:
    """The number of blocks of an axis, the last of which may be short; the size may be a symbol."""
    return size if each == 1 else (size + each - 1) // each


def expanded(scales: jax.Array, block: tuple[int | None, ...], shape: tuple[Any, ...]) -> jax.Array:
    """The scales of all elements of an array of ``shape``, or what broadcasts to them."""
    for axis, each in enumerate(by_axis(block, shape)):
        if each is not None and each > 1:
            before, count, after = scales.shape[:axis], scales.shape[axis], scales.shape[axis + 1 :]
            repeated = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), (*before, count, each, *after))
            scales = repeated.reshape(*before, count * each, *after)
            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales


def mantissa_bits(number: float) -> int:
    """The 23 bits behind the leading one of a float32."""
    return int(np.float32(number).view(np.uint32)) & 0x7FFFFF


def exponent(number: float) -> int:
    """The power of two of a positive number's leading bit."""
    return math.frexp(number)[1] - 1
