"""Checks of the arguments of vocabulary losses."""

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, Reduction
from tilewright.kernels.op.arguments import apply, as_array, is_floating, is_integer, number, on_host, to_int32
from tilewright.kernels.op.contents import Check, Finder, Given, parts, shape_of
from tilewright.kernels.op.sharding import explicit_mesh
from tilewright.ops.kernel.arrays import unwrapped
from tilewright.ops.kernel.kernel import errors_naming_function


def rows_and_matrix(
    names: tuple[str, str], x: object, weight: object, vocab_first: bool
) -> tuple[jax.Array, jax.Array, int]:
    """Checks ``[..., d]`` and its matrix; returns both and the size of the vocabulary."""
    rows, matrix = as_array(names[0], x), as_array(names[1], weight)
    if not rows.shape or not is_floating(rows.dtype):
        raise ValueError(f"{names[0]} must be a floating-point array [..., d], got {rows.shape=}, {rows.dtype=}")
    form = "[vocab, d]" if vocab_first else "[d, vocab]"
    if len(matrix.shape) != 2 or not is_floating(matrix.dtype):
        raise ValueError(f"{names[1]} must be a floating-point array {form}, got {matrix.shape=}, {matrix.dtype=}")
    d, vocab = matrix.shape[::-1] if vocab_first else matrix.shape
    if d != rows.shape[-1]:
        raise ValueError(
            f"{names[0]} has d={rows.shape[-1]}, and {names[1]} must be {form} with that d, "
            f"got {names[1]}.shape={tuple(matrix.shape)} with {vocab_first=}"
        )
    if vocab == 0:
        raise ValueError(f"{names[1]} must have a vocabulary, got {names[1]}.shape={tuple(matrix.shape)}")
    return rows, matrix, vocab


def labels_array(labels: object, tokens: tuple[int, ...], vocab: int, ignore_index: int | None) -> jax.Array:
    """Checks labels, and returns them in int32: ``IGNORED`` for those to ignore, ``vocab`` for those out of range."""
    array = as_array("labels", labels)
    if not is_integer(array.dtype):
        raise TypeError(f"labels must hold integers, got {array.dtype=}")
    if array.shape != tokens:
        raise ValueError(f"labels must have the shape of x without its last axis, {tokens}, got {array.shape=}")

    def canonical(array: jax.Array) -> jax.Array:
        narrow = to_int32(array)
        wrong = (narrow < 0) | (narrow >= vocab)
        found = jnp.where(wrong, jnp.int32(vocab), narrow)
        return found if ignore_index is None else jnp.where(narrow == ignore_index, jnp.int32(IGNORED), found)

    result: jax.Array = apply(canonical, array)
    return result


def check_labels(given: Given) -> None:
    """Raises for labels out of range in a concrete array of a device, or in nested lists; it waits for the array."""
    labels = unwrapped(given.get("labels"))
    if isinstance(labels, jax.core.Tracer | jax.ShapeDtypeStruct) or on_host(labels):
        return
    # A process has only a part of an array that is spread over several.
    if isinstance(labels, jax.Array) and not labels.is_fully_addressable:
        return
    values = np.asarray(labels)
    if not np.issubdtype(values.dtype, np.integer):
        return
    with errors_naming_function("linear_cross_entropy"):
        finder = _labels(given)
        for found in () if finder is None else finder("labels", values):
            raise ValueError(found)


def _labels(given: Given) -> Finder | None:
    """Labels are classes of the whole vocabulary, or the one to ignore."""
    of_x, shape = shape_of(given, "x"), shape_of(given, "weight")
    axis = 0 if given.get("vocab_first", False) else 1
    ignored = given.get("ignore_index", -100)
    if not of_x or shape is None or len(shape) != 2 or of_x[-1] != shape[1 - axis]:
        return None
    if not isinstance(ignored, int | np.integer):
        return None
    devices = parts(given)
    if devices is None:
        return None
    return functools.partial(_faults_of_labels, vocab=shape[axis] * devices, ignore_index=int(ignored))


def _faults_of_labels(name: str, numbers: np.ndarray, vocab: int, ignore_index: int) -> Iterator[str]:
    wrong = numbers[((numbers < 0) | (numbers >= vocab)) & (numbers != ignore_index)]
    if wrong.size:
        yield (
            f"{name} must be from 0 to {vocab - 1} or {ignore_index=}, got {wrong.flat[0]} among {numbers.size} labels "
            f"({wrong.size} of them wrong)"
        )


CONTENTS: Mapping[str, Check] = MappingProxyType({"labels": _labels})


def bias_array(bias: object, vocab: int) -> jax.Array:
    array = as_array("bias", bias)
    if array.shape != (vocab,) or not is_floating(array.dtype):
        raise ValueError(
            f"bias must be a floating-point array [vocab] with {vocab=}, got {array.shape=}, {array.dtype=}"
        )
    return array


def token_weights_array(token_weights: object, tokens: tuple[int, ...]) -> jax.Array:
    """Checks the weights of tokens; a mask of booleans or integers becomes float32."""
    array = as_array("token_weights", token_weights)
    if array.shape != tokens:
        raise ValueError(f"token_weights must have the shape of x without its last axis, {tokens}, got {array.shape=}")
    if is_floating(array.dtype):
        return array
    if not (is_integer(array.dtype) or array.dtype == np.bool_):
        raise TypeError(f"token_weights must hold real numbers, got {array.dtype=}")
    result: jax.Array = apply(lambda x: x.astype(jnp.float32), array)
    return result


def reduction_name(reduction: object) -> Reduction:
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction=} must be 'mean', 'sum' or 'none'")
    return cast(Reduction, reduction)


def fraction(name: str, value: object) -> float:
    result = number(name, value)
    if not 0 <= result <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {name}={result}")
    return result


def not_negative(name: str, value: object) -> float:
    result = number(name, value)
    if result < 0:
        raise ValueError(f"{name} must not be negative, got {name}={result}")
    return result


def positive(name: str, value: object) -> float:
    result = number(name, value)
    if result <= 0:
        raise ValueError(f"{name} must be positive, got {name}={result}")
    return result


def may_be_distributed(*arrays: Any) -> bool:
    """True if XLA may split the operations of a backend over devices, which the types of arrays do not show.

    That is so only inside of a ``shard_map`` that leaves axes to XLA: elsewhere a call is split as a whole, and a
    backend sees one device's part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if explicit_mesh(*arrays) is not None or not mesh.manual_axes:
        return False
    return any(kind == AxisType.Auto and size > 1 for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True))
