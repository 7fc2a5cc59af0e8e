"""Conformance of the Triton backends of the causal convolution, by Triton's interpreter; what selection sees."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.causal_conv1d.conformance import ConvConformance, cotangents_of, inputs_of, named, oracle
from tests.kernels.causal_conv1d.steps import CASES as STEP_CASES
from tests.kernels.causal_conv1d.steps import check_step, inputs_of_step
from tests.kernels.conformance import check, run_both
from tests.kernels.conftest import A100, H100
from tilewright.kernels import kernel
from tilewright.kernels.causal_conv1d.cases import ConvCase, ConvStepCase
from tilewright.kernels.causal_conv1d.inputs import ConvInputs
from tilewright.kernels.causal_conv1d.triton.backend import TritonConv, TritonConvStep
from tilewright.kernels.causal_conv1d.triton.params import ConvBackwardParams, ConvForwardParams, ConvStepParams, span
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND, STEP = TritonConv(), TritonConvStep()


class TestTriton(ConvConformance):
    """Tiles of several steps, whose ends lie anywhere in the sequences."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, problem: ConvInputs) -> tuple[Any, Any]:
        return ConvForwardParams(3, 16, 1, 2), ConvBackwardParams(3, 16, 1, 2 + problem.width // 2)


@pytest.mark.parametrize("shared", [True, False])
def test_vmap(shared: bool):
    """Of rows as of groups; a weight of all of them, or of each its own; with states of packed sequences."""
    case = ConvCase("", length=9, channels=8, packing="cum_seqlens", initial_state=True, return_state=True)
    inputs = inputs_of(case)
    cotangents = cotangents_of(inputs)
    params = ConvForwardParams(4, 8, 1), ConvBackwardParams(4, 8, 1, 2)
    names = ("x", "initial_state") if shared else ("x", "initial_state", "weight", "bias")
    many = {name: jnp.stack([getattr(inputs, name), -getattr(inputs, name)]) for name in names}
    with interpret_triton():
        call = lambda given: named(*run_both(BACKEND, inputs.replace(**given), cotangents, params))
        got = jax.block_until_ready(jax.jit(jax.vmap(call))(many))
    for index in range(2):
        one = inputs.replace(**{name: x[index] for name, x in many.items()})
        check({name: x[index] for name, x in got.items()}, oracle(one, cotangents))


@pytest.mark.parametrize("case", STEP_CASES.values(), ids=list(STEP_CASES))
def test_steps(case: Any):
    inputs = inputs_of_step(case)
    if said := STEP.not_supported_reasons(inputs.structs, H100, "forward"):
        assert case.name in ("width_1", "no_rows"), said
        pytest.skip("; ".join(said))
    with interpret_triton():
        got = jax.block_until_ready(jax.jit(lambda inputs: STEP.forward(inputs, ConvStepParams(16, 1)))(inputs))
    check_step(inputs, got)


def test_steps_of_several_pools():
    inputs = inputs_of_step(ConvStepCase("", batch=2, channels=8, slots=3))
    pools = jnp.stack([inputs.conv_pool, 2 * inputs.conv_pool])
    with interpret_triton():
        call = lambda pool: STEP.forward(inputs.replace(conv_pool=pool), ConvStepParams(8, 1))
        y, after = jax.block_until_ready(jax.jit(jax.vmap(call))(pools))
    for index in range(2):
        check_step(inputs.replace(conv_pool=pools[index]), (y[index], after[index]))


@pytest.mark.parametrize("device", [H100, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 24, 1024, 5376, 8192])
def test_what_ships_can_run(channels: int, width: int, device: Device):
    for case in (
        ConvCase("", batch=2, length=7, channels=channels, width=width),
        ConvCase("", length=32768, channels=channels, width=width, dtype="bfloat16", packing="segment_ids"),
        ConvCase("", length=300, channels=channels, width=width, dtype="bfloat16", initial_state=True),
    ):
        problem = kernel("causal_conv1d").prepare(*case.abstract_arguments()[0], **case.abstract_arguments()[1]).structs
        for direction in ("forward", "backward"):
            assert not BACKEND.not_supported_reasons(problem, device, direction)
            listed = list(BACKEND.candidates(problem, device, direction))
            assert listed[0] == BACKEND.heuristic(problem, device, direction)
            assert len(set(listed)) == len(listed)
            for params in listed:
                assert not BACKEND.config_reasons(problem, device, direction, params)
                assert span(problem, params) >= 1
                assert untagged(json.loads(json.dumps(tagged(params)))) == params
            if direction == "backward" and problem.x.shape[1] > 1000:
                # The partial sums of weights and bias are less than the rest.
                assert span(problem, listed[0]) >= 4 * (width + 1)


def test_reasons():
    case = ConvCase("", length=6, channels=8)
    problem = inputs_of(case).structs
    double = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), problem)
    assert BACKEND.not_supported_reasons(double, A100, "forward")[0].endswith("not float64")
    assert BACKEND.not_supported_reasons(problem, Device("cpu", "cpu"), "forward")
    wide = inputs_of(ConvCase("", length=6, channels=8, width=9)).structs
    assert "from 2 to 8, got 9" in BACKEND.not_supported_reasons(wide, H100, "forward")[0]
    many = BACKEND.config_reasons(problem, H100, "forward", ConvForwardParams(64, 4096, 4))
    assert "registers of a thread" in many[0]
    few = BACKEND.config_reasons(problem, H100, "backward", ConvBackwardParams(1, 32, 1, 3))
    assert few == ["3 tokens are fewer than width=4 backward"]
    assert (
        "needs elements"
        in STEP.not_supported_reasons(inputs_of_step(STEP_CASES["no_rows"]).structs, H100, "forward")[0]
    )


@pytest.mark.parametrize("wrong", [(0, 64, 4), (8, 48, 4), (8, 64, 3), (True, 64, 4), (8, 64, 64), (8, 64, 4, 0)])
def test_params_are_checked(wrong: tuple[int, ...]):
    for kind in (ConvForwardParams, ConvBackwardParams):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs"):
            kind(*wrong)
