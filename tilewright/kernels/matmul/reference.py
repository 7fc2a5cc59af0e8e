"""The oracle: each matmul by its definition, in ``jax.numpy``."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.groups import matrix_bounds
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.scales import expanded
from tilewright.kernels.numerics.activations import gated
from tilewright.kernels.op.sharding import vary_over, varying_axes

CHUNK = 512
"""Rows that meet a matrix at a time."""


def matmul_reference(inputs: MatmulInputs) -> Any:
    """The result in float32, or in float64 if an operand is; differentiable."""
    wide = jnp.dtype(jnp.float32)
    for each in inputs.operands.values():
        wide = jnp.promote_types(wide, each.dtype)
    products = [_product(inputs.product(name), wide) for name in inputs.weights]
    return products[0] if inputs.activation is None else gated(inputs.activation, *products)


def _product(inputs: MatmulInputs, dtype: Any) -> Any:
    matrix = len(inputs.rhs.shape) - 2
    lhs = _scaled(inputs.lhs.astype(dtype), inputs.lhs_scale, inputs.k_axes[:1])
    rhs = _scaled(inputs.rhs.astype(dtype), inputs.rhs_scale, (matrix, matrix + 1))
    rhs = rhs.swapaxes(-1, -2) if inputs.transpose_rhs else rhs
    if inputs.group_sizes is None:
        return jnp.matmul(lhs.T if inputs.transpose_lhs else lhs, rhs, precision=inputs.precision)
    if inputs.is_empty:
        return jnp.zeros(inputs.out_shape, dtype)
    # A chunk of rows meets the matrix of each group that has rows in it. Groups follow one another, so that there are
    # at most as many of these pairs as chunks and matrices together.
    size = min(inputs.rows, CHUNK)
    chunks = -(-inputs.rows // size)
    lhs = jnp.pad(lhs, ((0, chunks * size - inputs.rows), (0, 0)))
    starts, ends = matrix_bounds(inputs)
    first = size * jnp.arange(chunks)
    meet = (starts[:, None] < first + size) & (ends[:, None] > first) & (starts < ends)[:, None]
    # A pair that does not exist has a matrix that does not, which owns no row.
    pairs = jnp.nonzero(meet, size=chunks + inputs.matrices, fill_value=(inputs.matrices, 0))

    def add(out: Any, pair: tuple[Any, ...]) -> tuple[Any, None]:
        matrix, chunk = pair
        begin = chunk * size
        row = begin + jnp.arange(size)[:, None]
        own = (row >= starts[matrix]) & (row < ends[matrix]) & (matrix < inputs.matrices)
        # Selected on both sides, so that neither a value nor a cotangent of another group's row counts as 0 · NaN.
        rows = jnp.where(own, jax.lax.dynamic_slice_in_dim(lhs, begin, size), 0)
        product = jnp.matmul(rows, rhs[matrix], precision=inputs.precision)
        kept = jax.lax.dynamic_slice_in_dim(out, begin, size)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, kept), begin, 0), None

    zeros = jnp.matmul(lhs[:, :0], rhs[0, :0])  # of the type of a product, whatever the mesh
    out, _ = jax.lax.scan(add, vary_over(varying_axes(inputs), zeros), pairs)
    return out[: inputs.rows]


def _scaled(array: jax.Array, scale: Any, axes: tuple[int, ...]) -> jax.Array:
    if scale is None:
        return array
    scale = scale.astype(array.dtype)
    return array * (expanded(scale, array.shape, axes) if scale.ndim else scale)
