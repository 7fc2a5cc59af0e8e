"""The layer of experts on a Hopper GPU: rows that its first matmul gathers, beside rows that are copied before."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.experts.conformance import inputs_of
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.hopper import HopperExperts
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize(
    "case",
    [
        ExpertsCase("a part of a step of K", dtype="bfloat16", tokens=1000, d=200, n=136, num_experts=16, k=4),
        ExpertsCase("skewed", dtype="bfloat16", tokens=3000, d=512, n=256, num_experts=64, k=8, zipf=1.0),
        ExpertsCase("dropped", dtype="float16", tokens=700, d=520, n=192, num_experts=5, k=2, capacity=100),
        ExpertsCase("biases", dtype="bfloat16", tokens=500, d=256, n=128, k=2, biases=True),
        ExpertsCase("few rows", dtype="bfloat16", tokens=3, d=1024, n=256, num_experts=32, k=4),
    ],
    ids=lambda case: case.name,
)
def test_both_ways_give_the_same_bits(case: ExpertsCase):
    """By every candidate, twice."""
    backend, inputs = HopperExperts(), inputs_of(case)
    listed = backend.candidates(inputs.structs, current_device(), "forward")
    for gathering in (params for params in listed if params.gathers):

        def run(params: Any) -> list[np.ndarray]:
            found = jax.jit(lambda inputs: backend.forward(inputs, params))(inputs)
            return [np.asarray(x).view(np.uint16) for x in found[:3]]

        want = run(dataclasses.replace(gathering, gathers=False))
        for got in (run(gathering), run(gathering)):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=str(gathering))
