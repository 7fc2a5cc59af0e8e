"""Checks of the arguments of the grouped matmuls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.grouped_matmul.inputs import SCALE_BLOCK
from tilewright.kernels.op.arguments import apply, as_array, is_floating, is_integer, to_int32


def floating(name: str, value: object, rank: int, form: str) -> jax.Array:
    """Checks a floating-point array of a rank."""
    array = as_array(name, value)
    if len(array.shape) != rank or not is_floating(array.dtype):
        raise ValueError(f"{name} must be a floating-point array {form}, got {array.shape=}, {array.dtype=}")
    return array


def sizes_array(group_sizes: object) -> jax.Array:
    """Checks group sizes and returns them in int32."""
    array = as_array("group_sizes", group_sizes)
    if not is_integer(array.dtype):
        raise TypeError(f"group_sizes must hold integers, got {array.dtype=}")
    if len(array.shape) != 1:
        raise ValueError(f"group_sizes must have the shape [groups], got {array.shape=}")
    return array if array.dtype == np.int32 else apply(to_int32, array)


def check_sizes_on_host(group_sizes: object) -> None:
    """Raises if group sizes that the host has hold a negative one; those of a device are not read."""
    if isinstance(group_sizes, list | tuple) and any(isinstance(size, jax.Array) for size in group_sizes):
        return
    if isinstance(group_sizes, list | tuple | np.ndarray):
        numbers = np.asarray(group_sizes)
        if numbers.size and np.issubdtype(numbers.dtype, np.integer) and numbers.min() < 0:
            raise ValueError(f"group_sizes must not be negative, got {numbers.tolist()}")


def offset_array(group_offset: object) -> jax.Array:
    """Checks the group of the first matrix and returns it in int32."""
    array = as_array("group_offset", group_offset)
    if not is_integer(array.dtype):
        raise TypeError(f"group_offset must be an integer, got {array.dtype=}")
    if array.shape:
        raise ValueError(f"group_offset must be a scalar, got {array.shape=}")
    return array if array.dtype == np.int32 else apply(to_int32, array)


def check_matrices(name: str, matrices: jax.Array, k: Any, groups: Any, k_axis: int, has_offset: bool) -> None:
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


def scale_array(name: str, value: ArrayLike, operand: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Checks the scale of an operand of ``shape``: a number, or one for each block along ``axes``; in float32."""
    array = as_array(name, value)
    blocks = tuple(-(-size // SCALE_BLOCK) if axis in axes else size for axis, size in enumerate(shape))
    if not is_floating(array.dtype) and not (is_integer(array.dtype) and not array.shape):
        raise TypeError(f"{name} must be floating-point, got {array.dtype=}")
    if array.shape not in ((), blocks):
        raise ValueError(f"{name} must be a number or have the shape {blocks}, as {operand}, got {array.shape=}")
    return array if array.dtype == np.float32 else apply(lambda x: x.astype(jnp.float32), array)
