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
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.matmul.heuristics import reduction_candidates, rows_candidates
from tilewright.kernels.hopper.matmul.kernel import Factors
from tilewright.kernels.hopper.matmul.operands import NARROW_DTYPES, operand_reasons
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.hopper.matmul.scaled import SCALE_BLOCK
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction

type Params = MatmulParams | HopperGroupedBackwardParams


class HopperGroupedMatmul(Implementation[GroupedInputs, Any, MatmulParams, HopperGroupedBackwardParams]):
    """Serves 16-bit operands without scales, and forward float8 with them; rows begin at multiples of 16 bytes."""

    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperGroupedBackwardParams
    # Products of 8- and of 16-bit numbers are exact in float32, so all precisions are the same.
    serves: ClassVar[frozenset[str]] = frozenset(
        {"group_offset", "lhs_scale", "rhs_scale", "transpose_rhs", "precision"}
    )

    def reasons(self, inputs: GroupedInputs, device: Device, direction: Direction) -> list[str]:
        reasons, dtypes = device_reasons(device), {"lhs": inputs.lhs.dtype, "rhs": inputs.rhs.dtype}
        if _is_narrow(inputs):
            reasons += operand_reasons(dtypes, inputs.out_dtype, {"k": inputs.k}, NARROW_DTYPES)
            reasons += operand_reasons({}, inputs.out_dtype, {"n": inputs.n})
            if not inputs.transpose_rhs:
                reasons.append("wgmma takes float8 operands with K in their rows alone: give rhs as [groups, n, k]")
            return reasons + (["float8 has no gradients here"] if direction == "backward" else [])
        reasons += operand_reasons(dtypes, inputs.out_dtype, {"k": inputs.k, "n": inputs.n})
        if direction == "backward" and inputs.out_dtype != inputs.lhs.dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {inputs.out_dtype}")
        if inputs.has_scales:
            reasons.append("its kernels scale operands of float8 alone")
        return reasons

    def candidates(self, inputs: GroupedInputs, device: Device, direction: Direction) -> Iterable[Params]:
        sms, groups = num_sms(device), inputs.groups
        if _is_narrow(inputs):
            # A step has 128 bytes of K: of 8-bit elements half as many steps.
            listed = rows_candidates(inputs.rows, groups, inputs.n, inputs.k // 2, sms)
            return [params for params in listed if not self.config_reasons(inputs, device, direction, params)]
        if direction == "forward":
            return rows_candidates(inputs.rows, groups, inputs.n, inputs.k, sms)
        of_lhs = rows_candidates(inputs.rows, groups, inputs.k, inputs.n, sms)
        height, width = (inputs.n, inputs.k) if inputs.transpose_rhs else (inputs.k, inputs.n)
        of_rhs = reduction_candidates(inputs.rows, inputs.matrices, height, width, sms)
        count = max(len(of_lhs), len(of_rhs))
        return [HopperGroupedBackwardParams(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in range(count)]

    def config_reasons(self, inputs: GroupedInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        if _is_narrow(inputs):
            assert isinstance(params, MatmulParams)
            if params.turns or params.block_n % SCALE_BLOCK or params.consumer_rows != WGMMA_M:
                return [f"sums of float8 are of 64 rows and {SCALE_BLOCK} columns each, got {params}"]
        return plan_reasons(lambda: self.footprints(inputs, device, direction, params))

    def footprints(
        self, inputs: GroupedInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        shape = (inputs.matrices, inputs.k, inputs.n)
        shape = (shape[0], shape[2], shape[1]) if inputs.transpose_rhs else shape
        dtype = inputs.lhs.dtype
        if isinstance(params, MatmulParams):
            k_first = not inputs.transpose_rhs
            plans = [rows_plan(dtype, shape, params, inputs.out_dtype, k_first=k_first)]
        else:
            # The gradient of lhs contracts over n: its K is the other dimension of the matrices.
            k_first = inputs.transpose_rhs
            plans = [rows_plan(dtype, shape, params.lhs, dtype, k_first=k_first)]
            plans.append(reduction_plan(dtype, params.rhs, inputs.rhs.dtype))
        return [plan.footprint(num_sms(device)) for plan in plans]

    def forward(self, inputs: GroupedInputs, params: MatmulParams) -> jax.Array:
        if inputs.is_empty:
            return jnp.zeros(inputs.out_shape, inputs.out_dtype)
        scales = scales_of(inputs, params) if inputs.lhs.dtype.itemsize == 1 else None
        return rows_by_matrices(
            [Factors(inputs.lhs, (inputs.rhs,))],
            bounds_of(inputs),
            params,
            inputs.out_dtype,
            k_first=not inputs.transpose_rhs,
            has_offset=inputs.group_offset is not None,
            scales=scales,
        )[0]

    def backward(
        self, inputs: GroupedInputs, results: object, cotangents: jax.Array, params: HopperGroupedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        lhs, rhs = inputs.lhs, inputs.rhs
        if inputs.is_empty:
            return {"lhs": jnp.zeros_like(lhs), "rhs": jnp.zeros_like(rhs)}
        bounds, transposed = bounds_of(inputs), inputs.transpose_rhs
        gradients = {}
        if inputs.wants("lhs"):
            has_offset = inputs.group_offset is not None
            products = [Factors(cotangents, (rhs,))]
            (gradients["lhs"],) = rows_by_matrices(
                products, bounds, params.lhs, lhs.dtype, k_first=transposed, has_offset=has_offset
            )
        if inputs.wants("rhs"):
            # The order that gives the gradient in the layout of rhs.
            left, right = (cotangents, lhs) if transposed else (lhs, cotangents)
            gradients["rhs"] = outer_products(left, right, bounds, params.rhs, rhs.dtype)
        return gradients


def bounds_of(inputs: GroupedInputs) -> tuple[jax.Array, jax.Array]:
    """First row of each matrix, and the row behind its last."""
    return matrix_bounds(inputs.group_sizes, inputs.group_offset, inputs.lhs.shape[0], inputs.rhs.shape[0])


def _is_narrow(inputs: GroupedInputs) -> bool:
    return 1 in (inputs.lhs.dtype.itemsize, inputs.rhs.dtype.itemsize)
