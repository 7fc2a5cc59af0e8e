"""The layer of experts on Hopper: its matmuls, and rows that Triton moves where it is installed."""

from typing import ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.kernels.triton import unavailable
from tilewright.ops.utils.device import current_device


class HopperExperts(ExpertsBackend):
    """Serves bfloat16 and float16 of one dtype."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    gathers: ClassVar[bool] = True

    def movement(self) -> Movement:
        return MOVEMENTS[Platform.XLA if unavailable(current_device()) else Platform.TRITON]
