"""The gated linear unit in Triton: the gated grouped matmul with one group, on NVIDIA GPUs from Ampere on."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, GatedOptions, GatedProblem
from tilewright.kernels.grouped_matmul.triton.gated import TritonGatedGroupedMatmul
from tilewright.kernels.grouped_matmul.triton.gated_params import (
    GatedParams,
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
)
from tilewright.kernels.matmul.inputs import GluInputs, GluProblem, GluResults
from tilewright.kernels.op.backend import Implementation, Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction

_GROUPED = TritonGatedGroupedMatmul()


class TritonGlu(Implementation[GluInputs, GluProblem, Any, TritonGatedForwardParams, TritonGatedBackwardParams]):
    """Serves float16, bfloat16 and float32 of one dtype.

    It comes behind XLA, whose matmuls are cuBLAS's: it reads the rows once and saves the pass over the pre-activations,
    and nothing has measured yet where that is more.
    """

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonGatedForwardParams
    backward_params: ClassVar[type] = TritonGatedBackwardParams
    late_import: ClassVar[str] = "triton"

    def not_supported_reasons(self, problem: GluProblem, device: Device, direction: Direction) -> list[str]:
        return [
            reason.replace("lhs", "x")
            for reason in _GROUPED.not_supported_reasons(_one_group(problem), device, direction)
        ]

    def deprioritized(self, problem: GluProblem, device: Device, direction: Direction) -> bool:
        return True

    def heuristic(self, problem: GluProblem, device: Device, direction: Direction) -> GatedParams:
        return _GROUPED.heuristic(_one_group(problem), device, direction)

    def candidates(self, problem: GluProblem, device: Device, direction: Direction) -> Iterable[GatedParams]:
        return _GROUPED.candidates(_one_group(problem), device, direction)

    def footprints(
        self, problem: GluProblem, device: Device, direction: Direction, params: GatedParams
    ) -> Sequence[Footprint]:
        return _GROUPED.footprints(_one_group(problem), device, direction, params)

    def forward(self, inputs: GluInputs, params: TritonGatedForwardParams) -> GluResults:
        results = _GROUPED.forward(_as_one_group(inputs), params)
        shape = (*inputs.x.shape[:-1], inputs.gate.shape[1])
        out, gate, up = (None if x is None else x.reshape(shape) for x in results)
        assert out is not None
        return out, gate, up

    def backward(
        self, inputs: GluInputs, results: Any, cotangents: jax.Array, params: TritonGatedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of x, gate and up, of those that are used, from both pre-activations."""
        columns = inputs.gate.shape[1]
        flat = [x.reshape(-1, columns) for x in results]
        given = _as_one_group(inputs)
        found = _GROUPED.backward(given, flat, cotangents.reshape(-1, columns), params)
        gradients = {"x": found["lhs"], "gate": found["gate"], "up": found["up"]}
        shapes = {"x": inputs.x.shape, "gate": inputs.gate.shape, "up": inputs.up.shape}
        return {name: None if x is None else x.reshape(shapes[name]) for name, x in gradients.items()}


def _one_group(problem: GluProblem) -> GatedProblem:
    return GatedProblem(
        rows=problem.rows,
        k=problem.k,
        n=problem.n,
        groups=1,
        matrices=1,
        lhs_dtype=problem.x_dtype,
        gate_dtype=problem.gate_dtype,
        up_dtype=problem.up_dtype,
        has_offset=False,
        options=GatedOptions(problem.options.out_dtype, problem.options.activation),
    )


def _as_one_group(inputs: GluInputs) -> GatedInputs:
    rows = (
        inputs.x.reshape(-1, inputs.x.shape[-1])
        if inputs.x.size
        else jnp.zeros((0, inputs.x.shape[-1]), inputs.x.dtype)
    )
    return GatedInputs(
        rows,
        inputs.gate[None],
        inputs.up[None],
        jnp.full((1,), rows.shape[0], jnp.int32),
        None,
        GatedOptions(inputs.options.out_dtype, inputs.options.activation),
        frozenset({"x": "lhs"}.get(name, name) for name in inputs.gradients),
        inputs.keeps,
    )
