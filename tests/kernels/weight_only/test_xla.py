"""Conformance of the XLA backend of matmuls with weights of few bits."""

import dataclasses

import pytest

from tests.kernels.weight_only.conformance import WeightOnlyConformance
from tilewright.kernels.weight_only.cases import WeightOnlyCase
from tilewright.kernels.weight_only.xla import XlaWeightOnly
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")


class TestXla(WeightOnlyConformance):
    backend = XlaWeightOnly()

    def params(self, inputs: object) -> tuple[FwdParams, BwdParams]:
        return FwdParams(), BwdParams()


class TestXlaInFloat32(TestXla):
    """The same with x in float32."""

    cases = TestXla.cases[:3]

    def adapted(self, case: WeightOnlyCase) -> WeightOnlyCase:
        return dataclasses.replace(case, dtype="float32")
