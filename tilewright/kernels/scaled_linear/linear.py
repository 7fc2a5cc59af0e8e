"""A linear layer whose three matmuls are of eight bits, with gradients straight through the rounding."""

import functools
from typing import Any

import jax
from jax.typing import DTypeLike

from tilewright.kernels.matmul.ops.matmul import matmul
from tilewright.kernels.op.arguments import as_array, has_arithmetic
from tilewright.kernels.op.signatures import ArrayLike
from tilewright.kernels.quantize.op import quantize
from tilewright.kernels.quantize.quantized import Quantized
from tilewright.kernels.scaled_linear.recipe import Recipe


def scaled_linear(x: ArrayLike, weight: ArrayLike, *, recipe: Recipe = Recipe()) -> jax.Array:
    """``x · weight`` in eight bits, forward and backward: each of the three matmuls multiplies codes.

    Forward x and the weight are quantised along k, for the gradient of x the cotangents and the weight along n, for
    that of the weight x and the cotangents along the rows: each array once, in one pass that gives both orientations.
    What the backward pass keeps are codes, one byte for each element of x and of the weight. Sums are in float32, of
    at most 128 products of Hopper's tensor cores at a time. Gradients are those of the product of the rounded numbers
    with the rounding left out (straight through).

    With ``Recipe("block")`` no kernel has the scales of the weight's gradient: its operands are made numbers of x's
    dtype again, and multiplied as such.

    Args:
      x: ``[..., k]``, floating-point of 16 bits or more.
      weight: ``[k, n]``, floating-point of 16 bits or more.
      recipe: the formats and scales.

    Returns:
      ``[..., n]``, in x's dtype; gradients are in the dtypes of x and of the weight.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe, got {recipe!r}")
    for name, value in (("x", x), ("weight", weight)):
        if isinstance(value, Quantized):
            raise TypeError(
                f"{name} is quantised already; scaled_linear takes the array, and quantises it in both ways"
            )
    x, weight = as_array("x", x), as_array("weight", weight)
    for name, array, rank in (("x", x, len(x.shape) or 1), ("weight", weight, 2)):
        if len(array.shape) != rank or not has_arithmetic(array.dtype):
            raise ValueError(
                f"{name} must be a floating-point array of 16 bits or more, x [..., k] and weight [k, n], got "
                f"{array.shape=}, {array.dtype=}"
            )
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x and weight must have the same k, got {x.shape=}, {weight.shape=}")
    rows = x.reshape(-1, x.shape[-1])
    return _linear(recipe, weight.dtype.name, rows, weight).reshape(*x.shape[:-1], weight.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(recipe: Recipe, weight_dtype: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _product(quantize(x, **recipe.of_activations), _along_k(recipe, weight), x.dtype)


def _along_k(recipe: Recipe, weight: jax.Array) -> Quantized:
    """The weight as ``[n, k]``, quantised along k."""
    if recipe.scaling == "row":
        return quantize(weight, axis=-2, **recipe.of_weights).mT
    return quantize(weight, **recipe.of_weights).mT


def _forward(recipe: Recipe, weight_dtype: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    along_k, along_rows = quantize(x, transposed=True, **recipe.of_activations)
    along_n, weight_along_k = quantize(weight, transposed=True, **recipe.of_weights)
    return _product(along_k, weight_along_k, x.dtype), (along_rows, along_n)


def _backward(recipe: Recipe, weight_dtype: str, kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    options = {**recipe.of_activations, "format": recipe.of_gradients}
    along_n, along_rows = quantize(d_out, transposed=True, **options)
    d_x = _product(along_n, weight, d_out.dtype)
    if recipe.scaling == "block":
        d_weight = matmul(
            x.dequantize(d_out.dtype),
            along_rows.dequantize(d_out.dtype),
            transpose_rhs=True,
            preferred_element_type=weight_dtype,
        )
    else:
        d_weight = _product(x, along_rows, weight_dtype)
    return d_x, d_weight


def _product(lhs: Quantized, rhs: Quantized, dtype: DTypeLike) -> jax.Array:
    """``[m, k]`` times the transpose of ``[n, k]``, both quantised along k."""
    return matmul(lhs, rhs, transpose_rhs=True, preferred_element_type=dtype)


_linear.defvjp(_forward, _backward)
