"""Checks of the arguments that the scan and its step have in common."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.op.arguments import apply, as_array, has_arithmetic, is_floating, reshape, to_32_bit


def tokens_array(u: object, rank: int, layout: str) -> jax.Array:
    """Checks u."""
    u = as_array("u", u)
    if len(u.shape) != rank or not has_arithmetic(u.dtype):
        raise ValueError(f"u must be a floating-point array of 16 bits or more, {layout}, got {u.shape=}, {u.dtype=}")
    return u


def like_tokens(name: str, value: object, u: jax.Array) -> Any:
    """Checks an array with an element for each of u; None if it is not given."""
    if value is None:
        return None
    array = as_array(name, value)
    if array.shape != u.shape or not has_arithmetic(array.dtype):
        raise ValueError(
            f"{name} must be a floating-point array of u's shape {u.shape}, got {name}.shape={array.shape}, "
            f"{name}.dtype={array.dtype}"
        )
    return to_32_bit(array, u.dtype)


def decay_array(value: object, u: jax.Array) -> Any:
    """Checks A, ``[channels, state]``."""
    array = as_array("A", value)
    if len(array.shape) != 2 or array.shape[0] != u.shape[-1] or not is_floating(array.dtype):
        raise ValueError(
            f"A must be floating-point [channels, state] with {u.shape[-1]} channels as u has, got A.shape="
            f"{array.shape}, A.dtype={array.dtype}; complex states are not supported"
        )
    return to_32_bit(array, u.dtype)


def by_state(name: str, value: object, u: jax.Array, state: int) -> Any:
    """Checks B or C, ``[..., state]`` or ``[..., groups, state]``, and returns it with groups."""
    array = as_array(name, value)
    leading = u.shape[:-1]
    ranks = (len(leading) + 1, len(leading) + 2)
    shape = array.shape
    if len(shape) not in ranks or shape[: len(leading)] != leading or shape[-1] != state:
        raise ValueError(
            f"{name} must have the shape {(*leading, state)}, or with groups of channels {(*leading, 'groups', state)},"
            f" got {name}.shape={shape}"
        )
    if not has_arithmetic(array.dtype):
        raise ValueError(f"{name} must be a floating-point array of 16 bits or more, got {name}.dtype={array.dtype}")
    array = reshape(array, shape if len(shape) == ranks[1] else (*leading, 1, state))
    groups, channels = array.shape[-2], u.shape[-1]
    if groups != 1 and (not groups or channels % groups):
        raise ValueError(f"the groups of {name} must divide the channels, got {name}.shape={shape}, {u.shape=}")
    return to_32_bit(array, u.dtype)


def same_groups(b: jax.Array, c: jax.Array) -> None:
    """Raises unless B and C have as many groups."""
    if b.shape[-2] != c.shape[-2]:
        raise ValueError(f"B and C must have the same groups, got {b.shape[-2]} and {c.shape[-2]}")


def channel_vector(name: str, value: object, u: jax.Array) -> Any:
    """Checks D or delta_bias, ``[channels]``; None if it is not given."""
    if value is None:
        return None
    array = as_array(name, value)
    if array.shape != u.shape[-1:] or not is_floating(array.dtype):
        raise ValueError(
            f"{name} must be floating-point {u.shape[-1:]}, one for each channel, got {name}.shape={array.shape}, "
            f"{name}.dtype={array.dtype}"
        )
    return to_32_bit(array, u.dtype)


def initial_states(value: object, shape: tuple[int, ...], u: jax.Array) -> Any:
    """Checks the initial states, and returns them as float32, or float64 if u is; None if they are not given."""
    if value is None:
        return None
    array = as_array("initial_state", value)
    if array.shape != shape or not is_floating(array.dtype):
        raise ValueError(
            f"initial_state must be floating-point [sequences, channels, state], {shape}, got initial_state.shape="
            f"{array.shape}, initial_state.dtype={array.dtype}"
        )
    return apply(lambda x: x.astype(jnp.promote_types(u.dtype, jnp.float32)), array)
