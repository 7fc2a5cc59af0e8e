"""The grouped matmul in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.inputs import GroupedInputs, GroupedProblem
from tilewright.kernels.grouped_matmul.xla import products
from tilewright.kernels.grouped_matmul.xla.params import XlaBlockParams, block_rows, candidate_rows
from tilewright.kernels.op.backend import Implementation, Platform
from tilewright.ops.types import Device, Direction


class XlaGroupedMatmul(Implementation[GroupedInputs, GroupedProblem, Any, XlaBlockParams, XlaBlockParams]):
    """Serves every problem, in loops over blocks of rows of one group each."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaBlockParams
    backward_params: ClassVar[type] = XlaBlockParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def not_supported_reasons(self, problem: GroupedProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, problem: GroupedProblem, device: Device, direction: Direction) -> XlaBlockParams:
        return XlaBlockParams(block_rows(problem.rows, problem.groups, device))

    def candidates(self, problem: GroupedProblem, device: Device, direction: Direction) -> Iterable[XlaBlockParams]:
        return [XlaBlockParams(rows) for rows in candidate_rows(problem.rows, problem.groups, device)]

    def forward(self, inputs: GroupedInputs, params: XlaBlockParams) -> jax.Array:
        if 0 in (*inputs.lhs.shape, *inputs.rhs.shape):
            return jnp.zeros(inputs.out_shape, inputs.options.out_dtype)
        return products.forward(inputs, params.block_rows)

    def backward(
        self, inputs: GroupedInputs, results: object, cotangents: jax.Array, params: XlaBlockParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        if 0 in (*inputs.lhs.shape, *inputs.rhs.shape):
            return {"lhs": jnp.zeros_like(inputs.lhs), "rhs": jnp.zeros_like(inputs.rhs)}
        compute = {"lhs": products.d_lhs, "rhs": products.d_rhs}
        return {
            name: compute[name](inputs, cotangents, params.block_rows) if name in inputs.gradients else None
            for name in compute
        }
