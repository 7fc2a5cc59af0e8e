"""FlashMLA's rows of latents in float8: how one is made, and the numbers in it.

A row of 656 bytes holds 512 elements in float8_e4m3fn, a float32 scale for each 128 of them, and the 64 elements of the
rotary part in bfloat16, which float8 would be too coarse for (github.com/deepseek-ai/FlashMLA).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from tilewright.kernels.op.arguments import apply, as_array, has_arithmetic
from tilewright.kernels.op.signatures import ArrayLike
from tilewright.ops.kernel.kernel import errors_naming_function
from tilewright.ops.utils.promotion import default_promotion

FLASH_MLA = "flash_mla"
"""The name of this format as a ``row_format``."""

RANK = 512
"""Elements in float8."""

GROUP = 128
"""Elements that share a scale."""

ROPE_DIM = 64
"""Elements in bfloat16."""

LATENT_DIM = RANK + ROPE_DIM

FIRST_SCALE = RANK
"""Byte at which the scales begin."""

FIRST_ROPE = FIRST_SCALE + 4 * RANK // GROUP
"""Byte at which the rotary part begins."""

ROW_BYTES = FIRST_ROPE + 2 * ROPE_DIM


def quantize_latents(latents: ArrayLike) -> jax.Array:
    """Latents in FlashMLA's row format, as ``update_pages`` writes them and the functions over latents read them.

    The 512 elements of a latent are divided by a scale for each 128 of them, the maximal magnitude of these divided by
    448, and rounded to float8_e4m3fn; the 64 of the rotary part are rounded to bfloat16. Zeros have the scale 1.

    Args:
      latents: ``[..., 576]``, float16, bfloat16, float32 or float64, the rotary part last.

    Returns:
      ``[..., 656]`` uint8: 512 bytes of elements, 16 of float32 scales, 128 of the rotary part.

    Raises:
      ValueError, TypeError: latents of another width or dtype.
    """
    with errors_naming_function("quantize_latents"), default_promotion():
        array = as_array("latents", latents)
        if not array.shape or array.shape[-1] != LATENT_DIM:
            raise ValueError(f"latents must be [..., {LATENT_DIM}], got {array.shape=}")
        if not has_arithmetic(array.dtype):
            raise TypeError(f"latents must be float16, bfloat16, float32 or float64, got {array.dtype=}")
        rows: jax.Array = apply(_quantized, array)
        return rows


def _quantized(latents: Float[Array, "*latents 576"]) -> UInt8[Array, "*latents 656"]:
    leading = latents.shape[:-1]
    groups = latents[..., :RANK].astype(jnp.float32).reshape(*leading, -1, GROUP)
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    # Products, which XLA makes of divisions by what is broadcast: the same bits wherever it does.
    scales = jnp.max(jnp.abs(groups), axis=-1) * jnp.float32(1 / limit)
    # Also where the quotient is no normal number, which some devices take for 0: such a group becomes zeros.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
    # A product may be rounded to more than the limit, beyond which the conversion gives NaN.
    elements = jnp.clip(groups * (1.0 / scales)[..., None], -limit, limit).astype(jnp.float8_e4m3fn)
    parts = (elements, scales, latents[..., RANK:].astype(jnp.bfloat16))
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(*leading, -1) for x in parts], axis=-1)


def dequantized(rows: UInt8[Array, "*latents 656"], dtype: DTypeLike) -> Float[Array, "*latents 576"]:
    """The numbers in rows, computed in float32."""
    leading = rows.shape[:-1]
    elements = lax.bitcast_convert_type(rows[..., :FIRST_SCALE], jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(rows[..., FIRST_SCALE:FIRST_ROPE].reshape(*leading, -1, 4), jnp.float32)
    rotary = lax.bitcast_convert_type(rows[..., FIRST_ROPE:].reshape(*leading, -1, 2), jnp.bfloat16)
    groups = elements.astype(jnp.float32).reshape(*leading, -1, GROUP) * scales[..., None]
    return jnp.concatenate([groups.reshape(*leading, RANK), rotary.astype(jnp.float32)], axis=-1).astype(dtype)
