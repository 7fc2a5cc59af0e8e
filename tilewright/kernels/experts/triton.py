"""The layer of experts in Triton, on NVIDIA GPUs from Ampere on."""

from typing import ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.ops.types import Device


class TritonExperts(ExpertsBackend):
    """Serves float16, bfloat16 and float32 of one dtype."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True

    def movement(self, inputs: ExpertsInputs, device: Device) -> Movement:
        return MOVEMENTS[Platform.TRITON]
