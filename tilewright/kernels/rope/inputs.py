"""The inputs of the rotary embedding, and its oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.rope.scaling import RopeScaling, rotation_of


class RopeInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      positions: of the rank of x without its last dimension; sizes of 1 are broadcast, and that of heads is 1.
      rotary_dim: the number of elements that are rotated, the first ones of a head; ``None`` for all.
    """

    x: Float[Array, "*leading heads dim"]
    positions: Int[Array, "*#leading 1"]
    base: float = static(default=10000.0)
    scaling: RopeScaling | None = static(default=None)
    interleaved: bool = static(default=False)
    rotary_dim: int | None = static(default=None)
    inverse: bool = static(default=False)

    @functools.cached_property
    def rotated(self) -> int:
        """The number of elements that are rotated."""
        return self.x.shape[-1] if self.rotary_dim is None else self.rotary_dim

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of angles and products."""
        return jnp.promote_types(self.x.dtype, jnp.float32)

    @functools.cached_property
    def rotation(self) -> tuple[np.ndarray, float]:
        """The frequency of each pair, in radians a position, and the factor of the result."""
        return rotation_of(self.scaling, self.base, self.rotated)


def rope_reference(inputs: RopeInputs, compute_dtype: DTypeLike | None = None) -> jax.Array:
    """The rotated array in ``compute_dtype``, float32 by default and float64 if x is; nothing is rounded.

    Angles are in float32 at least, whatever the dtype of the products.
    """
    dtype = jnp.dtype(compute_dtype or inputs.compute_dtype)
    rates, magnitude = inputs.rotation
    angles = inputs.positions[..., None].astype(inputs.compute_dtype) * rates.astype(inputs.compute_dtype)
    if inputs.inverse:
        angles, magnitude = -angles, 1.0 / magnitude
    cos, sin = ((magnitude * function(angles)).astype(dtype) for function in (jnp.cos, jnp.sin))
    x = inputs.x.astype(dtype)
    turned, rest = x[..., : inputs.rotated], x[..., inputs.rotated :]
    pairs = (inputs.rotated // 2, 2) if inputs.interleaved else (2, inputs.rotated // 2)
    axis = -1 if inputs.interleaved else -2
    first, second = jnp.moveaxis(turned.reshape(*turned.shape[:-1], *pairs), axis, 0)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis).reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1)
