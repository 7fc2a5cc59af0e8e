"""Conformance of the XLA backend of ``linear_sample``, in blocks of the vocabulary."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.sampling.conformance import check_draw, named
from tests.kernels.sampling.linear_conformance import LinearSampleConformance, inputs_of, oracle_of
from tilewright.kernels.sampling.cases import LinearSampleCase
from tilewright.kernels.sampling.inputs import LinearSampleInputs
from tilewright.kernels.sampling.xla.linear_sample import XlaLinearSample, XlaLinearSampleParams


class TestXla(LinearSampleConformance):
    backend = XlaLinearSample()

    def params(self, problem: LinearSampleInputs) -> tuple[Any, Any]:
        return XlaLinearSampleParams(128), None


@pytest.mark.parametrize("size", [128, 256, 384, 768, 1024])
def test_blocks(size: int):
    """As many as fit, and a rest or none."""
    inputs = inputs_of(LinearSampleCase("", rows=6, d=32, vocab=768))
    got = jax.jit(lambda x: XlaLinearSample().forward(x, XlaLinearSampleParams(size)))(inputs)
    check_draw(named(got), oracle_of(inputs), tolerance=1e-5)


@pytest.mark.parametrize("wrong", [0, 100, -128, True, 128.0])
def test_params_are_checked(wrong: Any):
    with pytest.raises(ValueError, match="positive multiple of 128"):
        XlaLinearSampleParams(wrong)
    assert np.all([each.block_vocab % 128 == 0 for each in candidates()])


def candidates() -> list[XlaLinearSampleParams]:
    from tests.kernels.conftest import H100

    inputs = inputs_of(LinearSampleCase("", rows=2, d=4, vocab=1000)).structs
    return list(XlaLinearSample().candidates(inputs, H100, "forward"))
