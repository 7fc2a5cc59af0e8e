"""Matmuls with weights of few bits in XLA, for every device: the weight in x's dtype, and a matmul."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.numerics.dots import dot
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaWeightOnly(Backend[WeightOnlyInputs, jax.Array, FwdParams, BwdParams]):
    """Serves every call; has no params. The weight is in memory in x's dtype while the matmul runs."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"zeros", "order"})

    def reasons(self, inputs: WeightOnlyInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(
        self, inputs: WeightOnlyInputs, device: Device, direction: Direction
    ) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: WeightOnlyInputs, params: FwdParams) -> jax.Array:
        # XLA compiles no matmul of a gathered operand in bfloat16 for CPUs.
        x = inputs.x if inputs.order is None else lax.optimization_barrier(inputs.ordered)
        product = dot(x, inputs.matrix(x.dtype), (x.ndim - 1, 1), None, inputs.accumulator)
        return product.astype(inputs.out_dtype)

    def backward(
        self, inputs: WeightOnlyInputs, results: Any, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, jax.Array]:
        """Gradients of x, by the transposed weight, and of scales, by that of the weight."""
        gradients, dtype, leading = {}, inputs.x.dtype, tuple(range(cotangents.ndim - 1))
        if inputs.wants("x"):
            matrix = inputs.matrix(dtype)
            d_x = dot(cotangents, matrix, (cotangents.ndim - 1, 0), None, inputs.accumulator).astype(dtype)
            if inputs.order is not None:
                # A sum and not a gather by the inverse: an order may name a column twice.
                d_x = jnp.zeros_like(d_x).at[..., inputs.order].add(d_x)
            gradients["x"] = d_x
        if "scales" in inputs.gradients:
            d_matrix = dot(cotangents, inputs.ordered, (leading, leading), None, inputs.accumulator)
            wide = d_matrix.dtype
            _, pull_back = jax.vjp(lambda scales: inputs.replace(scales=scales).matrix(wide), inputs.scales)
            (gradients["scales"],) = pull_back(d_matrix)
        return gradients
