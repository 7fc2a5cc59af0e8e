"""Dense matmuls on Hopper."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.hopper.matmul.epilogue import AsSummed, Epilogue
from tilewright.kernels.hopper.matmul.kernel import Factors, matmul_kernel
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
    out_dtype: DTypeLike | None = None,
    params: MatmulParams,
    num_sms: int,
) -> jax.Array:
    """``lhs · rhs`` of 16-bit operands, with float32 sums.

    Args:
      lhs: ``[m, k]``, or ``[k, m]`` with ``transpose_lhs``.
      rhs: ``[k, n]``, or ``[n, k]`` with ``transpose_rhs``.
    """
    (result,) = dense_products(
        [Factors(lhs, (rhs,))],
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype or lhs.dtype,
        params=params,
        num_sms=num_sms,
    )
    return result


def dense_products(
    products: Sequence[Factors],
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    out_dtype: DTypeLike,
    params: MatmulParams,
    num_sms: int,
    results: int = 1,
    epilogue: Epilogue = AsSummed(),
) -> list[jax.Array]:
    """Sums of products of matrices of one shape, and what an epilogue makes of them: arrays of ``[m, n]``."""
    lhs, rhs = products[0].lhs, products[0].rhs
    k, m = lhs.shape if transpose_lhs else lhs.shape[::-1]
    n = rhs[0].shape[0 if transpose_rhs else 1]
    plan = dense_plan(lhs.dtype, lhs.shape, rhs[0].shape, len(rhs), params, out_dtype, transpose_lhs, transpose_rhs)
    # The last step of each product may hang over the end of K: TMA reads zeros there, which add nothing.
    steps = -(-k // plan.lhs.block_k) * len(products)
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    schedule = DenseSchedule(m, n, steps, plan.tile)
    return matmul_kernel(products, [out] * results, plan=plan, schedule=schedule, epilogue=epilogue, num_sms=num_sms)


def dense_plan(
    dtype: DTypeLike,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    count: int,
    params: MatmulParams,
    out_dtype: DTypeLike,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    panelled: bool = False,
) -> MatmulPlan:
    """The plan of `dense_products`, with so many operands of rhs; ``panelled`` where tiles begin anywhere."""
    dtype = jnp.dtype(dtype)
    # Both or none: wgmma takes a tile in panels with another one of the same kind.
    panelled = panelled or not (atomic(lhs_shape, dtype) and atomic(rhs_shape, dtype))
    lhs = OperandLayout(dtype, transpose_lhs, panelled=panelled)
    rhs = OperandLayout(dtype, not transpose_rhs, panelled=panelled)
    return MatmulPlan(params, lhs, (rhs,) * count, out_dtype)
