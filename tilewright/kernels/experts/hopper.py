"""The layer of experts on Hopper: its matmuls, and rows that Triton moves where it is installed."""

from typing import Any, ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.matmul.backend import MatmulBackend
from tilewright.kernels.matmul.hopper.backend import HopperGatedGroupedMatmul, HopperGroupedMatmul
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.xla import XlaMovement
from tilewright.kernels.triton import unavailable
from tilewright.ops.utils.device import current_device


class HopperExperts(ExpertsBackend):
    """Serves bfloat16 and float16 of one dtype."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    gated: ClassVar[MatmulBackend[Any, Any]] = HopperGatedGroupedMatmul()
    grouped: ClassVar[MatmulBackend[Any, Any]] = HopperGroupedMatmul()

    def movement(self) -> Movement:
        if unavailable(current_device()):
            return XlaMovement()
        from tilewright.kernels.permutation.triton.movement import TritonMovement

        return TritonMovement()
