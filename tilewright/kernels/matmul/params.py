"""Configs of the dense matmuls."""

import dataclasses

from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.XlaGluBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaGluBackwardParams:
    """Config of the backward pass.

    Attributes:
      recompute: compute the pre-activations again; under ``jax.jit`` those of the forward pass are then not kept.
    """

    recompute: bool = False

    def __post_init__(self) -> None:
        if type(self.recompute) is not bool:
            raise TypeError(f"XlaGluBackwardParams needs a bool, got {self.recompute=}")


@stable_id("tilewright/matmul.HopperMatmulBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperMatmulBackwardParams:
    """The configs of the gradient of lhs and of that of rhs."""

    lhs: MatmulParams
    rhs: MatmulParams


@stable_id("tilewright/matmul.HopperGluBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperGluBackwardParams:
    """The configs of the gradient of x and of those of both matrices.

    Attributes:
      recompute: that of the forward kernel, which computes the pre-activations again; under ``jax.jit`` those of the
        forward pass are then not kept. None takes them as they are.
    """

    x: MatmulParams
    matrices: MatmulParams
    recompute: MatmulParams | None = None
