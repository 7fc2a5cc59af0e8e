"""Checks of the arguments of ``flash_attention``, and the canonical form that every backend reads.

Only types, shapes and dtypes are looked at, so all of it works on tracers and on ``jax.ShapeDtypeStruct``.
"""

import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.registry import Platform

type CausalAlignment = Literal["top_left", "bottom_right"]
type PlatformLike = Platform | str
type PrecisionLike = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | None


def as_array(name: str, value: Any) -> Any:
    """``value`` as a JAX array, untouched if it is one already, a tracer, or a ``ShapeDtypeStruct``."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value
    if isinstance(value, np.ndarray | np.generic | numbers.Number | list | tuple):
        return jnp.asarray(value)
    raise TypeError(f"{name} must be an array, got {value!r} of type {type(value).__name__}")


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """``array.reshape`` that also takes a ``ShapeDtypeStruct`` and costs nothing if the shape is the same."""
    return array if array.shape == shape else apply(lambda x: x.reshape(shape), array)


def apply(function: Callable[..., Any], *arrays: Any) -> Any:
    """``function(*arrays)``, by shape alone if one of them has no values."""
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        return jax.eval_shape(function, *arrays)
    return function(*arrays)


@functools.cache
def is_floating(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@functools.cache
def is_integer(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def _is_real(dtype: Any) -> bool:
    return is_floating(dtype) or is_integer(dtype)


def narrowed(array: Any, dtype: DTypeLike) -> Any:
    """An array beside queries of ``dtype``: of 64 bits only if they are, whatever ``jax_enable_x64`` made of it."""
    if array is None or np.dtype(dtype).itemsize >= 8:
        return array
    if is_integer(array.dtype) and array.dtype.itemsize == 8:
        return apply(to_int32, array)
    return apply(lambda x: x.astype(jnp.float32), array) if array.dtype == np.float64 else array


def query_key_value(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, bool]:
    """The three arrays with a batch dimension, and whether it had to be added."""
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    shapes = f"{query.shape=}, {key.shape=}, {value.shape=}"
    rank = len(query.shape)
    if rank not in (3, 4) or len(key.shape) != rank or len(value.shape) != rank:
        raise ValueError(
            f"query, key and value must all be [batch, length, heads, head_dim] or all [length, heads, head_dim], "
            f"got {shapes}"
        )
    dtype = query.dtype
    if not is_floating(dtype) or key.dtype != dtype or value.dtype != dtype:
        raise TypeError(
            f"query, key and value must have one floating-point dtype, got {query.dtype=}, {key.dtype=}, {value.dtype=}"
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


def score_array(name: str, array: Any, scores: tuple[int, int, int, int]) -> Any:
    """An array that is broadcastable to the scores' shape, with rank 4."""
    array = as_array(name, array)
    shape = array.shape
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    if len(shape) > 4 or any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to [batch, heads, q_length, kv_length] = {list(scores)}, "
            f"got {name}.shape={tuple(shape)}"
        )
    return reshape(array, padded)


def bias_array(bias: Any, scores: tuple[int, int, int, int]) -> Any:
    bias = score_array("bias", bias, scores)
    if not is_floating(bias.dtype):
        raise TypeError(f"bias is added to the logits and must be floating-point, got {bias.dtype=}; see mask")
    return bias


def sinks_array(softmax_aux: Any, heads: int) -> Any:
    """``[heads, sinks]``."""
    softmax_aux = as_array("softmax_aux", softmax_aux)
    if not is_floating(softmax_aux.dtype):
        raise TypeError(f"softmax_aux holds logits and must be floating-point, got {softmax_aux.dtype=}")
    shape = softmax_aux.shape
    if len(shape) not in (1, 2) or shape[0] != heads or (len(shape) == 2 and shape[1] == 0):
        raise ValueError(f"softmax_aux must have the shape [heads] or [heads, n] with {heads=}, got {shape=}")
    return reshape(softmax_aux, (heads, 1)) if len(shape) == 1 else softmax_aux


def integer_array(name: str, array: Any, shape: tuple[int, ...], unbatched: bool) -> Any:
    """An int32 array of ``shape``, whose leading batch dimension may be absent where the call has none."""
    array = as_array(name, array)
    if not is_integer(array.dtype):
        raise TypeError(f"{name} must hold integers, got {name}.dtype={array.dtype}")
    if array.shape != shape and not (unbatched and array.shape == shape[1:]):
        wanted = f"{shape}" + (f" or {shape[1:]}" if unbatched else "")
        raise ValueError(f"{name} must have the shape {wanted}, got {name}.shape={tuple(array.shape)}")
    array = reshape(array, shape)
    return array if array.dtype == np.int32 else apply(to_int32, array)


def to_int32(array: Any) -> Any:
    """int32 with what does not fit cut off: a wrapped number would be a length, or name a page, that is there."""
    limits = jnp.iinfo(array.dtype)
    if limits.max > np.iinfo(np.int32).max:
        low = max(limits.min, np.iinfo(np.int32).min)
        array = jnp.clip(array, low, np.iinfo(np.int32).max)
    return array.astype(jnp.int32)


def identifiers(name: str, array: Any, shape: tuple[int, ...], unbatched: bool) -> Any:
    """An int32 array of numbers of which equality alone counts: of 64 bits the lower half, that of hashes too."""
    array = as_array(name, array)
    if is_integer(array.dtype) and array.dtype.itemsize == 8:
        array = apply(lambda x: x.astype(jnp.int32), array)
    return integer_array(name, array, shape, unbatched)


def number(name: str, value: Any) -> float:
    """A finite Python float from a number of Python's or NumPy's."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a number, got {value}; {_static_hint(name, 'float')}")
    scalar = isinstance(value, jax.Array | np.ndarray | np.generic) and value.shape == () and _is_real(value.dtype)
    if isinstance(value, bool | np.bool_) or not (scalar or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {name}={result}")
    return result


def integer(name: str, value: Any) -> int:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be an int, got {value}; {_static_hint(name, 'int')}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def flag(name: str, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be True or False, got {value}; {_static_hint(name, 'bool')}")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, known while tracing, got {value!r}")
    return bool(value)


def _static_hint(name: str, kind: str) -> str:
    """What to do about a traced option: a call's JAX arrays are its operands, traced in eager calls too."""
    return (
        f"it must be known while tracing: pass {kind}(...) of a concrete array, or make it a static argument of your "
        f"function (static_argnames={name!r})"
    )


def soft_cap(logits_soft_cap: Any) -> float | None:
    if logits_soft_cap is None:
        return None
    result = number("logits_soft_cap", logits_soft_cap)
    if result <= 0.0:
        raise ValueError(f"logits_soft_cap must be positive (None for no cap), got {logits_soft_cap=}")
    return result


def scaled(query: Any, softmax_scale: Any) -> tuple[Any, float]:
    """The query and the scale of its products with the keys, 1/√head_dim by default.

    A scale that is a JAX array is an operand, traced or not: it is multiplied into the query, and rounded with it.
    """
    if softmax_scale is None:
        return query, 1.0 / math.sqrt(query.shape[-1])
    if not isinstance(softmax_scale, jax.Array | jax.ShapeDtypeStruct):
        return query, number("softmax_scale", softmax_scale)
    if softmax_scale.shape != () or not _is_real(softmax_scale.dtype):
        raise TypeError(
            f"softmax_scale must be a number or a real scalar array, got {softmax_scale.shape=}, {softmax_scale.dtype=}"
        )
    return apply(_scaled, query, softmax_scale), 1.0


def _scaled(query: Any, scale: Any) -> Any:
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return (query.astype(wide) * scale.astype(wide)).astype(query.dtype)


def window(sliding_window: Any, causal: bool) -> tuple[int | None, int | None]:
    """(left, right), both inclusive and None where unbounded; causality is folded into ``right``."""
    message = f"sliding_window must be an int or (left, right) of ints or None, got {sliding_window=}"
    sides = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if any(isinstance(side, jax.core.Tracer) for side in sides):
        raise TypeError(f"{message}; {_static_hint('sliding_window', 'int')}")
    if len(sides) != 2 or any(isinstance(side, bool | np.bool_) for side in sides):
        raise TypeError(message)
    try:
        left, right = (None if side is None else operator.index(side) for side in sides)
    except TypeError:
        raise TypeError(message) from None
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"sliding_window must not be negative, got {sliding_window=}")
    return left, 0 if causal else right


def alignment(causal_alignment: Any) -> bool:
    """Whether the last query is aligned with the last key."""
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"{causal_alignment=} must be 'top_left' or 'bottom_right'")
    return causal_alignment == "bottom_right"


def dropout(dropout_prob: Any, dropout_seed: Any) -> tuple[float, Any]:
    """The probability, and the seed as ``uint32[2]``, None where nothing is dropped."""
    prob = number("dropout_prob", dropout_prob)
    if not 0.0 <= prob < 1.0:
        raise ValueError(f"dropout_prob must be in [0, 1), got {dropout_prob=}")
    if prob > 0.0 and dropout_seed is None:
        raise ValueError(f"dropout_seed is needed with {dropout_prob=}: an int, uint32[2], or a jax.random key")
    seed = None if dropout_seed is None else seed_words(dropout_seed)
    return prob, seed if prob > 0.0 else None


def seed_words(seed: Any) -> Any:
    """Two uint32 words: of a 64-bit integer the high and the low one, of a key the first two."""
    message = f"dropout_seed must be an integer, an integer scalar, uint32[2], or a jax.random key, got {seed!r}"
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool | np.bool_):
        if not -(1 << 63) <= int(seed) < 1 << 64:
            raise ValueError(f"dropout_seed must fit in 64 bits, got {seed=}")
        low, high = int(seed) & 0xFFFFFFFF, (int(seed) >> 32) & 0xFFFFFFFF
        # An array rather than a static value: a new seed for each step must not compile each step anew.
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


def _scalar_words(seed: Any) -> Any:
    """The same words as of the Python integer."""
    if seed.dtype.itemsize == 8:
        high = seed >> 32
    else:
        high = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([high.astype(jnp.uint32), seed.astype(jnp.uint32)])


def matmul_precision(precision: Any) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset | None:
    if precision is None or isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        return precision
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[precision]
    try:
        return jax.lax.Precision(precision)
    except ValueError:
        raise ValueError(
            f"{precision=} must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, or the name of one, "
            "such as 'highest'"
        ) from None


def platforms(platform: PlatformLike | Sequence[PlatformLike] | None) -> tuple[Platform, ...] | None:
    """The platforms allowed, in order of preference; None is any."""
    if platform is None or platform == "auto":
        return None
    names = (platform,) if isinstance(platform, str) else platform
    known = [str(member) for member in Platform]
    if not isinstance(names, Sequence) or not names or not all(name in known for name in names):
        raise ValueError(f"{platform=} must be None, 'auto', one of {known}, or a non-empty sequence of them")
    return tuple(Platform(name) for name in names)
