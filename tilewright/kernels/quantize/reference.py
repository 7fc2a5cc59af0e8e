"""Quantising by its definition, in ``jax.numpy``: the oracle, and what the XLA backend runs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.quantize.inputs import QuantizeInputs, QuantizeResults
from tilewright.kernels.quantize.quantized import Codes, Quantized, blocks, by_axis, expanded, exponent, mantissa_bits

TINY = float(np.finfo(np.float32).tiny)
"""The least normal float32: XLA flushes what is smaller on CPUs, so elements below count as zeros on every device."""


def quantize_reference(inputs: QuantizeInputs) -> QuantizeResults:
    """The codes and scales of x, and with ``transposed`` those of its transpose."""
    first = _quantized(inputs, inputs.x)
    if not inputs.transposed:
        return first
    return first, first.mT if inputs.is_uniform else _quantized(inputs, inputs.x.swapaxes(-1, -2))


def _quantized(inputs: QuantizeInputs, array: jax.Array) -> Quantized:
    x = array.astype(jnp.float32)
    x = jnp.where(jnp.abs(x) < TINY, x * 0.0, x)
    codes = inputs.codes
    # A format without a NaN has that of an element in the scale of its block.
    magnitude = jnp.where(jnp.isinf(x) | (codes.is_floating & jnp.isnan(x)), 0.0, jnp.abs(x))
    # As integers, which are in the order of the numbers with NaN last: XLA's maximum of floats loses some NaN on CPUs.
    bits = _maxima(lax.bitcast_convert_type(magnitude, jnp.int32) & 0x7FFFFFFF, inputs.covered)
    amax = lax.bitcast_convert_type(bits, jnp.float32)
    scales, inverse = scales_of(amax, codes, inputs.power_of_two)
    y = jnp.clip(x * expanded(inverse, inputs.covered, x.shape), -codes.largest, codes.largest)
    if not codes.is_floating:
        y = jnp.where(jnp.isnan(y), 0.0, lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN))
    return inputs.result(y.astype(codes.dtype), scales)


def scales_of(amax: jax.Array, codes: Codes, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """Scales and their reciprocals, from the greatest finite magnitudes of blocks; NaN gives NaN.

    Both are normal numbers: the scale is at least 2⁻¹²⁶, and 1 of zeros.
    """
    if power_of_two:
        # The least power of two by which the greatest magnitude becomes no greater than the greatest code.
        bits = lax.bitcast_convert_type(amax, jnp.int32) + (0x7FFFFF - mantissa_bits(codes.largest))
        biased = jnp.maximum((bits >> 23) - exponent(codes.largest), 1)
        scales, inverse = (lax.bitcast_convert_type(each << 23, jnp.float32) for each in (biased, 254 - biased))
        scales, inverse = (jnp.where(jnp.isnan(amax), amax, each) for each in (scales, inverse))
    else:
        # By a constant's reciprocal: XLA would make this of a division on some devices, and not on others.
        scales = jnp.maximum(amax * np.float32(1 / codes.largest), TINY)
        inverse = 1.0 / scales
    return jnp.where(amax == 0.0, 1.0, scales), jnp.where(amax == 0.0, 1.0, inverse)


def _maxima(x: jax.Array, block: tuple[int | None, ...]) -> jax.Array:
    """The maximum of every block of an array of integers that are not negative."""
    for axis, each in enumerate(by_axis(block, x.shape)):
        if each is None:
            x = jnp.max(x, axis, keepdims=True, initial=0)
        elif each > 1:
            size, count = x.shape[axis], blocks(x.shape[axis], each)
            x = jnp.pad(x, [(0, count * each - size if i == axis else 0) for i in range(x.ndim)])
            x = x.reshape(*x.shape[:axis], count, each, *x.shape[axis + 1 :])
            x = jnp.max(x, axis + 1, initial=0)
    return x
