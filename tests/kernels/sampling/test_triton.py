"""Conformance of the Triton backend of ``sample``, by Triton's interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check_same
from tests.kernels.conftest import A100, H100
from tests.kernels.sampling.conformance import (
    SampleConformance,
    check_draw,
    inputs_of,
    named,
    oracle_of,
    strange_inputs,
)
from tilewright.kernels import kernel
from tilewright.kernels.sampling.cases import SampleCase
from tilewright.kernels.sampling.inputs import SampleInputs
from tilewright.kernels.sampling.triton.sample import TritonSample, TritonSampleParams
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonSample()
PARAMS = TritonSampleParams(2, 4, 1, 4)


class TestTriton(SampleConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, problem: SampleInputs) -> tuple[Any, Any]:
        return PARAMS, None

    def test_no_token_depends_on_the_config(self):
        inputs = strange_inputs(9, 0.7, 1.0, 700)
        want = {name: np.asarray(x) for name, x in oracle_of(inputs).items()}
        for params in (PARAMS, TritonSampleParams(1, 1, 8, 4), TritonSampleParams(8, 4, 2, 1)):
            got = drawn_by(inputs, params)
            check_draw(got, want)
            want["log_probs"] = got["log_probs"]


def drawn_by(inputs: SampleInputs, params: TritonSampleParams) -> dict[str, Any]:
    with interpret_triton():
        return named(jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs)))


@pytest.mark.parametrize("limits", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=["all", "limited"])
def test_vmap(limits: dict[str, Any]):
    """Of rows, and of batches with options for all."""
    inputs = inputs_of(SampleCase("", rows=6, vocab=260, temperature=0.7, return_log_probs=True, **limits))
    want = drawn_by(inputs, PARAMS)
    of_batches = jax.tree.map(lambda x: jnp.reshape(jnp.asarray(x), (2, 3, *x.shape[1:])), inputs)
    shared = of_batches.replace(temperature=jnp.asarray(inputs.temperature)[:3])
    axes: Any = jax.tree.map(lambda _: 0, of_batches).replace(temperature=None)

    def call(inputs: SampleInputs) -> Any:
        return named(jax.vmap(lambda one: BACKEND.forward(one, PARAMS))(inputs))

    with interpret_triton():
        got = jax.block_until_ready(jax.jit(jax.vmap(call, in_axes=(axes,)))(shared))
    check_same({name: x.reshape(6) for name, x in got.items()}, want)


LARGE = SampleCase("", rows=64, vocab=131072)
LIMITS: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7, "return_log_probs": True}


@pytest.mark.parametrize("device", [A100, H100], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["all", "limited"])
def test_compiles_without_spills(device: Device, limits: dict[str, Any]):
    """Of a row's largest logit a warp finds the maximum by one instruction; words of neighbours need no exchange."""
    inputs = prepared(limits)
    with recorded_launches() as launches, interpret_triton():
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, BACKEND.heuristic(inputs, H100, "forward")), inputs)
    assert device.capability is not None
    compiled = {each.name: report(each, device.capability) for each in launches}
    names = ["best_tokens", "chosen_groups", "limited_draw"] if limits else ["best_tokens", "best_of_rows"]
    assert {name: each.faults for name, each in compiled.items()} == {name: [] for name in names}
    assert "redux.sync.max.u32" in compiled["best_tokens"].texts["ptx"]
    assert compiled["best_tokens"].shared_bytes <= 1024


def prepared(fields: dict[str, Any]) -> Any:
    args, kwargs = dataclasses.replace(LARGE, **fields).abstract_arguments()
    return kernel("sample").prepare(*args, **kwargs).structs


@pytest.mark.parametrize("fields", [{}, LIMITS, {"rows": 1, "vocab": 200}, {"rows": 4096}], ids=str)
def test_candidates(fields: dict[str, Any]):
    listed = list(BACKEND.candidates(prepared(fields), H100, "forward"))
    assert BACKEND.heuristic(prepared(fields), H100, "forward") == listed[0]
    assert len(listed) == len(set(listed)) >= 2
    for params in listed:
        assert untagged(tagged(params)) == params
        assert not BACKEND.config_reasons(prepared(fields), H100, "forward", params)


def test_reasons():
    assert BACKEND.not_supported_reasons(prepared({"vocab": (1 << 20) + 1}), H100, "forward") == [
        "vocab=1048577 must be at most 1048576"
    ]
    double = prepared({}).replace(logits=jax.ShapeDtypeStruct((64, 131072), np.float64))
    assert "not float64" in BACKEND.not_supported_reasons(double, H100, "forward")[-1]
    assert BACKEND.not_supported_reasons(prepared({}), Device("cpu", "cpu"), "forward")
    why = BACKEND.config_reasons(prepared({}), H100, "forward", TritonSampleParams(32, 2, 8, 8))
    assert why == ["64 elements of each thread do not fit into registers"]


@pytest.mark.parametrize("wrong", [(3, 1, 1, 1), (0, 1, 1, 1), (1, 32, 1, 1), (1, 1, True, 1), (1, 1, 256, 1)])
def test_params_are_checked(wrong: tuple[Any, ...]):
    with pytest.raises(ValueError, match="must be a power of two"):
        TritonSampleParams(*wrong)
