"""The oracle: each group's matmul by its definition, in ``jax.numpy``."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.grouped_matmul.groups import matrix_bounds
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.scales import expanded


def grouped_matmul_reference(inputs: GroupedInputs, compute_dtype: DTypeLike | None = None) -> Any:
    """The result in ``compute_dtype``: float32 by default, float64 if an operand is; differentiable.

    One matrix after another meets all rows, of which those of other groups are zeros.
    """
    wide = jnp.promote_types(jnp.promote_types(inputs.lhs.dtype, jnp.float32), inputs.rhs.dtype)
    dtype = jnp.dtype(compute_dtype or wide)
    lhs, rhs = inputs.lhs.astype(dtype), inputs.rhs.astype(dtype)
    if inputs.lhs_scale is not None:
        scale = inputs.lhs_scale.astype(dtype)
        lhs = lhs * (expanded(scale, lhs.shape, (1,)) if scale.ndim else scale)
    if inputs.rhs_scale is not None:
        scale = inputs.rhs_scale.astype(dtype)
        rhs = rhs * (expanded(scale, rhs.shape, (1, 2)) if scale.ndim else scale)
    if inputs.transpose_rhs:
        rhs = rhs.transpose(0, 2, 1)
    rows, matrices = lhs.shape[0], rhs.shape[0]
    starts, ends = matrix_bounds(inputs.group_sizes, inputs.group_offset, rows, matrices)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def add(matrix: Any, out: Any) -> Any:
        own = (row >= starts[matrix]) & (row < ends[matrix])
        # Selected on both sides, so that neither a value nor a cotangent of another group's row counts as 0 · NaN.
        product = jnp.matmul(jnp.where(own, lhs, 0), rhs[matrix], precision=inputs.precision)
        return jnp.where(own, product, out)

    out = jnp.zeros((rows, rhs.shape[2]), dtype)
    return out if 0 in (*lhs.shape, *rhs.shape) else jax.lax.fori_loop(0, matrices, add, out)
