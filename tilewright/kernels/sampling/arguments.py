"""Checks of the arguments of functions that draw tokens, and their canonical forms."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.arguments import apply, as_array, integer, is_integer, is_real, number, to_int32
from tilewright.kernels.sampling.noise import folded_keys
from tilewright.ops.kernel.arrays import is_symbolic


def row_keys(key: object, leading: tuple[int, ...]) -> jax.Array:
    """Two words for each row, from a key for all rows or one for each."""
    array = as_array("key", key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # Of a key of four words, as "rbg" has it, the first two, which is what JAX splits it by.
        array = apply(lambda key: jax.random.key_data(key)[..., :2], array)
    elif array.dtype != np.uint32 or array.shape[-1:] != (2,):
        raise TypeError(
            f"key must be made by jax.random.key or be uint32[..., 2], got {array.dtype}{list(array.shape)}; for a "
            "seed pass jax.random.key(seed)"
        )
    if array.shape[:-1] == leading:
        return array
    if array.shape[:-1]:
        raise ValueError(
            f"key must be one key or one for each row, of the shape {leading}, got keys of the shape {array.shape[:-1]}"
        )
    folded: jax.Array = apply(lambda key: folded_keys(key, math.prod(leading)).reshape(*leading, 2), array)
    return folded


def temperatures(temperature: object, leading: tuple[int, ...]) -> Any:
    """A temperature for each row, or ``None`` for 1."""
    found = _not_negative("temperature", temperature, leading)
    return None if isinstance(found, float) and found == 1.0 else _filled(found, leading)


def top_ks(top_k: object, leading: tuple[int, ...], vocab: int) -> Any:
    """A number of tokens for each row, or ``None`` for no limit."""
    if top_k is None:
        return None
    if not _is_number(top_k):
        return _by_row("top_k", top_k, leading, np.int32)
    value = integer("top_k", top_k)
    return _filled(value, leading) if 0 < value < vocab else None


def top_ps(top_p: object, leading: tuple[int, ...]) -> Any:
    """A share of the mass for each row, or ``None`` for no limit."""
    found = None if top_p is None else _not_negative("top_p", top_p, leading)
    return None if isinstance(found, float) and found >= 1.0 else _filled(found, leading)


def min_ps(min_p: object, leading: tuple[int, ...]) -> Any:
    """A share of the largest probability for each row, or ``None`` for no limit."""
    found = None if min_p is None else _not_negative("min_p", min_p, leading)
    if isinstance(found, float) and found > 1.0:
        raise ValueError(f"min_p must be from 0 to 1, got {min_p=}")
    return None if isinstance(found, float) and found == 0.0 else _filled(found, leading)


def _not_negative(name: str, value: object, leading: tuple[int, ...]) -> Any:
    """A float from a number, which is checked, or an array of one for each row."""
    if not _is_number(value):
        return _by_row(name, value, leading, np.float32)
    found = number(name, value)
    if found < 0.0:
        raise ValueError(f"{name} must not be negative, got {name}={found}")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Number | np.generic)


def _filled(value: object, leading: tuple[int, ...]) -> Any:
    """A number as an array of one for each row; anything else unchanged."""
    if not isinstance(value, float | int):
        return value
    dtype = np.float32 if isinstance(value, float) else np.int32
    return jnp.full(leading, value, dtype) if is_symbolic(*leading) else np.full(leading, value, dtype)


def _by_row(name: str, value: object, leading: tuple[int, ...], dtype: type[np.number]) -> Any:
    """An array of a number for each row, from one of that shape or a scalar."""
    array = as_array(name, value)
    wants_integers = dtype is np.int32
    if not (is_integer(array.dtype) if wants_integers else is_real(array.dtype)):
        raise TypeError(f"{name} must hold {'integers' if wants_integers else 'real numbers'}, got {array.dtype=}")
    if array.shape not in ((), leading):
        raise ValueError(
            f"{name} must be a number or have one for each row, of the shape {leading}, got {array.shape=}"
        )

    def canonical(array: jax.Array) -> jax.Array:
        array = to_int32(array) if wants_integers else array.astype(dtype)
        return jnp.broadcast_to(array, leading)

    return apply(canonical, array)
