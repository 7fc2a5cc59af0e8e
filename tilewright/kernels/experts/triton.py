"""The layer of experts in Triton, on NVIDIA GPUs from Ampere on."""

from typing import Any, ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.matmul.backend import MatmulBackend
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul, TritonGroupedMatmul
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.triton.movement import TritonMovement


class TritonExperts(ExpertsBackend):
    """Serves float16, bfloat16 and float32 of one dtype."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    gated: ClassVar[MatmulBackend[Any, Any]] = TritonGatedGroupedMatmul()
    grouped: ClassVar[MatmulBackend[Any, Any]] = TritonGroupedMatmul()

    def movement(self) -> Movement:
        return TritonMovement()
