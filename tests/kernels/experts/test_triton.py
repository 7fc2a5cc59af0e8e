"""Conformance of the Triton backend of the layer of experts, by Triton's interpreter."""

from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100
from tests.kernels.experts.conformance import ExpertsConformance
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.experts.params import ExpertsBackwardParams, ExpertsForwardParams
from tilewright.kernels.experts.triton import TritonExperts
from tilewright.kernels.matmul.triton.params import (
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
    TritonGroupedBackwardParams,
    TritonGroupedForwardParams,
)
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile

pytestmark = pytest.mark.usefixtures("unoptimised")

_TILE = TritonTile(16, 16, 16, 1, 1)


class TestTriton(ExpertsConformance):
    """Tiles that are smaller than the arrays, so that there are several along each dimension."""

    backend = TritonExperts()
    device = A100
    machine = staticmethod(interpret_triton)

    def params(self, inputs: ExpertsInputs) -> tuple[Any, Any]:
        grouped, gated = TritonGroupedForwardParams(_TILE), TritonGatedForwardParams(_TILE)
        of_grouped = TritonGroupedBackwardParams(_TILE, _TILE)
        forward = ExpertsForwardParams(gated if inputs.is_fused else grouped, grouped)
        return forward, ExpertsBackwardParams(grouped, TritonGatedBackwardParams(_TILE, _TILE), of_grouped)
