"""Checks of arguments specific to ``flash_attention``, and their canonical forms for every backend.

Only types, shapes and dtypes are read, so that all of it works on tracers and on ``jax.ShapeDtypeStruct``.
"""

import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.numerics.dropout import drawn_probability
from tilewright.kernels.op.arguments import apply, as_array, has_arithmetic, is_floating, is_integer, number, reshape

type CausalAlignment = Literal["top_left", "bottom_right"]


def query_key_value(query: object, key: object, value: object) -> tuple[Any, Any, Any, bool]:
    """The three arrays with a batch dimension, and True if it had to be added."""
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    shapes = f"{query.shape=}, {key.shape=}, {value.shape=}"
    rank = len(query.shape)
    if rank not in (3, 4) or len(key.shape) != rank or len(value.shape) != rank:
        raise ValueError(
            f"query, key and value must all be [batch, length, heads, head_dim] or all [length, heads, head_dim], "
            f"got {shapes}"
        )
    dtype = query.dtype
    if not has_arithmetic(dtype) or key.dtype != dtype or value.dtype != dtype:
        raise TypeError(
            "query, key and value must have one floating-point dtype of 16 bits or more, "
            f"got {query.dtype=}, {key.dtype=}, {value.dtype=}"
        )
    unbatched = rank == 3
    if unbatched:
        query, key, value = (reshape(array, (1, *array.shape)) for array in (query, key, value))
    batch, _, heads, head_dim = query.shape
    key_batch, kv_length, kv_heads, key_dim = key.shape
    if key_batch != batch or value.shape[0] != batch:
        raise ValueError(f"query, key and value must have the same batch size, got {shapes}")
    if value.shape[1:3] != (kv_length, kv_heads):
        raise ValueError(f"key and value must have the same length and number of heads, got {shapes}")
    if key_dim != head_dim:
        raise ValueError(f"query and key must have the same head_dim, got {shapes}")
    if head_dim == 0 or value.shape[3] == 0:
        raise ValueError(f"head_dim must be at least 1, got {shapes}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")
    return query, key, value, unbatched


def score_array(name: str, array: object, scores: tuple[int, int, int, int]) -> jax.Array:
    """An array of rank 4 that broadcasts to the scores' shape."""
    array = as_array(name, array)
    shape = array.shape
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    if len(shape) > 4 or any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to [batch, heads, q_length, kv_length] = {list(scores)}, "
            f"got {name}.shape={tuple(shape)}"
        )
    return reshape(array, padded)


def bias_array(bias: object, scores: tuple[int, int, int, int]) -> jax.Array:
    array = score_array("bias", bias, scores)
    if not is_floating(array.dtype):
        raise TypeError(
            f"bias is added to the logits and must be floating-point, got bias.dtype={array.dtype!r}; see mask"
        )
    return array


def alignment(causal_alignment: object) -> bool:
    """True if the last query is aligned with the last key."""
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"{causal_alignment=} must be 'top_left' or 'bottom_right'")
    return causal_alignment == "bottom_right"


def dropout(dropout_prob: object, dropout_seed: object) -> tuple[float, Any]:
    """The probability, and the seed as ``uint32[2]``, None without dropout."""
    prob = number("dropout_prob", dropout_prob)
    if not 0.0 <= prob < 1.0:
        raise ValueError(f"dropout_prob must be in [0, 1), got {dropout_prob=}")
    if prob > 0.0 and dropout_seed is None:
        raise ValueError(f"dropout_seed is needed with {dropout_prob=}: an int, uint32[2], or a jax.random key")
    seed = None if dropout_seed is None else seed_words(dropout_seed)
    # A probability that rounds to 0 in the generator is no dropout, and every backend serves that.
    return (prob, seed) if drawn_probability(prob) > 0.0 else (0.0, None)


def seed_words(seed: object) -> Any:
    """Two uint32 words: the high and low word of a 64-bit integer, or the first two words of a key."""
    message = f"dropout_seed must be an integer, an integer scalar, uint32[2], or a jax.random key, got {seed!r}"
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool | np.bool_):
        if not -(1 << 63) <= int(seed) < 1 << 64:
            raise ValueError(f"dropout_seed must fit in 64 bits, got {seed=}")
        # High word first, as in the data of a Threefry key that ``jax.random.key`` makes of an integer.
        low, high = int(seed) & 0xFFFFFFFF, (int(seed) >> 32) & 0xFFFFFFFF
        # An array rather than a static value: a new seed for each step must not recompile the step.
        return np.array([high, low], np.uint32)
    if not isinstance(seed, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(message)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape != ():
            raise ValueError(f"dropout_seed must be a single key, got {seed.shape=}")
        return apply(lambda key: jax.random.key_data(key)[:2], seed)
    if not is_integer(seed.dtype):
        raise TypeError(message)
    if seed.shape == ():
        return apply(_scalar_words, seed)
    if seed.shape != (2,) or seed.dtype != np.uint32:
        raise ValueError(f"dropout_seed as an array must be a scalar or uint32[2], got {seed.shape=}, {seed.dtype=}")
    return seed


def _scalar_words(seed: jax.Array) -> Any:
    """The words of an integer array, equal to those of the same Python integer."""
    if seed.dtype.itemsize == 8:
        high = seed >> 32
    else:
        high = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([high.astype(jnp.uint32), seed.astype(jnp.uint32)])
