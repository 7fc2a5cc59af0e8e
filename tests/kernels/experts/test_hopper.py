"""Conformance of the Hopper backend of the layer of experts, whose matmuls are interpreted on the CPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.kernels.conftest import H100
from tests.kernels.experts.conformance import ExpertsConformance
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.hopper import HopperExperts
from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.experts.params import ExpertsBackwardParams, ExpertsForwardParams
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.params import HopperGatedBackwardParams, HopperGroupedBackwardParams
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movements import MOVEMENTS

_PAIR = MatmulParams(128, 128, 3, cluster_m=2, band=1)


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items; and rows that XLA moves."""
    with (
        mock.patch.object(products, "num_sms", return_value=4),
        mock.patch.object(HopperExperts, "movement", return_value=MOVEMENTS[Platform.XLA]),
    ):
        yield


class TestHopper(ExpertsConformance):
    """Two consumers, and a cluster along the rows."""

    backend = HopperExperts()
    device = H100
    machine = staticmethod(interpret_mosaic)

    def adapted(self, case: ExpertsCase) -> ExpertsCase:
        return dataclasses.replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16")

    def params(self, inputs: ExpertsInputs) -> tuple[Any, Any]:
        backward = HopperGatedBackwardParams(_PAIR, _PAIR)
        return ExpertsForwardParams(_PAIR, _PAIR), ExpertsBackwardParams(
            _PAIR, backward, HopperGroupedBackwardParams(_PAIR, _PAIR)
        )
