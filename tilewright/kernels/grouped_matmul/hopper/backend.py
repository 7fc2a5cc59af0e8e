"""The Hopper backend of the grouped matmul."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.groups import matrix_bounds
from tilewright.kernels.grouped_matmul.hopper.params import HopperGroupedBackwardParams
from tilewright.kernels.grouped_matmul.hopper.products import (
    outer_products,
    reduction_plan,
    rows_by_matrices,
    rows_plan,
    scales_of,
)
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs, GroupedProblem
from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.matmul.heuristics import reduction_candidates, rows_candidates
from tilewright.kernels.hopper.matmul.kernel import Factors
from tilewright.kernels.hopper.matmul.operands import NARROW_DTYPES, operand_reasons
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.hopper.matmul.scaled import SCALE_BLOCK
from tilewright.kernels.op.backend import Implementation, Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction

type Params = MatmulParams | HopperGroupedBackwardParams


class HopperGroupedMatmul(
    Implementation[GroupedInputs, GroupedProblem, Any, MatmulParams, HopperGroupedBackwardParams]
):
    """Serves 16-bit operands without scales, and forward float8 with them; rows begin at multiples of 16 bytes."""

    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperGroupedBackwardParams

    def not_supported_reasons(self, problem: GroupedProblem, device: Device, direction: Direction) -> list[str]:
        reasons, dtypes = device_reasons(device), {"lhs": problem.lhs_dtype, "rhs": problem.rhs_dtype}
        if _is_narrow(problem):
            reasons += operand_reasons(dtypes, problem.options.out_dtype, {"k": problem.k}, NARROW_DTYPES)
            reasons += operand_reasons({}, problem.options.out_dtype, {"n": problem.n})
            if not problem.options.transpose_rhs:
                reasons.append("wgmma takes float8 operands with K in their rows alone: give rhs as [groups, n, k]")
            return reasons + (["float8 has no gradients here"] if direction == "backward" else [])
        reasons += operand_reasons(dtypes, problem.options.out_dtype, {"k": problem.k, "n": problem.n})
        if direction == "backward" and problem.options.out_dtype != problem.lhs_dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {problem.options.out_dtype}")
        if {problem.lhs_scale, problem.rhs_scale} != {"none"}:
            reasons.append("its kernels scale operands of float8 alone")
        return reasons

    def heuristic(self, problem: GroupedProblem, device: Device, direction: Direction) -> Params:
        return next(iter(self.candidates(problem, device, direction)))

    def candidates(self, problem: GroupedProblem, device: Device, direction: Direction) -> Iterable[Params]:
        sms, groups = num_sms(device), problem.groups
        if _is_narrow(problem):
            # A step has 128 bytes of K: of 8-bit elements half as many steps.
            listed = rows_candidates(problem.rows, groups, problem.n, problem.k // 2, sms)
            return [params for params in listed if not self.config_reasons(problem, device, direction, params)]
        if direction == "forward":
            return rows_candidates(problem.rows, groups, problem.n, problem.k, sms)
        of_lhs = rows_candidates(problem.rows, groups, problem.k, problem.n, sms)
        height, width = (problem.n, problem.k) if problem.options.transpose_rhs else (problem.k, problem.n)
        of_rhs = reduction_candidates(problem.rows, problem.matrices, height, width, sms)
        count = max(len(of_lhs), len(of_rhs))
        return [HopperGroupedBackwardParams(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in range(count)]

    def config_reasons(
        self, problem: GroupedProblem, device: Device, direction: Direction, params: Params
    ) -> list[str]:
        if _is_narrow(problem):
            assert isinstance(params, MatmulParams)
            if params.turns or params.block_n % SCALE_BLOCK or params.consumer_rows != WGMMA_M:
                return [f"sums of float8 are of 64 rows and {SCALE_BLOCK} columns each, got {params}"]
        return plan_reasons(lambda: self.footprints(problem, device, direction, params))

    def footprints(
        self, problem: GroupedProblem, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        shape = (problem.matrices, problem.k, problem.n)
        shape = (shape[0], shape[2], shape[1]) if problem.options.transpose_rhs else shape
        dtype = problem.lhs_dtype
        if isinstance(params, MatmulParams):
            k_first = not problem.options.transpose_rhs
            plans = [rows_plan(dtype, shape, params, problem.options.out_dtype, k_first=k_first)]
        else:
            # The gradient of lhs contracts over n: its K is the other dimension of the matrices.
            k_first = problem.options.transpose_rhs
            plans = [rows_plan(dtype, shape, params.lhs, dtype, k_first=k_first)]
            plans.append(reduction_plan(dtype, params.rhs, problem.rhs_dtype))
        return [plan.footprint(num_sms(device)) for plan in plans]

    def forward(self, inputs: GroupedInputs, params: MatmulParams) -> jax.Array:
        if 0 in (*inputs.lhs.shape, *inputs.rhs.shape):
            return jnp.zeros(inputs.out_shape, inputs.options.out_dtype)
        scales = scales_of(inputs, params) if inputs.lhs.dtype.itemsize == 1 else None
        return rows_by_matrices(
            [Factors(inputs.lhs, (inputs.rhs,))],
            bounds_of(inputs),
            params,
            inputs.options.out_dtype,
            k_first=not inputs.options.transpose_rhs,
            has_offset=inputs.group_offset is not None,
            scales=scales,
        )[0]

    def backward(
        self, inputs: GroupedInputs, results: object, cotangents: jax.Array, params: HopperGroupedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        lhs, rhs = inputs.lhs, inputs.rhs
        if 0 in (*lhs.shape, *rhs.shape):
            return {"lhs": jnp.zeros_like(lhs), "rhs": jnp.zeros_like(rhs)}
        bounds, transposed = bounds_of(inputs), inputs.options.transpose_rhs
        gradients: dict[str, Any] = {"lhs": None, "rhs": None}
        if "lhs" in inputs.gradients:
            has_offset = inputs.group_offset is not None
            products = [Factors(cotangents, (rhs,))]
            (gradients["lhs"],) = rows_by_matrices(
                products, bounds, params.lhs, lhs.dtype, k_first=transposed, has_offset=has_offset
            )
        if "rhs" in inputs.gradients:
            # The order that gives the gradient in the layout of rhs.
            left, right = (cotangents, lhs) if transposed else (lhs, cotangents)
            gradients["rhs"] = outer_products(left, right, bounds, params.rhs, rhs.dtype)
        return gradients


def bounds_of(inputs: GroupedInputs) -> tuple[jax.Array, jax.Array]:
    """First row of each matrix, and the row behind its last."""
    return matrix_bounds(inputs.group_sizes, inputs.group_offset, inputs.lhs.shape[0], inputs.rhs.shape[0])


def _is_narrow(problem: GroupedProblem) -> bool:
    return 1 in (problem.lhs_dtype.itemsize, problem.rhs_dtype.itemsize)
