"""Checks that the convolution and its step share."""

from typing import Any

import jax
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import as_array, has_arithmetic, is_floating, to_32_bit


def activation_of(activation: object) -> str | None:
    """The name of the activation that backends know."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation must be None, 'silu' or 'swish', got {activation!r}")
    return None if activation is None else "silu"


def tokens_array(x: ArrayLike, ranks: tuple[int, ...], layout: str) -> jax.Array:
    found = as_array("x", x)
    if len(found.shape) not in ranks or not has_arithmetic(found.dtype):
        raise ValueError(
            f"x must be a floating-point array of 16 bits or more, {layout}, got {found.shape=}, {found.dtype=}"
        )
    return found


def weight_arrays(x: jax.Array, weight: ArrayLike, bias: ArrayLike | None) -> tuple[Any, Any]:
    """Weight and bias for the channels of x."""
    channels = x.shape[-1]
    weight = as_array("weight", weight)
    if len(weight.shape) != 2 or weight.shape[0] != channels or not is_floating(weight.dtype):
        raise ValueError(
            f"weight must be floating-point [channels, width] with {channels=} of x, got {weight.dtype}{weight.shape}"
        )
    if not isinstance(weight.shape[1], int) or weight.shape[1] < 1:
        raise ValueError(
            f"the width of weight, its last dimension, must be a number and 1 at least, got {weight.shape}"
        )
    if bias is not None:
        bias = as_array("bias", bias)
        if bias.shape != (channels,) or not is_floating(bias.dtype):
            raise ValueError(f"bias must be floating-point [channels] with {channels=}, got {bias.dtype}{bias.shape}")
    return to_32_bit(weight, x.dtype), to_32_bit(bias, x.dtype)


def state_array(name: str, array: ArrayLike, shape: tuple[Any, ...], layout: str, like: jax.Array) -> Any:
    """States, whose leading dimension is any if it is ``None`` in ``shape``."""
    found = as_array(name, array)
    wanted = (found.shape[0] if shape[0] is None and found.shape else shape[0], *shape[1:])
    if found.shape != wanted or not has_arithmetic(found.dtype):
        shown = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be a floating-point array of 16 bits or more, {layout}: [{shown}], got "
            f"{found.dtype}{tuple(found.shape)}"
        )
    return to_32_bit(found, like.dtype)
