"""Converts the gradients that a kernel returns into those that JAX expects."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.ops.kernel.arrays import ARRAY_TYPES, Structure, split
from tilewright.ops.kernel.kernel import Kernel


def select_gradients(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], gradients: object, wanted: tuple[bool, ...]
) -> list[Any]:
    """Selects the requested gradients, in the order of the call's arrays.

    Args:
      gradients: the value that the kernel returned.
      wanted: for each array, True if its gradient is requested; if empty, all are returned, missing ones as ``None``.

    Raises:
      TypeError: a gradient is missing or has another shape, or the kernel returned neither a tuple nor a dict.
    """
    named = kernel.named_arguments(args, kwargs)
    names = [name for name, _ in named]
    if isinstance(gradients, dict):
        by_name = dict(gradients)
    elif isinstance(gradients, tuple | list) and len(gradients) == len(args):
        by_name = dict(zip(names, gradients, strict=False))
    else:
        raise TypeError(
            f"{kernel!r} must return one gradient for each of its {len(args)} positional arguments "
            f"{tuple(names[: len(args)])}, or a dict by name, got {type(gradients).__name__} of "
            f"{jax.tree.structure(gradients)}"
        )
    unknown = set(by_name) - set(names)
    if unknown:
        raise TypeError(f"{kernel!r} returned gradients for {sorted(unknown)}, which are no arguments of the call")
    given: list[Any] = []
    for name, value in named:
        arrays, structure = split(value)
        gradient = by_name.get(name)
        found = [None] * len(arrays)
        if gradient is not None:
            found = _gradient_leaves(kernel, name, structure, gradient)
        given += found
    if not wanted:
        return given
    return [
        _checked(kernel, label, gradient, array)
        for label, gradient, array, is_wanted in zip(
            array_labels(kernel, args, kwargs), given, split((args, kwargs))[0], wanted, strict=True
        )
        if is_wanted
    ]


def wanted_names(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[bool, ...]
) -> frozenset[str]:
    """The names of the arguments that have an array whose gradient is requested; all names if ``wanted`` is empty."""
    labels = array_labels(kernel, args, kwargs)
    return frozenset(name for name, is_wanted in zip(labels, wanted or [True] * len(labels), strict=True) if is_wanted)


def array_labels(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The argument's name for each array of a call."""
    return [name for name, value in kernel.named_arguments(args, kwargs) for _ in split(value)[0]]


def _gradient_leaves(kernel: Kernel[Any, Any], name: str, structure: Structure, gradient: object) -> list[Any]:
    try:
        leaves = structure.tree.flatten_up_to(gradient)
    except ValueError as error:
        raise TypeError(
            f"{kernel!r} returned a gradient for {name!r} of another structure than the argument's: {error}"
        ) from error
    return [leaf for leaf, static in zip(leaves, structure.leaves, strict=True) if static is None]


def _checked(kernel: Kernel[Any, Any], name: str, gradient: object, array: jax.Array) -> jax.Array:
    if gradient is None:
        raise TypeError(
            f"{kernel!r} returns no gradient for its argument {name!r}, which is being differentiated; "
            f"use jax.lax.stop_gradient({name}) if it should be a constant"
        )
    if not isinstance(gradient, (*ARRAY_TYPES, np.generic)):
        raise TypeError(f"{kernel!r} returned {gradient!r} as the gradient for {name!r}, which is no array")
    if gradient.shape != array.shape:
        raise TypeError(f"{kernel!r} returned a gradient of {gradient.shape=} for {name!r} with {array.shape=}")
    return jnp.asarray(gradient, array.dtype)


def with_manual_axes(gradient: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """Makes a gradient vary over the same manual axes of a ``shard_map`` as its argument, of type ``aval``.

    An argument that all devices share gets the sum of their gradients.
    """
    actual, expected = (x.manual_axis_type.varying for x in (jax.typeof(gradient), aval))
    if actual - expected:
        gradient = jax.lax.psum(gradient, tuple(actual - expected))
    if expected - actual:
        gradient = jax.lax.pcast(gradient, tuple(expected - actual), to="varying")
    return gradient
