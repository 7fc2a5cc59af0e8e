"""The Hopper backend of the grouped matmul."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.footprint import Footprint
from tilewright.kernels.grouped_matmul.groups import matrix_bounds
from tilewright.kernels.grouped_matmul.hopper.heuristics import rows_candidates, reduction_candidates
from tilewright.kernels.grouped_matmul.hopper.params import HopperGroupedBackwardParams
from tilewright.kernels.grouped_matmul.hopper.products import (
    outer_products,
    reduction_plan,
    rows_by_matrices,
    rows_plan,
)
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs, GroupedProblem
from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.limits import TMA_STRIDE_BYTES, WARPGROUP_THREADS
from tilewright.kernels.hopper.matmul.kernel import Factors
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.registry import Implementation, Platform
from tilewright.ops.types import Device, Direction

DTYPES = ("bfloat16", "float16")
RESULTS = (*DTYPES, "float32")

type Params = MatmulParams | HopperGroupedBackwardParams


class HopperGroupedMatmul(
    Implementation[GroupedInputs, GroupedProblem, Any, MatmulParams, HopperGroupedBackwardParams]
):
    """Serves 16-bit operands without scales whose rows begin at multiples of 16 bytes."""

    platform: ClassVar[Platform] = Platform.PALLAS
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperGroupedBackwardParams

    def not_supported_reasons(self, problem: GroupedProblem, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device)
        for name, dtype in (("lhs", problem.lhs_dtype), ("rhs", problem.rhs_dtype)):
            if dtype.name not in DTYPES:
                reasons.append(f"{name} must be one of {DTYPES}, got {dtype}")
        if problem.lhs_dtype != problem.rhs_dtype:
            reasons.append(f"lhs and rhs must have one dtype, got {problem.lhs_dtype} and {problem.rhs_dtype}")
        if problem.options.out_dtype not in RESULTS:
            reasons.append(f"the result must be one of {RESULTS}, got {problem.options.out_dtype}")
        if direction == "backward" and problem.options.out_dtype != problem.lhs_dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {problem.options.out_dtype}")
        if {problem.lhs_scale, problem.rhs_scale} != {"none"}:
            reasons.append("its kernels have no scales")
        elements = TMA_STRIDE_BYTES // problem.lhs_dtype.itemsize
        for name, size in (("k", problem.k), ("n", problem.n)):
            if size % elements:
                reasons.append(f"TMA needs rows at multiples of {TMA_STRIDE_BYTES} bytes, got {name}={size}")
        return reasons

    def heuristic(self, problem: GroupedProblem, device: Device, direction: Direction) -> Params:
        return next(iter(self.candidates(problem, device, direction)))

    def candidates(self, problem: GroupedProblem, device: Device, direction: Direction) -> Iterable[Params]:
        sms = num_sms(device)
        mean_rows = problem.rows / max(problem.groups, 1)
        if direction == "forward":
            return rows_candidates(problem.rows, mean_rows, problem.n, problem.k, problem.options.out_dtype, sms)
        of_lhs = rows_candidates(problem.rows, mean_rows, problem.k, problem.n, problem.lhs_dtype.name, sms)
        height, width = (problem.n, problem.k) if problem.options.transpose_rhs else (problem.k, problem.n)
        of_rhs = reduction_candidates(problem.matrices, mean_rows, height, width, problem.rhs_dtype.name, sms)
        count = max(len(of_lhs), len(of_rhs))
        return [HopperGroupedBackwardParams(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in range(count)]

    def config_reasons(
        self, problem: GroupedProblem, device: Device, direction: Direction, params: Params
    ) -> list[str]:
        try:
            self.footprints(problem, device, direction, params)
        except ValueError as error:
            return [str(error)]
        return []

    def footprints(
        self, problem: GroupedProblem, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        shape = (problem.matrices, problem.k, problem.n)
        shape = (shape[0], shape[2], shape[1]) if problem.options.transpose_rhs else shape
        dtype, sms = problem.lhs_dtype, num_sms(device)
        if isinstance(params, MatmulParams):
            k_first = not problem.options.transpose_rhs
            plans = [rows_plan(dtype, shape, params, problem.options.out_dtype, k_first=k_first)]
        else:
            k_first = problem.options.transpose_rhs
            plans = [rows_plan(dtype, shape, params.lhs, dtype, k_first=k_first)]
            plans.append(reduction_plan(dtype, params.rhs, problem.rhs_dtype))
        return [
            Footprint(sms, (plan.params.consumers + 1) * WARPGROUP_THREADS, plan.shared_bytes) for plan in plans
        ]

    def forward(self, inputs: GroupedInputs, params: MatmulParams) -> jax.Array:
        if 0 in (*inputs.lhs.shape, *inputs.rhs.shape):
            return jnp.zeros(inputs.out_shape, inputs.options.out_dtype)
        return rows_by_matrices(
            [Factors(inputs.lhs, (inputs.rhs,))],
            bounds_of(inputs),
            params,
            inputs.options.out_dtype,
            k_first=not inputs.options.transpose_rhs,
            has_offset=inputs.group_offset is not None,
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
            left, right = (cotangents, lhs) if transposed else (lhs, cotangents)
            gradients["rhs"] = outer_products(left, right, bounds, params.rhs, rhs.dtype)
        return gradients


def bounds_of(inputs: GroupedInputs) -> tuple[jax.Array, jax.Array]:
    """First row of each matrix, and the row behind its last."""
    return matrix_bounds(inputs.group_sizes, inputs.group_offset, inputs.lhs.shape[0], inputs.rhs.shape[0])
