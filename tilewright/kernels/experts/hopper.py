"""The layer of experts on Hopper: its matmuls, and rows that Triton moves where it is installed."""

from typing import ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.ops.types import Device


class HopperExperts(ExpertsBackend):
    """Serves bfloat16 and float16 of one dtype."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    gathers: ClassVar[bool] = True
    keeps_lowering: ClassVar[bool] = True

    def movement(self, inputs: ExpertsInputs, device: Device) -> Movement:
        in_triton = MOVEMENTS[Platform.TRITON]
        return MOVEMENTS[Platform.XLA] if in_triton.reasons(inputs.tokens, inputs.k, device) else in_triton
