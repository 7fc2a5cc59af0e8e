"""The Hopper backend of the gated grouped matmul."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs
from tilewright.kernels.grouped_matmul.groups import matrix_bounds
from tilewright.kernels.grouped_matmul.hopper.params import HopperGatedBackwardParams
from tilewright.kernels.grouped_matmul.hopper.products import (
    outer_products,
    reduction_plan,
    rows_by_matrices,
    rows_plan,
)
from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.gate import GateEpilogue
from tilewright.kernels.hopper.matmul.heuristics import reduction_candidates, rows_candidates
from tilewright.kernels.hopper.matmul.kernel import Factors
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.numerics.activations import gated_gradients, kept_apart
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction

type Params = MatmulParams | HopperGatedBackwardParams


class HopperGatedGroupedMatmul(Implementation[GatedInputs, Any, MatmulParams, HopperGatedBackwardParams]):
    """Serves 16-bit operands of one dtype whose rows begin at multiples of 16 bytes.

    The activation is in the epilogue of one kernel, and both gradients of lhs in the accumulator of another.
    """

    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperGatedBackwardParams
    serves: ClassVar[frozenset[str]] = frozenset({"group_offset"})

    def reasons(self, inputs: GatedInputs, device: Device, direction: Direction) -> list[str]:
        dtypes = {"lhs": inputs.lhs.dtype, "gate": inputs.gate.dtype, "up": inputs.up.dtype}
        sizes = {"k": inputs.k, "n": inputs.n}
        return device_reasons(device) + operand_reasons(dtypes, inputs.out_dtype, sizes)

    def candidates(self, inputs: GatedInputs, device: Device, direction: Direction) -> Iterable[Params]:
        sms, groups = num_sms(device), inputs.groups
        if direction == "forward":
            return rows_candidates(inputs.rows, groups, inputs.n, inputs.k, sms, accumulators=2)
        # Both products in one kernel: twice as many steps.
        of_lhs = rows_candidates(inputs.rows, groups, inputs.k, 2 * inputs.n, sms)
        of_rhs = reduction_candidates(inputs.rows, inputs.matrices, inputs.k, inputs.n, sms)
        count = max(len(of_lhs), len(of_rhs))
        return [HopperGatedBackwardParams(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in range(count)]

    def config_reasons(self, inputs: GatedInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        return plan_reasons(lambda: self.footprints(inputs, device, direction, params))

    def footprints(
        self, inputs: GatedInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        shape, dtype = (inputs.matrices, inputs.k, inputs.n), inputs.lhs.dtype
        if isinstance(params, MatmulParams):
            plans = [rows_plan(dtype, shape, params, dtype, k_first=True, count=2)]
        else:
            plans = [rows_plan(dtype, shape, params.lhs, dtype, k_first=False)]
            plans.append(reduction_plan(dtype, params.rhs, dtype))
        return [plan.footprint(num_sms(device)) for plan in plans]

    def forward(self, inputs: GatedInputs, params: MatmulParams) -> tuple[jax.Array | None, ...]:
        keeps, shape = inputs.keeps, inputs.out_shape
        if inputs.is_empty:
            results = [jnp.zeros(shape, inputs.out_dtype)] * (3 if keeps else 1)
        else:
            results = rows_by_matrices(
                [Factors(inputs.lhs, (inputs.gate, inputs.up))],
                bounds_of(inputs),
                params,
                inputs.out_dtype,
                k_first=True,
                has_offset=inputs.group_offset is not None,
                results=3 if keeps else 1,
                epilogue=GateEpilogue(inputs.activation, keeps),
            )
        return tuple(results) if keeps else (results[0], None, None)

    def backward(
        self, inputs: GatedInputs, results: Any, cotangents: jax.Array, params: HopperGatedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs, gate and up, of those that are used, from both pre-activations."""
        if inputs.is_empty:
            return {name: jnp.zeros_like(getattr(inputs, name)) for name in ("lhs", "gate", "up")}
        if params.recompute is not None:
            results = self.forward(kept_apart(inputs, cotangents), params.recompute)[1:]
        # By XLA, in one pass over memory: each of the two is an operand of two matmuls.
        of_gate, of_up = gated_gradients(inputs.activation, results[0], results[1], cotangents, jnp.float32)
        bounds = bounds_of(inputs)
        gradients = {}
        if inputs.wants("lhs"):
            (gradients["lhs"],) = rows_by_matrices(
                [Factors(of_gate, (inputs.gate,)), Factors(of_up, (inputs.up,))],
                bounds,
                params.lhs,
                inputs.lhs.dtype,
                k_first=False,
                has_offset=inputs.group_offset is not None,
            )
        for name, gradient, matrices in (("gate", of_gate, inputs.gate), ("up", of_up, inputs.up)):
            if inputs.wants(name):
                gradients[name] = outer_products(inputs.lhs, gradient, bounds, params.rhs, matrices.dtype)
        return gradients


def bounds_of(inputs: GatedInputs) -> tuple[jax.Array, jax.Array]:
    """First row of each matrix, and the row behind its last."""
    return matrix_bounds(inputs.group_sizes, inputs.group_offset, inputs.lhs.shape[0], inputs.gate.shape[0])
