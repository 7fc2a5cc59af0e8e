"""Configs of the Hopper backends: that of the forward pass is one matmul's, that of the backward pass one for each."""

import dataclasses

from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.HopperMatmulBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperMatmulBackwardParams:
    """The configs of the gradient of lhs and of that of rhs."""

    lhs: MatmulParams
    rhs: MatmulParams


@stable_id("tilewright/grouped_matmul.HopperGroupedBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperGroupedBackwardParams:
    """The same of a grouped matmul."""

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

    @property
    def lhs(self) -> MatmulParams:
        return self.x

    @property
    def rhs(self) -> MatmulParams:
        return self.matrices


@stable_id("tilewright/grouped_matmul.HopperGatedBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperGatedBackwardParams:
    """The same of the gated grouped matmul, by the names of its arguments."""

    lhs: MatmulParams
    rhs: MatmulParams
    recompute: MatmulParams | None = None
