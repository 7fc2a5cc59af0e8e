"""Weights of mxfp4 in float8_e4m3fn, for matmuls in eight bits."""

import jax.numpy as jnp
from jax import lax

from tilewright.kernels.quantize.quantized import SCALE_BLOCK, Quantized, expanded
from tilewright.kernels.weight_only.packing import MXFP4_GROUP, unpacked, values_of
from tilewright.kernels.weight_only.weights import PackedWeight

MAX_SHIFT = 6
"""The greatest power of two by which every e2m1 is within e4m3: 6 · 64 is 384, and 448 its greatest number."""

MIN_SHIFT = -8
"""The least one by which every e2m1 is a number of e4m3: 0.5 · 2⁻⁸ is its least subnormal."""


def mxfp4_to_e4m3(weight: PackedWeight) -> Quantized:
    """A weight in mxfp4 as e4m3 with a scale for 128 × 128 elements, which is how ``matmul`` takes operands of 8 bits.

    Every e2m1 is a number of e4m3, and so is its product with 2⁻⁸ to 2⁶. The scale of a block is the greatest of its
    powers of two divided by 2⁶ (but 2⁻¹²⁶ at least), so nothing is rounded unless powers of two within a block are more
    than 2¹⁴ apart. Then codes of the smallest ones are rounded to the nearest multiple of 2⁻⁹, ties to even.

    Args:
      weight: in "mxfp4", ``[..., k, n]``, without an order of rows.

    Returns:
      ``[..., k, n]`` in e4m3. Where an exponent is NaN (255), so are its codes.

    Raises:
      ValueError: a weight in another format.
    """
    if not isinstance(weight, PackedWeight) or weight.format != "mxfp4" or weight.order is not None:
        given = weight.format if isinstance(weight, PackedWeight) else type(weight).__name__
        raise ValueError(f"weight must be a PackedWeight in mxfp4, got {given}")
    k, block = weight.k, (SCALE_BLOCK, SCALE_BLOCK)
    biased = weight.scales.astype(jnp.int32)  # [..., groups, n]
    *leading, groups, n = biased.shape
    per_block = SCALE_BLOCK // MXFP4_GROUP
    ends = [(0, 0)] * len(leading) + [(0, -groups % per_block), (0, -n % SCALE_BLOCK)]
    blocks = jnp.pad(jnp.where(biased == 255, 0, biased), ends)
    shape = (blocks.shape[-2] // per_block, per_block, blocks.shape[-1] // SCALE_BLOCK, SCALE_BLOCK)
    base = jnp.maximum(jnp.max(blocks.reshape(*leading, *shape), axis=(-3, -1), initial=0) - MAX_SHIFT, 1)
    # Below −20 a product rounds to zero whatever the code is; the power itself stays a normal number.
    shift = jnp.maximum(biased - expanded(base, (per_block, SCALE_BLOCK), biased.shape), -20)
    power = lax.bitcast_convert_type((shift + 127) << 23, jnp.float32)
    power = jnp.where(biased == 255, jnp.nan, power)
    values = values_of(unpacked(weight.codes, "mxfp4", k), "mxfp4", jnp.float32).swapaxes(-1, -2)
    codes = (values * jnp.repeat(power, MXFP4_GROUP, axis=-2)[..., :k, :]).astype(jnp.float8_e4m3fn)
    return Quantized(codes, lax.bitcast_convert_type(base << 23, jnp.float32), "e4m3", block)
