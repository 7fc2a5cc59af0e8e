"""The three matmuls of a grouped matmul on Hopper, each a call of the matmul kernel with a schedule of its own."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.grouped_matmul.groups import row_segments, row_tiles
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.scales import by_blocks, factor
from tilewright.kernels.hopper.device import num_sms
from tilewright.kernels.hopper.matmul.epilogue import AsSummed, Epilogue
from tilewright.kernels.hopper.matmul.kernel import Factors, matmul_kernel
from tilewright.kernels.hopper.matmul.operands import OperandLayout, atomic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import MatmulPlan
from tilewright.kernels.hopper.matmul.scaled import SCALE_BLOCK, Scales
from tilewright.kernels.hopper.matmul.schedule import RaggedReductionSchedule, RaggedRowsSchedule
from tilewright.ops.utils.device import current_device


def rows_by_matrices(
    products: Sequence[Factors],
    bounds: tuple[jax.Array, jax.Array],
    params: MatmulParams,
    out_dtype: DTypeLike,
    *,
    k_first: bool,
    has_offset: bool,
    results: int = 1,
    epilogue: Epilogue = AsSummed(),
    scales: Scales | None = None,
) -> list[jax.Array]:
    """Rows times their group's matrix, summed over the products; zeros for rows without one.

    Args:
      products: rows, ``[rows, k]``, and matrices, each of which gives the epilogue an accumulator; all of one shape.
      bounds: first row of each matrix, and the row behind its last.
      k_first: whether a matrix is ``[k, n]``, not ``[n, k]``.
      has_offset: whether there may be rows before the first matrix's.
      scales: of operands of 8 bits.
      results: arrays of ``[rows, n]`` that the epilogue gives.
    """
    rows, matrices = products[0]
    size, k = rows.shape
    n = matrices[0].shape[2 if k_first else 1]
    plan = rows_plan(rows.dtype, matrices[0].shape, params, out_dtype, k_first=k_first, count=len(matrices))
    # A tile of rows is a cluster's: its CTAs share the tiles of one matrix.
    block = params.block_m * params.cluster_m
    tiles = row_tiles(*row_segments(*bounds, size, has_offset), size, block)
    steps = -(-k // plan.lhs.block_k) * len(products)
    schedule = RaggedRowsSchedule(*tiles, n, steps, plan.tile)
    out = [jax.ShapeDtypeStruct((size, n), out_dtype)] * results
    sms = num_sms(current_device())
    return matmul_kernel(products, out, plan=plan, schedule=schedule, epilogue=epilogue, num_sms=sms, scales=scales)


def outer_products(
    left: jax.Array, right: jax.Array, bounds: tuple[jax.Array, jax.Array], params: MatmulParams, out_dtype: DTypeLike
) -> jax.Array:
    """``leftᵀ · right`` over the rows of each group, ``[groups, columns of left, columns of right]``."""
    plan = reduction_plan(left.dtype, params, out_dtype)
    m, n = left.shape[1], right.shape[1]
    schedule = RaggedReductionSchedule(*bounds, m, n, plan.lhs.block_k, plan.tile)
    out = jax.ShapeDtypeStruct((bounds[0].shape[0], m, n), out_dtype)
    products, sms = [Factors(left, (right,))], num_sms(current_device())
    (result,) = matmul_kernel(products, [out], plan=plan, schedule=schedule, epilogue=AsSummed(), num_sms=sms)
    return result


def rows_plan(
    dtype: DTypeLike,
    shape: tuple[int, ...],
    params: MatmulParams,
    out_dtype: DTypeLike,
    *,
    k_first: bool,
    count: int = 1,
) -> MatmulPlan:
    """The plan of `rows_by_matrices`, for matrices of this shape."""
    dtype = jnp.dtype(dtype)
    # Rows begin anywhere, so theirs are panels; matrices are whole atoms, or not.
    lhs = OperandLayout(dtype, False)
    rhs = OperandLayout(dtype, k_first, stacked=True, panelled=not (k_first and atomic(shape, dtype)))
    return MatmulPlan(params, lhs, (rhs,) * count, out_dtype)


def reduction_plan(dtype: DTypeLike, params: MatmulParams, out_dtype: DTypeLike) -> MatmulPlan:
    """The plan of `outer_products`: in panels, for a group's rows begin anywhere."""
    # Both [rows, x]: the rows are K, and wgmma transposes both operands as it reads them.
    layout = OperandLayout(jnp.dtype(dtype), True)
    return MatmulPlan(params, layout, (layout,), out_dtype)


def scales_of(inputs: GroupedInputs, params: MatmulParams) -> Scales:
    """The scales of both operands as the kernel reads them, from blocks, numbers or nothing."""
    (rows, k), n = inputs.lhs.shape, inputs.out_shape[1]
    k_blocks, n_blocks = (-(-size // SCALE_BLOCK) for size in (k, n))
    of_rows, of_columns = by_blocks(inputs.lhs_scale), by_blocks(inputs.rhs_scale)
    number = factor(inputs.lhs_scale, inputs.rhs_scale)
    # Ones where a call has none: the kernel takes scales of both operands (`scaled` says why).
    if of_rows is None:
        of_rows = jnp.ones((rows, k_blocks), jnp.float32)
    if of_columns is None:
        of_columns = jnp.ones((inputs.rhs.shape[0], n_blocks, k_blocks), jnp.float32)
    of_columns = of_columns.astype(jnp.float32) * (1 if number is None else number.astype(jnp.float32))
    # A tile's rows beside each other, also where it hangs over the last one.
    padding = [(0, 0), (0, params.block_m * params.cluster_m)]
    return Scales(jnp.pad(of_rows.T.astype(jnp.float32), padding), of_columns)
