"""A step of the selective scan in Triton, on NVIDIA GPUs: states are read once and written once, in place."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.selective_scan.inputs import SelectiveScanStepInputs
from tilewright.kernels.sequential import run_with_sequential_vmap
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams

type Stepped = tuple[jax.Array, jax.Array]

MAX_STATE = 256
"""The largest state: one program has all of a channel's."""

WARPS = 4

ELEMENTS = 8
"""Elements of states that a thread has: two loads of 16 bytes in float32."""


class TritonSelectiveScanStep(InferenceBackend[SelectiveScanStepInputs, Stepped, FwdParams]):
    """Serves float16, bfloat16 and float32. Its only param is ``num_warps``."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = FwdParams
    serves: ClassVar[frozenset[str]] = frozenset(
        {"D", "z", "delta_bias", "delta_softplus", "state_indices", "write_indices"}
    )

    def forward_reasons(self, inputs: SelectiveScanStepInputs, device: Device) -> list[str]:
        reasons = unavailable(device)
        for name in ("state_pool", "u", "delta", "A", "B", "C", "D", "z", "delta_bias"):
            x = inputs.arrays[name]
            if x is not None and x.dtype.name not in ("float16", "bfloat16", "float32"):
                reasons.append(f"{name} must be float16, bfloat16 or float32, not {x.dtype}")
        if inputs.state > MAX_STATE:
            reasons.append(f"its programs have states of at most {MAX_STATE} elements, got {inputs.state}")
        if 0 in inputs.u.shape or 0 in inputs.state_pool.shape:
            reasons.append(f"its kernel needs tokens and states, got {inputs.u.shape=}, {inputs.state_pool.shape=}")
        return reasons

    def candidates(self, inputs: SelectiveScanStepInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams(num_warps=warps) for warps in (WARPS, 2, 1, 8)]

    def forward(self, inputs: SelectiveScanStepInputs, params: FwdParams) -> Stepped:
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params.num_warps or WARPS), inputs)


def _run(inputs: SelectiveScanStepInputs, num_warps: int) -> Stepped:
    from tilewright.kernels.selective_scan.triton import step_kernels

    block_n = power_of_two(inputs.state)
    width = inputs.channels // inputs.groups
    block_d = min(max(32 * num_warps * ELEMENTS // block_n, 1), power_of_two(width))
    absent = jnp.zeros((0,), jnp.float32)
    optional: tuple[Any, ...] = (inputs.D, inputs.z, inputs.delta_bias, inputs.state_indices, inputs.write_indices)
    skip, z, bias, reads, writes = (absent if x is None else x for x in optional)
    operands = [inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, skip, z, bias, reads, writes, inputs.state_pool]
    out, pool = launch(
        step_kernels.step,
        operands,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.u, inputs.state_pool)],
        grid=[inputs.rows * inputs.groups * -(-width // block_d)],
        scalars={"slots": inputs.state_pool.shape[0]},
        constants={
            "channels": inputs.channels, "groups": inputs.groups, "state": inputs.state, "block_d": block_d,
            "block_n": block_n, "has_skip": inputs.D is not None, "has_gate": inputs.z is not None,
            "has_bias": inputs.delta_bias is not None, "delta_softplus": inputs.delta_softplus,
            "has_reads": inputs.state_indices is not None, "has_writes": inputs.write_indices is not None,
        },
        num_warps=num_warps,
        in_place={1: len(operands) - 1},
    )  # fmt: skip
    return out, pool
