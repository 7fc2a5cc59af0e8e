"""Logits as unsigned integers in their order, and masses as integers: sums that are the same in any order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.op.sharding import vary_over, varying_axes

FRACTION_BITS = 40
"""Bits of the fixed-point numbers that weights are summed as: a token of 2⁻⁴⁰ of the largest weight still counts."""


def ordered(x: jax.Array) -> jax.Array:
    """``uint32`` in the order of float32 numbers: −0 is 0, and NaN is −∞.

    By integers alone, because arithmetic may take subnormal numbers for zeros.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000), np.uint32(0xFF800000), bits)
    bits = jnp.where(bits == np.uint32(0x80000000), np.uint32(0), bits)
    return jnp.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))


def value_of(key: jax.Array) -> jax.Array:
    """The float32 number of an ``ordered`` integer."""
    bits = jnp.where(key >> 31 == 1, key & np.uint32(0x7FFFFFFF), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def largest(holds: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The largest ``uint32`` of each row for which a condition holds that holds of all smaller ones, and of 0.

    Args:
      holds: the condition of a threshold for each row.
      like: an array of the thresholds' shape.
    """

    def step(bit: jax.Array, found: jax.Array) -> jax.Array:
        more = found | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(holds(more), more, found)

    zeros = vary_over(varying_axes(like), jnp.zeros(like.shape, jnp.uint32))
    return lax.fori_loop(jnp.int32(0), jnp.int32(32), step, zeros)


def mass(weights: jax.Array, kept: jax.Array) -> jax.Array:
    """The sum of weights from 0 to 1 along the last axis where ``kept``, the same in any order.

    Weights are cut into digits of so many bits that a sum of them fits 32: the sum is exact until it is converted.
    """
    size = weights.shape[-1]
    bits = 31 - max(size - 1, 1).bit_length()
    rest, digits = jnp.where(kept, weights, 0.0), []
    for _ in range(-(-FRACTION_BITS // bits)):
        rest = rest * jnp.float32(2.0**bits)
        digit = jnp.floor(rest)
        rest = rest - digit
        digits.append(digit.astype(jnp.uint32).sum(-1, dtype=jnp.uint32))
    for i in range(len(digits) - 1, 0, -1):
        digits[i - 1] = digits[i - 1] + (digits[i] >> bits)
        digits[i] = digits[i] & np.uint32((1 << bits) - 1)
    total = jnp.zeros(digits[0].shape, jnp.float32)
    for digit in reversed(digits):
        total = (total + digit.astype(jnp.float32)) * jnp.float32(2.0**-bits)
    return total
