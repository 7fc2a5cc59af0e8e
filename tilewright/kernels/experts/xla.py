"""The layer of experts in plain XLA: the backend for every device."""

from typing import Any, ClassVar

from tilewright.kernels.experts.backend import ExpertsBackend
from tilewright.kernels.matmul.backend import MatmulBackend
from tilewright.kernels.matmul.xla.backend import XlaGatedGroupedMatmul, XlaGroupedMatmul
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.xla import XlaMovement


class XlaExperts(ExpertsBackend):
    """Serves every call."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    gated: ClassVar[MatmulBackend[Any, Any]] = XlaGatedGroupedMatmul()
    grouped: ClassVar[MatmulBackend[Any, Any]] = XlaGroupedMatmul()

    def movement(self) -> Movement:
        return XlaMovement()
