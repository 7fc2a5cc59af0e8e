"""The dense matmuls on Hopper, by ``kernels/hopper/matmul``."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.dense import dense_matmul, dense_plan, dense_products
from tilewright.kernels.hopper.matmul.gate import GateEpilogue
from tilewright.kernels.hopper.matmul.heuristics import dense_candidates
from tilewright.kernels.hopper.matmul.kernel import Factors
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.matmul.inputs import GluInputs, MatmulInputs
from tilewright.kernels.matmul.params import HopperGluBackwardParams, HopperMatmulBackwardParams
from tilewright.kernels.numerics.activations import gated_gradients, kept_apart
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device


class HopperMatmul(Implementation[MatmulInputs, Any, MatmulParams, HopperMatmulBackwardParams]):
    """Serves 16-bit operands of one dtype whose rows begin at multiples of 16 bytes.

    cuBLAS, which XLA calls, is up to 3 % faster where it has a kernel for the shape, so this one runs if it is named or
    was measured as faster.
    """

    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperMatmulBackwardParams
    # Products of 16-bit numbers are exact in float32, so all precisions are the same.
    serves: ClassVar[frozenset[str]] = frozenset({"transpose_lhs", "transpose_rhs", "precision"})

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        sizes = {"n": inputs.n, "k": inputs.k}
        if inputs.transpose_lhs or direction == "backward":
            sizes["rows"] = inputs.rows
        reasons = device_reasons(device)
        dtypes = {"lhs": inputs.lhs.dtype, "rhs": inputs.rhs.dtype}
        reasons += operand_reasons(dtypes, inputs.out_dtype, sizes)
        if direction == "backward" and inputs.out_dtype != inputs.lhs.dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {inputs.out_dtype}")
        return reasons

    def deprioritized(self, inputs: MatmulInputs, device: Device, direction: Direction) -> bool:
        return True

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[Any]:
        sms, (m, n, k) = num_sms(device), (inputs.rows, inputs.n, inputs.k)
        if direction == "forward":
            return dense_candidates(m, n, k, sms)
        height, width = (k, m) if inputs.transpose_lhs else (m, k)
        of_lhs = dense_candidates(height, width, n, sms)
        height, width = (n, k) if inputs.transpose_rhs else (k, n)
        of_rhs = dense_candidates(height, width, m, sms)
        return [HopperMatmulBackwardParams(*each) for each in zip(of_lhs, of_rhs, strict=True)]

    def config_reasons(self, inputs: MatmulInputs, device: Device, direction: Direction, params: Any) -> list[str]:
        return plan_reasons(lambda: self.footprints(inputs, device, direction, params))

    def footprints(
        self, inputs: MatmulInputs, device: Device, direction: Direction, params: Any
    ) -> Sequence[Footprint]:
        each = [params] if isinstance(params, MatmulParams) else [params.lhs, params.rhs]
        dtype, shape = inputs.lhs.dtype, (8, 64)  # of any array: panels take as much memory as whole tiles
        plans = [dense_plan(dtype, shape, shape, 1, one, inputs.out_dtype) for one in each]
        return [plan.footprint(num_sms(device)) for plan in plans]

    def forward(self, inputs: MatmulInputs, params: MatmulParams) -> jax.Array:
        lhs, shape = _rows(inputs), (*inputs.leading, inputs.n)
        if 0 in (*lhs.shape, inputs.n):
            return jnp.zeros(shape, inputs.out_dtype)
        out = dense_matmul(
            lhs,
            inputs.rhs,
            transpose_lhs=inputs.transpose_lhs,
            transpose_rhs=inputs.transpose_rhs,
            out_dtype=inputs.out_dtype,
            params=params,
            num_sms=num_sms(current_device()),
        )
        return out.reshape(shape)

    def backward(
        self, inputs: MatmulInputs, results: object, cotangents: jax.Array, params: HopperMatmulBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        lhs, rhs, rows = inputs.lhs, inputs.rhs, _rows(inputs)
        if 0 in (*lhs.shape, *rhs.shape):
            return {"lhs": jnp.zeros_like(lhs), "rhs": jnp.zeros_like(rhs)}
        d_out, sms = cotangents.reshape(-1, cotangents.shape[-1]), num_sms(current_device())
        gradients = {}
        if inputs.wants("lhs"):
            # d_out · rhsᵀ, or its transpose.
            left, right, flags = d_out, rhs, (False, not inputs.transpose_rhs)
            if inputs.transpose_lhs:
                left, right, flags = rhs, d_out, (inputs.transpose_rhs, True)
            of_lhs = dense_matmul(
                left, right, transpose_lhs=flags[0], transpose_rhs=flags[1], params=params.lhs, num_sms=sms
            )
            gradients["lhs"] = of_lhs.reshape(lhs.shape)
        if inputs.wants("rhs"):
            # lhsᵀ · d_out, or its transpose.
            left, right, flags = rows, d_out, (not inputs.transpose_lhs, False)
            if inputs.transpose_rhs:
                left, right, flags = d_out, rows, (True, inputs.transpose_lhs)
            gradients["rhs"] = dense_matmul(
                left, right, transpose_lhs=flags[0], transpose_rhs=flags[1], params=params.rhs, num_sms=sms
            )
        return gradients


class HopperGlu(Implementation[GluInputs, Any, MatmulParams, HopperGluBackwardParams]):
    """Serves the same; the activation is in the epilogue, and both gradients of x in one accumulator."""

    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    backward_params: ClassVar[type] = HopperGluBackwardParams

    def reasons(self, inputs: GluInputs, device: Device, direction: Direction) -> list[str]:
        dtypes = {"x": inputs.x.dtype, "gate": inputs.gate.dtype, "up": inputs.up.dtype}
        sizes = {"k": inputs.k, "n": inputs.n}
        return device_reasons(device) + operand_reasons(dtypes, inputs.out_dtype, sizes)

    def candidates(self, inputs: GluInputs, device: Device, direction: Direction) -> Iterable[Any]:
        sms, (m, n, k) = num_sms(device), (inputs.rows, inputs.n, inputs.k)
        if direction == "forward":
            return dense_candidates(m, n, k, sms, accumulators=2)
        pairs = zip(dense_candidates(m, k, 2 * n, sms), dense_candidates(k, n, m, sms), strict=True)
        return [HopperGluBackwardParams(*each) for each in pairs]

    def config_reasons(self, inputs: GluInputs, device: Device, direction: Direction, params: Any) -> list[str]:
        return plan_reasons(lambda: self.footprints(inputs, device, direction, params))

    def footprints(self, inputs: GluInputs, device: Device, direction: Direction, params: Any) -> Sequence[Footprint]:
        # The shape of any array: panels take as much memory as whole tiles.
        dtype, shape = inputs.x.dtype, (8, 64)
        each = [(params, 2)] if isinstance(params, MatmulParams) else [(params.x, 1), (params.matrices, 1)]
        plans = [dense_plan(dtype, shape, shape, count, one, inputs.out_dtype) for one, count in each]
        return [plan.footprint(num_sms(device)) for plan in plans]

    def forward(self, inputs: GluInputs, params: MatmulParams) -> tuple[jax.Array | None, ...]:
        x, keeps = inputs.x, inputs.keeps
        shape, count = inputs.out_shape, 3 if keeps else 1
        if 0 in (*x.shape, *inputs.gate.shape):
            results = [jnp.zeros(shape, inputs.out_dtype)] * count
        else:
            results = dense_products(
                [Factors(x.reshape(-1, x.shape[-1]), (inputs.gate, inputs.up))],
                out_dtype=inputs.out_dtype,
                params=params,
                num_sms=num_sms(current_device()),
                results=count,
                epilogue=GateEpilogue(inputs.activation, keeps),
            )
        out = tuple(each.reshape(shape) for each in results)
        return out if keeps else (out[0], None, None)

    def backward(
        self, inputs: GluInputs, results: Any, cotangents: jax.Array, params: HopperGluBackwardParams
    ) -> dict[str, Any]:
        """Gradients of x, gate and up, of those that are used, from both pre-activations."""
        if 0 in (*inputs.x.shape, *inputs.gate.shape):
            return {name: jnp.zeros_like(getattr(inputs, name)) for name in ("x", "gate", "up")}
        if params.recompute is not None:
            results = self.forward(kept_apart(inputs, cotangents), params.recompute)[1:]
        # By XLA, in one pass over memory: each of the two is an operand of two matmuls.
        found = gated_gradients(inputs.activation, results[0], results[1], cotangents, jnp.float32)
        d_gate, d_up = (each.reshape(-1, each.shape[-1]) for each in found)
        x, sms = inputs.x.reshape(-1, inputs.x.shape[-1]), num_sms(current_device())
        gradients = {}
        if inputs.wants("x"):
            products = [Factors(d_gate, (inputs.gate,)), Factors(d_up, (inputs.up,))]
            (of_x,) = dense_products(products, transpose_rhs=True, out_dtype=x.dtype, params=params.x, num_sms=sms)
            gradients["x"] = of_x.reshape(inputs.x.shape)
        for name, gradient in (("gate", d_gate), ("up", d_up)):
            if inputs.wants(name):
                gradients[name] = dense_matmul(x, gradient, transpose_lhs=True, params=params.matrices, num_sms=sms)
        return gradients


def _rows(inputs: MatmulInputs) -> jax.Array:
    """lhs as a matrix."""
    return inputs.lhs if inputs.transpose_lhs else inputs.lhs.reshape(inputs.rows, inputs.k)
