"""The rotation in plain JAX, which XLA runs at the speed of a copy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.rope.inputs import RopeInputs


def turned(inputs: RopeInputs, x: jax.Array, sign: float) -> jax.Array:
    """x, or a cotangent, turned by ``sign`` times the angles, and multiplied by the factor of the call."""
    rates, magnitude = inputs.rotation
    magnitude = 1.0 / magnitude if inputs.inverse else magnitude
    head, rest = x[..., : inputs.rotated].astype(inputs.compute_dtype), x[..., inputs.rotated :]
    turn = _interleaved if inputs.interleaved else _halves
    out = turn(head, inputs.positions[..., None].astype(head.dtype), rates.astype(head.dtype), sign, magnitude)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)


def _halves(x: jax.Array, positions: jax.Array, rates: np.ndarray, sign: float, magnitude: float) -> jax.Array:
    """Pairs are an element of the first half and the one at its place in the second."""
    angles = positions * rates
    cos, sin = magnitude * jnp.cos(angles), sign * magnitude * jnp.sin(angles)
    first, second = x[..., : len(rates)], x[..., len(rates) :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _interleaved(x: jax.Array, positions: jax.Array, rates: np.ndarray, sign: float, magnitude: float) -> jax.Array:
    """Pairs are neighbours. Stacking two strided halves takes twice the time of a copy, so lanes are shifted."""
    same = [(0, 0, 0)] * (x.ndim - 1)
    after, before = (lax.pad(x, jnp.zeros((), x.dtype), [*same, (-by, by, 0)]) for by in (1, -1))
    angles = positions * np.repeat(rates, 2)
    even = np.arange(x.shape[-1]) % 2 == 0
    cos, sin = magnitude * jnp.cos(angles), sign * magnitude * jnp.sin(angles)
    return x * cos + jnp.where(even, -after, before) * sin
