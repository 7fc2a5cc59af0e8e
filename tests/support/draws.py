"""Arrays that no program has to be compiled for: modules of tests make them while they are collected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Normally distributed values."""
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return array(np.zeros(shape), dtype)


def array(values: np.ndarray, dtype: Any) -> jax.Array:
    """As ``jnp.asarray`` would have it, which compiles a program for each shape."""
    return jax.device_put(values.astype(jax.dtypes.canonicalize_dtype(dtype)))
