"""The grouped matmul in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.xla import products
from tilewright.kernels.grouped_matmul.xla.params import XlaBlockParams, block_rows, candidate_rows
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction


class XlaGroupedMatmul(Implementation[GroupedInputs, Any, XlaBlockParams, XlaBlockParams]):
    """Serves every call, in loops over blocks of rows of one group each."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaBlockParams
    backward_params: ClassVar[type] = XlaBlockParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"group_offset", "lhs_scale", "rhs_scale", "transpose_rhs", "precision"}
    )

    def reasons(self, inputs: GroupedInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, inputs: GroupedInputs, device: Device, direction: Direction) -> XlaBlockParams:
        return XlaBlockParams(block_rows(inputs.rows, inputs.groups, device))

    def candidates(self, inputs: GroupedInputs, device: Device, direction: Direction) -> Iterable[XlaBlockParams]:
        return [XlaBlockParams(rows) for rows in candidate_rows(inputs.rows, inputs.groups, device)]

    def forward(self, inputs: GroupedInputs, params: XlaBlockParams) -> jax.Array:
        if inputs.is_empty:
            return jnp.zeros(inputs.out_shape, inputs.out_dtype)
        return products.forward(inputs, params.block_rows)

    def backward(
        self, inputs: GroupedInputs, results: object, cotangents: jax.Array, params: XlaBlockParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        if inputs.is_empty:
            return {"lhs": jnp.zeros_like(inputs.lhs), "rhs": jnp.zeros_like(inputs.rhs)}
        compute = {"lhs": products.d_lhs, "rhs": products.d_rhs}
        return {
            name: gradient(inputs, cotangents, params.block_rows)
            for name, gradient in compute.items()
            if inputs.wants(name)
        }
