"""The dense matmuls in plain XLA: the backends for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.inputs import GluInputs, GluProblem, GluResults, MatmulInputs, MatmulProblem
from tilewright.kernels.matmul.params import XlaGluBackwardParams
from tilewright.kernels.numerics.activations import gated, gated_gradients, kept_apart
from tilewright.kernels.numerics.dots import accumulator, dot
from tilewright.kernels.op.backend import Implementation, Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaMatmul(Implementation[MatmulInputs, MatmulProblem, Any, FwdParams, BwdParams]):
    """Serves every problem and has no params."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def not_supported_reasons(self, problem: MatmulProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, problem: MatmulProblem, device: Device, direction: Direction) -> FwdParams | BwdParams:
        return FwdParams() if direction == "forward" else BwdParams()

    def candidates(
        self, problem: MatmulProblem, device: Device, direction: Direction
    ) -> Iterable[FwdParams | BwdParams]:
        return ()

    def forward(self, inputs: MatmulInputs, params: FwdParams) -> jax.Array:
        options = inputs.options
        wide = accumulator(inputs.lhs.dtype, inputs.rhs.dtype, options.out_dtype)
        return dot(inputs.lhs, inputs.rhs, inputs.k_axes, options.precision, wide).astype(options.out_dtype)

    def backward(
        self, inputs: MatmulInputs, results: object, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        lhs, rhs, options, gradients = inputs.lhs, inputs.rhs, inputs.options, inputs.gradients
        wide = accumulator(lhs.dtype, rhs.dtype, options.out_dtype)
        k_axis, rhs_axis = inputs.k_axes
        d_lhs = d_rhs = None
        if "lhs" in gradients:
            if options.transpose_lhs:
                d_lhs = dot(rhs, cotangents, (1 - rhs_axis, 1), options.precision, wide)
            else:
                d_lhs = dot(cotangents, rhs, (cotangents.ndim - 1, 1 - rhs_axis), options.precision, wide)
        if "rhs" in gradients:
            of_lhs = tuple(axis for axis in range(lhs.ndim) if axis != k_axis)
            left, right = (lhs, of_lhs), (cotangents, tuple(range(cotangents.ndim - 1)))
            if options.transpose_rhs:
                left, right = right, left
            d_rhs = dot(left[0], right[0], (left[1], right[1]), options.precision, wide)
        return {
            "lhs": None if d_lhs is None else d_lhs.astype(lhs.dtype),
            "rhs": None if d_rhs is None else d_rhs.astype(rhs.dtype),
        }


class XlaGlu(Implementation[GluInputs, GluProblem, Any, FwdParams, XlaGluBackwardParams]):
    """Serves every problem."""

    platform: ClassVar[Platform] = Platform.XLA
    backward_params: ClassVar[type] = XlaGluBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def not_supported_reasons(self, problem: GluProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, problem: GluProblem, device: Device, direction: Direction) -> FwdParams | XlaGluBackwardParams:
        return FwdParams() if direction == "forward" else XlaGluBackwardParams()

    def candidates(
        self, problem: GluProblem, device: Device, direction: Direction
    ) -> Iterable[FwdParams | XlaGluBackwardParams]:
        return ()

    def forward(self, inputs: GluInputs, params: FwdParams) -> GluResults:
        wide, last = _accumulator(inputs), inputs.x.ndim - 1
        gate, up = (dot(inputs.x, matrix, (last, 0), None, wide) for matrix in (inputs.gate, inputs.up))
        out = gated(inputs.options.activation, gate, up)
        return tuple(x.astype(inputs.options.out_dtype) for x in (out, gate, up))  # type: ignore[return-value]

    def backward(
        self, inputs: GluInputs, results: Any, cotangents: jax.Array, params: XlaGluBackwardParams
    ) -> dict[str, Any]:
        """Gradients of x, gate and up, of those that are used, from both pre-activations."""
        x, wide = inputs.x, _accumulator(inputs)
        if params.recompute:
            results = self.forward(kept_apart(inputs, cotangents), FwdParams())[1:]
        gate, up = results
        d_gate, d_up = gated_gradients(inputs.options.activation, gate, up, cotangents, wide)
        last, rows = x.ndim - 1, tuple(range(x.ndim - 1))
        gradients: dict[str, Any] = dict.fromkeys(("x", "gate", "up"))
        if "x" in inputs.gradients:
            parts = (dot(d, matrix, (last, 1), None, wide) for d, matrix in ((d_gate, inputs.gate), (d_up, inputs.up)))
            gradients["x"] = sum(parts, jnp.zeros((), wide)).astype(x.dtype)
        for name, d, matrix in (("gate", d_gate, inputs.gate), ("up", d_up, inputs.up)):
            if name in inputs.gradients:
                gradients[name] = dot(x, d, (rows, rows), None, wide).astype(matrix.dtype)
        return gradients


def _accumulator(inputs: GluInputs) -> Any:
    return accumulator(*(x.dtype for x in (inputs.x, inputs.gate, inputs.up)))
