"""Checks of the arguments of all matmuls."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.matmul.inputs import SCALE_BLOCK
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op.arguments import apply, as_array, is_floating, is_integer, to_int32
from tilewright.kernels.op.contents import Check, Finder, Given, shape_of
from tilewright.kernels.op.sharding import typed_axes


def floating(name: str, value: object, form: str) -> jax.Array:
    """Checks a floating-point array of a form, such as ``"[m, k]"`` or ``"[..., k]"``."""
    array = as_array(name, value)
    rank, given = form.count(",") + 1, len(array.shape)
    if not is_floating(array.dtype) or (given < rank - 1 if "..." in form else given != rank):
        raise ValueError(f"{name} must be a floating-point array {form}, got {array.shape=}, {array.dtype=}")
    return array


def widened(lhs: jax.Array, dtype: np.dtype, rhs: jax.Array) -> jax.Array:
    """The lhs in a result's dtype of 64 bits if no operand has one: without that a backend runs without x64."""
    is_alone = dtype.itemsize == 8 and lhs.dtype.itemsize < 8 and rhs.dtype.itemsize < 8
    return apply(lambda x: x.astype(dtype), lhs) if is_alone else lhs


def grouping(
    lhs: jax.Array, weights: Mapping[str, jax.Array], group_sizes: object, group_offset: object, k_axis: int
) -> tuple[jax.Array, jax.Array | None]:
    """Checks group sizes, the group of the first matrix, and matrices by name; returns the former two in int32."""
    sizes = _integers("group_sizes", group_sizes, "hold integers")
    if len(sizes.shape) != 1:
        raise ValueError(f"group_sizes must have the shape [groups], got array.shape={sizes.shape}")
    offset = None if group_offset is None else _integers("group_offset", group_offset, "be an integer")
    if offset is not None and offset.shape:
        raise ValueError(f"group_offset must be a scalar, got array.shape={offset.shape}")
    for name, matrices in weights.items():
        _check_matrices(name, matrices, lhs.shape[1], sizes.shape[0], k_axis, offset is not None)
    split = (x for x in weights.values() if not isinstance(x, jax.ShapeDtypeStruct))
    if offset is None and any(typed_axes(x)[0] is not None for x in split):
        # A device has a part of the matrices. The offset is there before a backend is chosen: not all serve one.
        offset = jnp.int32(0)
    return sizes, offset


def _integers(name: str, value: object, must: str) -> jax.Array:
    array = as_array(name, value)
    if not is_integer(array.dtype):
        raise TypeError(f"{name} must {must}, got {array.dtype=}")
    return array if array.dtype == np.int32 else apply(to_int32, array)


def _check_matrices(name: str, matrices: jax.Array, k: Any, groups: Any, k_axis: int, has_offset: bool) -> None:
    """Checks the number of matrices, and the axis along which they meet rows."""
    given = f"got {name}.shape={tuple(matrices.shape)}"
    if matrices.shape[k_axis] != k:
        raise ValueError(f"lhs has {k=}, and axis {k_axis} of {name} must have as many elements, {given}")
    if has_offset and matrices.shape[0] > groups:
        raise ValueError(f"{name} must have at most {groups} matrices, one for each group, {given}")
    if not has_offset and matrices.shape[0] != groups:
        raise ValueError(
            f"{name} must have a matrix for each of {groups} groups, {given}; with group_offset it may have fewer"
        )


def _sizes(given: Given) -> Finder | None:
    """Group sizes are 0 or more, and all together no more than there are rows."""
    shape = shape_of(given, "lhs")
    return functools.partial(_faults_of_sizes, rows=shape[0]) if shape else None


def _faults_of_sizes(name: str, numbers: np.ndarray, rows: int) -> Iterator[str]:
    total = sum(numbers.ravel().tolist())
    if numbers.size and numbers.min() < 0:
        yield f"{name} must not be negative, got {_shown(numbers)}"
    elif total > rows:
        yield f"{name} must not add up to more than the {rows} rows of lhs, got {_shown(numbers)} of sum {total}"


def _shown(numbers: np.ndarray) -> str:
    most = 16
    return f"{numbers.ravel()[:most].tolist()}{f' and {numbers.size - most} more' if numbers.size > most else ''}"


CONTENTS: Mapping[str, Check] = MappingProxyType({"group_sizes": _sizes})


def scaled_dtype(preferred: Any, scales: Iterable[object], *dtypes: Any) -> np.dtype:
    """The dtype of a result: the preferred one, or that of the operands; bfloat16 for those of 8 bits with scales."""
    has_scales = any(scale is not None for scale in scales)
    narrow = has_scales and preferred is None and 1 in (dtype.itemsize for dtype in dtypes)
    return result_dtype(jnp.bfloat16 if narrow else preferred, *dtypes)


def scale_array(
    name: str, value: ArrayLike | None, operand: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> jax.Array | None:
    """Checks the scale of an operand of ``shape``: a number, or one for each block along ``axes``; in float32."""
    if value is None:
        return None
    array = as_array(name, value)
    blocks = tuple(-(-size // SCALE_BLOCK) if axis in axes else size for axis, size in enumerate(shape))
    if not is_floating(array.dtype) and not (is_integer(array.dtype) and not array.shape):
        raise TypeError(f"{name} must be floating-point, got {array.dtype=}")
    if array.shape not in ((), blocks):
        raise ValueError(f"{name} must be a number or have the shape {blocks}, as {operand}, got {array.shape=}")
    return array if array.dtype == np.float32 else apply(lambda x: x.astype(jnp.float32), array)
