"""Conformance of the XLA backend of the layer of experts."""

from typing import Any

from tests.kernels.experts.conformance import ExpertsConformance
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.experts.params import ExpertsBackwardParams, ExpertsForwardParams
from tilewright.kernels.experts.xla import XlaExperts
from tilewright.kernels.matmul.xla.params import XlaBlockParams, XlaGatedBackwardParams

_BLOCK = XlaBlockParams(4)


class TestXla(ExpertsConformance):
    """Blocks of fewer rows than experts have."""

    backend = XlaExperts()

    def params(self, inputs: ExpertsInputs) -> tuple[Any, Any]:
        return ExpertsForwardParams(_BLOCK, _BLOCK), ExpertsBackwardParams(_BLOCK, XlaGatedBackwardParams(4), _BLOCK)
