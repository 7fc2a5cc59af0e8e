"""The layer of experts in plain XLA: the backend for every device."""

from typing import ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.ops.types import Device


class XlaExperts(ExpertsBackend):
    """Serves every call."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def movement(self, inputs: ExpertsInputs, device: Device) -> Movement:
        return MOVEMENTS[Platform.XLA]
