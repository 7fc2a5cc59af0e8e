"""The layer of experts on a Hopper GPU: rows that its matmuls gather, beside rows that are copied before."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.experts.conformance import inputs_of
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.hopper import HopperExperts
from tilewright.kernels.experts.inputs import ExpertsResults
from tilewright.ops.utils.device import current_device

PARTS = 4

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)


CASES = (
    ExpertsCase("a part of a step of K", dtype="bfloat16", tokens=1000, d=200, n=136, num_experts=16, k=4),
    ExpertsCase("skewed", dtype="bfloat16", tokens=3000, d=512, n=256, num_experts=64, k=8, zipf=1.0),
    ExpertsCase("dropped", dtype="float16", tokens=700, d=520, n=192, num_experts=5, k=2, capacity=100),
    ExpertsCase("biases", dtype="bfloat16", tokens=500, d=256, n=128, k=2, biases=True),
    ExpertsCase("few rows", dtype="bfloat16", tokens=3, d=1024, n=256, num_experts=32, k=4),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("part", range(PARTS))
def test_both_ways_give_the_same_bits(case: ExpertsCase, part: int):
    """By the configs of the matmul that gathers, in parts, which take 20 s of compilation each; and twice."""
    backend, inputs = HopperExperts(), inputs_of(case)
    listed = [each for each in backend.candidates(inputs.structs, current_device(), "forward") if each.gathers]
    for gathering in list({each.gated: each for each in listed}.values())[part::PARTS]:

        def program(params: Any) -> Any:
            return jax.jit(lambda inputs: backend.forward(inputs, params))

        def run(program: Any) -> list[np.ndarray]:
            return [np.asarray(x).view(np.uint16) for x in program(inputs)[:3]]

        gathers = program(gathering)
        want = run(program(dataclasses.replace(gathering, gathers=False)))
        for got in (run(gathers), run(gathers)):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=str(gathering))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("part", range(PARTS))
def test_both_ways_give_the_same_gradients(case: ExpertsCase, part: int):
    """By the tiles of each matmul that gathers, in parts; and twice."""
    backend, inputs, device = HopperExperts(), inputs_of(case), current_device()
    cotangents = ExpertsResults(jax.random.normal(jax.random.key(0), inputs.x.shape, case.dtype))
    kept = jax.jit(lambda inputs: backend.forward(inputs, backend.heuristic(inputs.structs, device, "forward")))(inputs)
    listed = [each for each in backend.candidates(inputs.structs, device, "backward") if each.gathers]
    # Of sums the order of tiles alone differs with the band.
    distinct = {
        (each.hidden, *(dataclasses.replace(tile, band=1) for tile in (each.gated.rhs, each.down.rhs))): each
        for each in listed
    }
    for gathering in list(distinct.values())[part::PARTS]:

        def program(params: Any) -> Any:
            return jax.jit(lambda *call: backend.backward(*call, params))

        def run(program: Any) -> dict[str, np.ndarray[Any, Any]]:
            return {name: np.asarray(x).view(np.uint8) for name, x in program(inputs, kept, cotangents).items()}

        gathers = program(gathering)
        want = run(program(dataclasses.replace(gathering, gathers=False)))
        for got in (run(gathers), run(gathers)):
            assert got.keys() == want.keys()
            for name, x in want.items():
                np.testing.assert_array_equal(got[name], x, err_msg=f"{name}, {gathering}")
