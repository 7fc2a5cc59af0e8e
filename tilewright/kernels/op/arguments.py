"""Checks of arguments that many ops take, and their canonical forms for backends.

Only types, shapes and dtypes are read, so that all of it works on tracers and on ``jax.ShapeDtypeStruct``.
"""

import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.op.choice import Platform
from tilewright.ops.kernel.arrays import unwrapped

type PlatformLike = Platform | str
type PlatformOption = PlatformLike | Sequence[PlatformLike] | None
"""A platform or a backend by name, several in order of preference, or ``None`` for any; see ``Backends.allowed``."""
type PrecisionLike = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | None


def as_array(name: str, value: object) -> jax.Array:
    """``value`` as a JAX array; unchanged if it is a JAX array, a tracer, or a ``ShapeDtypeStruct``.

    What has ``__jax_array__`` is the array that this returns.
    """
    value = unwrapped(value)
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return cast(jax.Array, value)  # stands for an array
    if isinstance(value, np.ndarray | np.generic | numbers.Number | list | tuple):
        return jnp.asarray(value)
    raise TypeError(f"{name} must be an array, got {value!r} of type {type(value).__name__}")


def on_host(value: object) -> bool:
    """True for numbers that are known while tracing, without a device: a NumPy array, or a list of Python's."""
    if isinstance(value, list | tuple):
        return all(isinstance(each, int | np.integer) for each in value)
    return isinstance(value, np.ndarray)


def reshape(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``array.reshape`` that also takes a ``ShapeDtypeStruct`` and adds no equation if the shape is the same."""
    return array if array.shape == shape else apply(lambda x: x.reshape(shape), array)


def padded(array: jax.Array, multiple: int, *axes: int) -> jax.Array:
    """An array with zeros behind its elements, up to multiples of a number along these axes; or its shape."""
    widths = [(0, -size % multiple if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return cast(jax.Array, apply(lambda x: jnp.pad(x, widths), array)) if any(after for _, after in widths) else array


def apply(function: Callable[..., Any], *arrays: jax.Array | jax.ShapeDtypeStruct | np.ndarray | None) -> Any:
    """Returns ``function(*arrays)``, evaluated abstractly if one of the arrays is a ``ShapeDtypeStruct``."""
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        return jax.eval_shape(function, *arrays)
    return function(*arrays)


@functools.cache
def is_floating(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@functools.cache
def has_arithmetic(dtype: DTypeLike) -> bool:
    """True for floating-point dtypes of 16 bits or more: JAX neither adds nor promotes those of 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


@functools.cache
def is_integer(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def is_real(dtype: np.dtype) -> bool:
    return is_floating(dtype) or is_integer(dtype)


def to_32_bit(array: jax.Array | None, dtype: DTypeLike) -> Any:
    """Converts a 64-bit array, such as ``jax_enable_x64`` makes, to 32 bits, unless ``dtype`` has 64 bits too."""
    if array is None or np.dtype(dtype).itemsize >= 8:
        return array
    if is_integer(array.dtype) and array.dtype.itemsize == 8:
        return apply(to_int32, array)
    return apply(lambda x: x.astype(jnp.float32), array) if array.dtype == np.float64 else array


def sinks_array(softmax_aux: object, heads: int) -> jax.Array:
    """Checks attention sinks and returns them as ``[heads, sinks]``."""
    softmax_aux = as_array("softmax_aux", softmax_aux)
    if not is_floating(softmax_aux.dtype):
        raise TypeError(f"softmax_aux holds logits and must be floating-point, got {softmax_aux.dtype=}")
    shape = softmax_aux.shape
    if len(shape) not in (1, 2) or shape[0] != heads or (len(shape) == 2 and shape[1] == 0):
        raise ValueError(f"softmax_aux must have the shape [heads] or [heads, n] with {heads=}, got {shape=}")
    return reshape(softmax_aux, (heads, 1)) if len(shape) == 1 else softmax_aux


def integer_array(name: str, array: object, shape: tuple[int, ...], unbatched: bool) -> jax.Array:
    """Checks an int32 array of ``shape``, whose leading batch dimension may be missing if the call is unbatched."""
    array = as_array(name, array)
    if not is_integer(array.dtype):
        raise TypeError(f"{name} must hold integers, got {name}.dtype={array.dtype}")
    if array.shape != shape and not (unbatched and array.shape == shape[1:]):
        expected = f"{shape}" + (f" or {shape[1:]}" if unbatched else "")
        raise ValueError(f"{name} must have the shape {expected}, got {name}.shape={tuple(array.shape)}")
    array = reshape(array, shape)
    return array if array.dtype == np.int32 else apply(to_int32, array)


def to_int32(array: jax.Array) -> jax.Array:
    """Converts to int32 with saturation: a wrapped number would be a valid length, or name an existing page."""
    limits = jnp.iinfo(array.dtype)
    if limits.max > np.iinfo(np.int32).max:
        low = max(limits.min, np.iinfo(np.int32).min)
        array = jnp.clip(array, low, np.iinfo(np.int32).max)
    return array.astype(jnp.int32)


def identifiers(name: str, array: object, shape: tuple[int, ...], unbatched: bool) -> jax.Array:
    """An int32 array of ids that are only compared for equality: of 64-bit ids, such as hashes, the lower half."""
    array = as_array(name, array)
    if is_integer(array.dtype) and array.dtype.itemsize == 8:
        array = apply(lambda x: x.astype(jnp.int32), array)
    return integer_array(name, array, shape, unbatched)


def number(name: str, value: object) -> float:
    """A finite Python float from a Python or NumPy number."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a number, got {value}; {static_hint(name, 'float')}")
    scalar = isinstance(value, jax.Array | np.ndarray | np.generic) and value.shape == () and is_real(value.dtype)
    # bool is a subclass of int, but as a number it is a mistake.
    if isinstance(value, bool | np.bool_) or not (scalar or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    result = float(cast(SupportsFloat, value))
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {name}={result}")
    return result


def integer(name: str, value: object) -> int:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be an int, got {value}; {static_hint(name, 'int')}")
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def flag(name: str, value: object) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be True or False, got {value}; {static_hint(name, 'bool')}")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, known while tracing, got {value!r}")
    return bool(value)


def static_hint(name: str, kind: str) -> str:
    """Advice about a traced option: JAX arrays of a call are its operands, and traced in eager calls too."""
    return (
        f"it must be known while tracing: pass {kind}(...) of a concrete array, or make it a static argument of your "
        f"function (static_argnames={name!r})"
    )


def soft_cap(logits_soft_cap: object) -> float | None:
    if logits_soft_cap is None:
        return None
    result = number("logits_soft_cap", logits_soft_cap)
    if result <= 0.0:
        raise ValueError(f"logits_soft_cap must be positive (None for no cap), got {logits_soft_cap=}")
    return result


def scaled(query: jax.Array, softmax_scale: object) -> tuple[jax.Array, float]:
    """The query and the scale of the logits, 1/√head_dim by default.

    A scale that is a JAX array is an operand, traced or not: it is multiplied into the query, and rounded with it.
    """
    if softmax_scale is None:
        return query, 1.0 / math.sqrt(query.shape[-1])
    if not isinstance(softmax_scale, jax.Array | jax.ShapeDtypeStruct):
        return query, number("softmax_scale", softmax_scale)
    if softmax_scale.shape != () or not is_real(softmax_scale.dtype):
        raise TypeError(
            f"softmax_scale must be a number or a real scalar array, got {softmax_scale.shape=}, {softmax_scale.dtype=}"
        )
    return apply(_scaled, query, softmax_scale), 1.0


def _scaled(query: jax.Array, scale: jax.Array) -> jax.Array:
    # In float32 or wider, so that the product is rounded to the query's dtype once.
    compute_dtype = jnp.promote_types(query.dtype, jnp.float32)
    return (query.astype(compute_dtype) * scale.astype(compute_dtype)).astype(query.dtype)


def window(sliding_window: object, causal: bool) -> tuple[int | None, int | None]:
    """Returns (left, right), both inclusive and None if unbounded; causality is folded into ``right``."""
    message = f"sliding_window must be an int or (left, right) of ints or None, got {sliding_window=}"
    sides = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if any(isinstance(side, jax.core.Tracer) for side in sides):
        raise TypeError(f"{message}; {static_hint('sliding_window', 'int')}")
    if len(sides) != 2 or any(isinstance(side, bool | np.bool_) for side in sides):
        raise TypeError(message)
    try:
        left, right = (None if side is None else operator.index(side) for side in sides)
    except TypeError:
        raise TypeError(message) from None
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"sliding_window must not be negative, got {sliding_window=}")
    return left, 0 if causal else right


def matmul_precision(precision: object) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset | None:
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
