"""The gated linear unit in Triton: the gated grouped matmul with one group, on NVIDIA GPUs from Ampere on."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs
from tilewright.kernels.grouped_matmul.triton.gated import TritonGatedGroupedMatmul
from tilewright.kernels.grouped_matmul.triton.gated_params import (
    GatedParams,
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
)
from tilewright.kernels.matmul.inputs import GluInputs, GluResults
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction

_GROUPED = TritonGatedGroupedMatmul()


class TritonGlu(Implementation[GluInputs, Any, TritonGatedForwardParams, TritonGatedBackwardParams]):
    """Serves float16, bfloat16 and float32 of one dtype.

    It comes behind XLA, whose matmuls are cuBLAS's: it reads the rows once and saves the pass over the pre-activations,
    and nothing has measured yet where that is more.
    """

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonGatedForwardParams
    backward_params: ClassVar[type] = TritonGatedBackwardParams
    late_import: ClassVar[str] = "triton"

    def reasons(self, inputs: GluInputs, device: Device, direction: Direction) -> list[str]:
        return [reason.replace("lhs", "x") for reason in _GROUPED.reasons(_described(inputs), device, direction)]

    def deprioritized(self, inputs: GluInputs, device: Device, direction: Direction) -> bool:
        return True

    def candidates(self, inputs: GluInputs, device: Device, direction: Direction) -> Iterable[GatedParams]:
        return _GROUPED.candidates(_described(inputs), device, direction)

    def footprints(
        self, inputs: GluInputs, device: Device, direction: Direction, params: GatedParams
    ) -> Sequence[Footprint]:
        return _GROUPED.footprints(_described(inputs), device, direction, params)

    def forward(self, inputs: GluInputs, params: TritonGatedForwardParams) -> GluResults:
        results = _GROUPED.forward(_as_one_group(inputs), params)
        out, gate, up = (None if x is None else x.reshape(inputs.out_shape) for x in results)
        assert out is not None
        return out, gate, up

    def backward(
        self, inputs: GluInputs, results: Any, cotangents: jax.Array, params: TritonGatedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of x, gate and up, of those that are used, from both pre-activations."""
        flat = [x.reshape(-1, inputs.n) for x in results]
        found = _GROUPED.backward(_as_one_group(inputs), flat, cotangents.reshape(-1, inputs.n), params)
        found = {"x" if name == "lhs" else name: gradient for name, gradient in found.items()}
        return {name: gradient.reshape(inputs.arrays[name].shape) for name, gradient in found.items()}


def _as_one_group(inputs: GluInputs) -> GatedInputs:
    rows = inputs.x.reshape(-1, inputs.k) if inputs.x.size else jnp.zeros((0, inputs.k), inputs.x.dtype)
    gate, up = inputs.gate[None], inputs.up[None]
    return _of_one_group(inputs, rows, gate, up, jnp.full((1,), rows.shape[0], jnp.int32))


def _described(inputs: GluInputs) -> GatedInputs:
    """The same without arrays."""
    rows = jax.ShapeDtypeStruct((inputs.rows, inputs.k), inputs.x.dtype)
    gate, up = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (inputs.gate, inputs.up))
    return _of_one_group(inputs, rows, gate, up, jax.ShapeDtypeStruct((1,), jnp.int32))


def _of_one_group(inputs: GluInputs, lhs: Any, gate: Any, up: Any, sizes: Any) -> GatedInputs:
    wanted = None if inputs.wanted is None else frozenset("lhs" if name == "x" else name for name in inputs.wanted)
    return GatedInputs(lhs, gate, up, sizes, inputs.out_dtype, inputs.activation, keeps=inputs.keeps, wanted=wanted)
