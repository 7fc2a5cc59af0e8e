"""The matmuls of one call on Hopper and their gradients, each a call of the kernel with a schedule of its own."""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.hopper.device import num_sms
from tilewright.kernels.hopper.matmul.dense import dense_plan, dense_products
from tilewright.kernels.hopper.matmul.epilogue import AsSummed, Epilogue
from tilewright.kernels.hopper.matmul.gate import GateEpilogue
from tilewright.kernels.hopper.matmul.kernel import Factors, matmul_kernel
from tilewright.kernels.hopper.matmul.operands import OperandLayout, atomic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import MatmulPlan
from tilewright.kernels.hopper.matmul.scaled import SCALE_BLOCK, Scales
from tilewright.kernels.hopper.matmul.schedule import RaggedReductionSchedule, RaggedRowsSchedule, longest_first
from tilewright.kernels.hopper.rows import IndexedRows
from tilewright.kernels.matmul.backend import Products
from tilewright.kernels.matmul.groups import matrix_bounds, row_segments, row_tiles
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.scales import by_blocks, factor
from tilewright.ops.utils.device import current_device

type Rows = jax.Array | IndexedRows
"""``[rows, columns]``, or such rows of an array by their index."""


class HopperProducts(Products, abc.ABC):
    """The products of matrices; those of a sum are in one kernel.

    Attributes:
      params: of the forward kernel, or of both kernels of the backward pass.
    """

    def __init__(self, inputs: MatmulInputs, params: Any) -> None:
        self.inputs = inputs
        self.params = params
        self.lhs = inputs.lhs if inputs.transpose_lhs else inputs.lhs.reshape(-1, inputs.k)
        self.weights = tuple(inputs.weights.values())

    @property
    def epilogue(self) -> Epilogue:
        """It makes the results of the products, each of which is an accumulator."""
        activation = self.inputs.activation
        return AsSummed() if activation is None else GateEpilogue(activation, self.inputs.keeps)

    def rows(self, d_product: jax.Array) -> jax.Array:
        return d_product.reshape(-1, self.inputs.n)


class DenseProducts(HopperProducts):
    """The matmuls of all rows with the same matrices."""

    def forward(self) -> list[jax.Array]:
        return dense_products(
            [Factors(self.lhs, self.weights)],
            transpose_lhs=self.inputs.transpose_lhs,
            transpose_rhs=self.inputs.transpose_rhs,
            out_dtype=self.inputs.out_dtype,
            params=self.params,
            num_sms=num_sms(current_device()),
            results=self.inputs.num_results,
            epilogue=self.epilogue,
        )

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        # d_out · rhsᵀ, or its transpose.
        transposed, pairs = self.inputs.transpose_rhs, zip(d_products, self.weights, strict=True)
        if self.inputs.transpose_lhs:
            return _dense([Factors(weight, (d,)) for d, weight in pairs], (transposed, True), self.params.lhs)
        return _dense([Factors(d, (weight,)) for d, weight in pairs], (False, not transposed), self.params.lhs)

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        # lhsᵀ · d_out, or its transpose.
        transposed = self.inputs.transpose_lhs
        if self.inputs.transpose_rhs:
            return _dense([Factors(d_product, (self.lhs,))], (True, transposed), self.params.rhs)
        return _dense([Factors(self.lhs, (d_product,))], (not transposed, False), self.params.rhs)


class GroupedProducts(HopperProducts):
    """The matmuls of rows in groups."""

    @functools.cached_property
    def bounds(self) -> tuple[jax.Array, jax.Array]:
        return matrix_bounds(self.inputs)

    def forward(self) -> list[jax.Array]:
        inputs = self.inputs
        scales = scales_of(inputs, self.params) if inputs.lhs.dtype.itemsize == 1 else None
        return rows_by_matrices(
            [Factors(_indexed(self.lhs, inputs.row_index), self.weights)],
            self.bounds,
            self.params,
            inputs.out_dtype,
            k_first=not inputs.transpose_rhs,
            has_offset=inputs.group_offset is not None,
            fills=inputs.fills,
            results=self.inputs.num_results,
            epilogue=self.epilogue,
            scales=scales,
        )

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        inputs = self.inputs
        rows = [_indexed(d, inputs.cotangent_index) for d in d_products]
        (gradient,) = rows_by_matrices(
            [Factors(d, (weight,)) for d, weight in zip(rows, self.weights, strict=True)],
            self.bounds,
            self.params.lhs,
            inputs.lhs.dtype,
            k_first=inputs.transpose_rhs,
            has_offset=inputs.group_offset is not None,
            fills=inputs.fills,
        )
        return gradient

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        inputs = self.inputs
        pair = _indexed(self.lhs, inputs.row_index), _indexed(d_product, inputs.cotangent_index)
        left, right = pair[::-1] if inputs.transpose_rhs else pair
        return outer_products(left, right, self.bounds, self.params.rhs, inputs.weights[name].dtype)


def plans_of(inputs: MatmulInputs, params: Any) -> list[MatmulPlan]:
    """The plans of the kernels of a config, forward's or backward's; for a recomputed forward pass none."""
    dtype, is_forward, count = inputs.lhs.dtype, isinstance(params, MatmulParams), len(inputs.weights)
    if inputs.group_sizes is None:
        each = [(params, count)] if is_forward else [(params.lhs, 1), (params.rhs, 1)]
        any_shape = (8, 64)  # panels take as much memory as whole tiles
        return [dense_plan(dtype, any_shape, any_shape, number, one, inputs.out_dtype) for one, number in each]
    shape, k_first = inputs.rhs.shape, not inputs.transpose_rhs
    if is_forward:
        indexed = inputs.row_index is not None
        return [rows_plan(dtype, shape, params, inputs.out_dtype, k_first=k_first, count=count, indexed=indexed)]
    # The gradient of lhs contracts over n: its K is the other dimension of the matrices.
    indexed = inputs.cotangent_index is not None
    of_lhs = rows_plan(dtype, shape, params.lhs, dtype, k_first=not k_first, indexed=indexed)
    return [of_lhs, reduction_plan(dtype, params.rhs, inputs.rhs.dtype, indexed_factors(inputs))]


class IndexedFactors(NamedTuple):
    """True for each operand of a sum of outer products whose rows an index names."""

    left: bool = False
    right: bool = False


def indexed_factors(inputs: MatmulInputs) -> IndexedFactors:
    """The operands of the gradient of a weight whose rows an index names."""
    pair = inputs.row_index is not None, inputs.cotangent_index is not None
    return IndexedFactors(*(pair[::-1] if inputs.transpose_rhs else pair))


def _indexed(rows: jax.Array, index: jax.Array | None) -> Rows:
    return rows if index is None else IndexedRows(rows, index)


def _dense(products: Sequence[Factors], transposes: tuple[bool, bool], params: MatmulParams) -> jax.Array:
    (result,) = dense_products(
        products,
        transpose_lhs=transposes[0],
        transpose_rhs=transposes[1],
        out_dtype=products[0].lhs.dtype,
        params=params,
        num_sms=num_sms(current_device()),
    )
    return result


def rows_by_matrices(
    products: Sequence[Factors],
    bounds: tuple[jax.Array, jax.Array],
    params: MatmulParams,
    out_dtype: DTypeLike,
    *,
    k_first: bool,
    has_offset: bool,
    fills: bool = True,
    results: int = 1,
    epilogue: Epilogue = AsSummed(),
    scales: Scales | None = None,
) -> list[jax.Array]:
    """Rows times their group's matrix, summed over the products; zeros for rows without one.

    Args:
      products: rows, ``[rows, k]`` or `IndexedRows`, and matrices, each of which gives the epilogue an accumulator; all
        of one shape.
      bounds: first row of each matrix, and the row behind its last.
      k_first: whether a matrix is ``[k, n]``, not ``[n, k]``.
      has_offset: whether there may be rows before the first matrix's.
      fills: whether rows without a matrix get zeros; else they may hold anything.
      scales: of operands of 8 bits.
      results: arrays of ``[rows, n]`` that the epilogue gives.
    """
    rows, matrices = products[0]
    size, k = rows.shape
    n = matrices[0].shape[2 if k_first else 1]
    shape, count, indexed = matrices[0].shape, len(matrices), isinstance(rows, IndexedRows)
    plan = rows_plan(rows.dtype, shape, params, out_dtype, k_first=k_first, count=count, indexed=indexed)
    # A tile of rows is a cluster's: its CTAs share the tiles of one matrix.
    block = params.block_m * params.cluster_m
    tiles = row_tiles(*row_segments(*bounds, size, has_offset, fills), size, block)
    steps = -(-k // plan.lhs.block_k) * len(products)
    schedule = RaggedRowsSchedule(*tiles, n, steps, plan.tile)
    out = [jax.ShapeDtypeStruct((size, n), out_dtype)] * results
    sms = num_sms(current_device())
    return matmul_kernel(products, out, plan=plan, schedule=schedule, epilogue=epilogue, num_sms=sms, scales=scales)


def outer_products(
    left: Rows, right: Rows, bounds: tuple[jax.Array, jax.Array], params: MatmulParams, out_dtype: DTypeLike
) -> jax.Array:
    """``leftᵀ · right`` over the rows of each group, ``[groups, columns of left, columns of right]``."""
    indexed = IndexedFactors(*(isinstance(each, IndexedRows) for each in (left, right)))
    plan = reduction_plan(left.dtype, params, out_dtype, indexed)
    m, n = left.shape[1], right.shape[1]
    schedule = RaggedReductionSchedule(longest_first(*bounds), *bounds, m, n, plan.lhs.block_k, plan.tile)
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
    indexed: bool = False,
) -> MatmulPlan:
    """The plan of `rows_by_matrices`, for matrices of this shape."""
    dtype = jnp.dtype(dtype)
    # Rows begin anywhere, so theirs are panels; matrices are whole atoms, or not.
    lhs = OperandLayout(dtype, False, indexed=indexed)
    rhs = OperandLayout(dtype, k_first, stacked=True, panelled=not (k_first and atomic(shape, dtype)))
    return MatmulPlan(params, lhs, (rhs,) * count, out_dtype)


def reduction_plan(
    dtype: DTypeLike, params: MatmulParams, out_dtype: DTypeLike, indexed: IndexedFactors = IndexedFactors()
) -> MatmulPlan:
    """The plan of `outer_products`: in panels, for a group's rows begin anywhere."""
    # Both [rows, x]: the rows are K, and wgmma transposes both operands as it reads them.
    left, right = (OperandLayout(jnp.dtype(dtype), True, indexed=each) for each in indexed)
    return MatmulPlan(params, left, (right,), out_dtype)


def scales_of(inputs: MatmulInputs, params: MatmulParams) -> Scales:
    """The scales of both operands as the kernel reads them, from blocks, numbers or nothing."""
    (rows, k), n = inputs.lhs.shape, inputs.n
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
