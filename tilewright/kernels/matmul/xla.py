"""The dense matmuls in plain XLA: the backends for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.inputs import GluInputs, GluResults, MatmulInputs
from tilewright.kernels.matmul.params import XlaGluBackwardParams
from tilewright.kernels.numerics.activations import gated, gated_gradients, kept_apart
from tilewright.kernels.numerics.dots import accumulator, dot
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaMatmul(Implementation[MatmulInputs, Any, FwdParams, BwdParams]):
    """Serves every call and has no params."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"transpose_lhs", "transpose_rhs", "precision"})

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: MatmulInputs, params: FwdParams) -> jax.Array:
        wide = accumulator(inputs.lhs.dtype, inputs.rhs.dtype, inputs.out_dtype)
        return dot(inputs.lhs, inputs.rhs, inputs.k_axes, inputs.precision, wide).astype(inputs.out_dtype)

    def backward(
        self, inputs: MatmulInputs, results: object, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        lhs, rhs, precision = inputs.lhs, inputs.rhs, inputs.precision
        wide = accumulator(lhs.dtype, rhs.dtype, inputs.out_dtype)
        k_axis, rhs_axis = inputs.k_axes
        gradients = {}
        if inputs.wants("lhs"):
            if inputs.transpose_lhs:
                gradients["lhs"] = dot(rhs, cotangents, (1 - rhs_axis, 1), precision, wide)
            else:
                gradients["lhs"] = dot(cotangents, rhs, (cotangents.ndim - 1, 1 - rhs_axis), precision, wide)
        if inputs.wants("rhs"):
            of_lhs = tuple(axis for axis in range(lhs.ndim) if axis != k_axis)
            left, right = (lhs, of_lhs), (cotangents, tuple(range(cotangents.ndim - 1)))
            if inputs.transpose_rhs:
                left, right = right, left
            gradients["rhs"] = dot(left[0], right[0], (left[1], right[1]), precision, wide)
        return {name: gradient.astype(inputs.arrays[name].dtype) for name, gradient in gradients.items()}


class XlaGlu(Implementation[GluInputs, Any, FwdParams, XlaGluBackwardParams]):
    """Serves every call."""

    platform: ClassVar[Platform] = Platform.XLA
    backward_params: ClassVar[type] = XlaGluBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def reasons(self, inputs: GluInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(
        self, inputs: GluInputs, device: Device, direction: Direction
    ) -> Iterable[FwdParams | XlaGluBackwardParams]:
        return [FwdParams() if direction == "forward" else XlaGluBackwardParams()]

    def forward(self, inputs: GluInputs, params: FwdParams) -> GluResults:
        wide, last = _accumulator(inputs), inputs.x.ndim - 1
        gate, up = (dot(inputs.x, matrix, (last, 0), None, wide) for matrix in (inputs.gate, inputs.up))
        out = gated(inputs.activation, gate, up)
        return tuple(x.astype(inputs.out_dtype) for x in (out, gate, up))  # type: ignore[return-value]

    def backward(
        self, inputs: GluInputs, results: Any, cotangents: jax.Array, params: XlaGluBackwardParams
    ) -> dict[str, Any]:
        """Gradients of x, gate and up, of those that are used, from both pre-activations."""
        x, wide = inputs.x, _accumulator(inputs)
        if params.recompute:
            results = self.forward(kept_apart(inputs, cotangents), FwdParams())[1:]
        gate, up = results
        d_gate, d_up = gated_gradients(inputs.activation, gate, up, cotangents, wide)
        last, rows = x.ndim - 1, tuple(range(x.ndim - 1))
        gradients = {}
        if inputs.wants("x"):
            parts = (dot(d, matrix, (last, 1), None, wide) for d, matrix in ((d_gate, inputs.gate), (d_up, inputs.up)))
            gradients["x"] = sum(parts, jnp.zeros((), wide)).astype(x.dtype)
        for name, d, matrix in (("gate", d_gate, inputs.gate), ("up", d_up, inputs.up)):
            if inputs.wants(name):
                gradients[name] = dot(x, d, (rows, rows), None, wide).astype(matrix.dtype)
        return gradients


def _accumulator(inputs: GluInputs) -> Any:
    return accumulator(*(x.dtype for x in (inputs.x, inputs.gate, inputs.up)))
