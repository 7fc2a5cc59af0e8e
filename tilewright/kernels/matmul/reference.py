"""The oracle: each matmul by its definition, in ``jax.numpy``."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.groups import matrix_bounds
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.scales import expanded
from tilewright.kernels.numerics.activations import gated


def matmul_reference(inputs: MatmulInputs) -> Any:
    """The result in float32, or in float64 if an operand is; differentiable."""
    wide = jnp.dtype(jnp.float32)
    for each in inputs.operands.values():
        wide = jnp.promote_types(wide, each.dtype)
    products = [_product(inputs.product(name), wide) for name in inputs.weights]
    return products[0] if inputs.activation is None else gated(inputs.activation, *products)


def _product(inputs: MatmulInputs, dtype: Any) -> Any:
    lhs = _scaled(inputs.lhs.astype(dtype), inputs.lhs_scale, (1,))
    rhs = _scaled(inputs.rhs.astype(dtype), inputs.rhs_scale, (1, 2))
    rhs = rhs.swapaxes(-1, -2) if inputs.transpose_rhs else rhs
    if inputs.group_sizes is None:
        return jnp.matmul(lhs.T if inputs.transpose_lhs else lhs, rhs, precision=inputs.precision)
    starts, ends = matrix_bounds(inputs)
    row = jnp.arange(inputs.rows, dtype=jnp.int32)[:, None]

    def add(matrix: Any, out: Any) -> Any:
        own = (row >= starts[matrix]) & (row < ends[matrix])
        # Selected on both sides, so that neither a value nor a cotangent of another group's row counts as 0 · NaN.
        product = jnp.matmul(jnp.where(own, lhs, 0), rhs[matrix], precision=inputs.precision)
        return jnp.where(own, product, out)

    # One matrix after another meets all rows, of which those of other groups are zeros.
    out = jnp.zeros(inputs.out_shape, dtype)
    return out if inputs.is_empty else jax.lax.fori_loop(0, inputs.matrices, add, out)


def _scaled(array: jax.Array, scale: Any, axes: tuple[int, ...]) -> jax.Array:
    if scale is None:
        return array
    scale = scale.astype(array.dtype)
    return array * (expanded(scale, array.shape, axes) if scale.ndim else scale)
