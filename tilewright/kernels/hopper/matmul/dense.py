"""A single matmul on Hopper."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.matmul.kernel import matmul_kernel
from tilewright.kernels.hopper.matmul.operands import OperandLayout, atomic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import MatmulPlan
from tilewright.kernels.hopper.matmul.schedule import DenseSchedule


def dense_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    params: MatmulParams,
    num_sms: int,
) -> jax.Array:
    """``lhs · rhs`` of 16-bit operands, with float32 sums.

    Args:
      lhs: ``[m, k]``, or ``[k, m]`` with ``transpose_lhs``.
      rhs: ``[k, n]``, or ``[n, k]`` with ``transpose_rhs``.
    """
    k, m = lhs.shape if transpose_lhs else lhs.shape[::-1]
    n = rhs.shape[0 if transpose_rhs else 1]
    out = jax.ShapeDtypeStruct((m, n), out_dtype or lhs.dtype)
    # Both or none: wgmma takes a tile in panels with another one of the same kind.
    panelled = not (atomic(lhs.shape, lhs.dtype) and atomic(rhs.shape, rhs.dtype))
    layouts = (
        OperandLayout(lhs.dtype, transpose_lhs, panelled=panelled),
        OperandLayout(rhs.dtype, not transpose_rhs, panelled=panelled),
    )
    plan = MatmulPlan(params, layouts[0], layouts[1:], out.dtype)
    schedule = DenseSchedule(m, n, -(-k // layouts[0].block_k), params)
    (result,) = matmul_kernel(
        lhs, [rhs], [out], plan=plan, schedule=schedule, epilogue=lambda sums: sums, num_sms=num_sms
    )
    return result
