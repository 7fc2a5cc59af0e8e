"""Conformance of the Triton backend of the router, by Triton's interpreter, and its choices beside XLA's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check_candidates, check_same
from tests.kernels.conftest import A100, H100
from tests.kernels.router.conformance import CASES, RouterConformance, inputs_of
from tests.kernels.router.test_op import EVERY, name_of
from tests.support.draws import draw
from tilewright.kernels.router.cases import RouterCase
from tilewright.kernels.router.inputs import RouterInputs
from tilewright.kernels.router.triton.backend import TritonRouter, TritonRouterParams
from tilewright.kernels.router.xla import XlaRouter
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonRouter()
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PARAMS = TritonRouterParams(4)


class TestTriton(RouterConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, problem: RouterInputs) -> tuple[Any, Any]:
        return PARAMS, TritonRouterParams(2)


def strange() -> jax.Array:
    """Rows with ties, zeros of both signs, NaN, −inf, values at the ends of float32, and +inf in the last one."""
    low = jnp.finfo(jnp.float32).min
    rows = np.array(draw(8, 16))
    rows[0] = 0.0
    rows[1] = [-0.0, 0.0] * 8
    rows[2] = np.repeat(rows[2, :4], 4)
    rows[3, ::2], rows[4, 3:], rows[5] = np.nan, -np.inf, np.nan
    rows[6, :6] = [low, -np.inf, -low, low, -low, 1e-45]
    rows[7, 9] = np.inf
    return jnp.asarray(rows)


def results_of(backend: Any, inputs: RouterInputs, params: Any) -> dict[str, Any]:
    """Weights, choice and gradient."""

    @jax.jit
    def run(inputs: RouterInputs) -> dict[str, Any]:
        weights, experts = backend.forward(inputs, params[0])
        cotangents = jnp.broadcast_to(jnp.arange(1.0, inputs.k + 1), weights.shape), None
        gradient = backend.backward(inputs, experts, cotangents, params[1])["logits"]
        return {"weights": weights, "experts": experts, "gradient": gradient}

    with interpret_triton():
        return jax.block_until_ready(run(inputs))


@pytest.mark.parametrize("options", EVERY, ids=name_of)
def test_as_xla_of_strange_logits(options: dict[str, Any]):
    for k in (3, 7):
        inputs = RouterInputs(strange(), k, **options)
        got = results_of(BACKEND, inputs, (PARAMS, PARAMS))
        want = results_of(XlaRouter(), inputs, (FwdParams(), BwdParams()))
        np.testing.assert_array_equal(got["experts"], want["experts"])
        np.testing.assert_allclose(got["weights"], want["weights"], rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(got["gradient"], want["gradient"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_vmap(shared: bool):
    """Of tokens and of several batches, with one bias or each its own."""
    inputs = inputs_of(dataclasses.replace(CASES[7], tokens=12))
    bias = inputs.bias if shared else jnp.stack([inputs.bias, -inputs.bias, 2 * inputs.bias])
    logits = inputs.logits.reshape(3, 4, -1)

    def call(logits: Any, bias: Any) -> Any:
        one = lambda row: BACKEND.forward(inputs.replace(logits=row, bias=bias), PARAMS)
        return jax.vmap(one)(logits)

    with interpret_triton():
        axes = (0, None if shared else 0)
        got = jax.block_until_ready(jax.jit(jax.vmap(call, in_axes=axes))(logits, bias))
    for i in range(3):
        one = inputs.replace(logits=logits[i], bias=bias if shared else bias[i])
        want = results_of(BACKEND, one, (PARAMS, PARAMS))
        check_same({"weights": got[0][i], "experts": got[1][i]}, {name: want[name] for name in ("weights", "experts")})


def test_vmap_of_the_gradient():
    inputs = inputs_of(CASES[1]).replace(logits=draw(6, 60))
    want = results_of(BACKEND, inputs, (PARAMS, PARAMS))["gradient"]
    got = jax.vmap(lambda row: results_of(BACKEND, inputs.replace(logits=row), (PARAMS, PARAMS))["gradient"])
    np.testing.assert_array_equal(got(inputs.logits), want)


LARGE = {
    "mixtral": RouterCase("", tokens=8192, experts=8, k=2, dtype="bfloat16"),
    "qwen3": RouterCase("", tokens=8192, experts=128, k=8),
    "deepseek": RouterCase(
        "", tokens=4096, experts=256, k=8, scoring="sigmoid", bias=True, num_groups=8, top_groups=4, scale=2.5
    ),
    "kimi": RouterCase("", tokens=64, experts=384, k=8, scoring="sigmoid", bias=True, dtype="float16"),
    "largest": RouterCase("", tokens=300, experts=1024, k=32, normalize=False),
    "odd groups": RouterCase("", tokens=300, experts=1023, k=32, scoring="sigmoid", num_groups=11, top_groups=4),
}


@pytest.mark.parametrize("device", [A100, H100], ids=["sm_80", "sm_90"])
def test_compiles_without_spills(device: Device):
    """The maximum of integers over a warp, of which a round has two, is one instruction; tests/aot has more calls."""
    inputs = inputs_of(LARGE["qwen3"]).structs
    cotangents = jax.ShapeDtypeStruct((8192, 8), jnp.float32), jax.ShapeDtypeStruct((8192, 8), jnp.int32)

    def both(inputs: RouterInputs, d_weights: Any, experts: Any) -> Any:
        forward, backward = (BACKEND.heuristic(inputs.structs, device, way) for way in DIRECTIONS)
        gradient = BACKEND.backward(inputs, experts, (d_weights, None), backward)
        return BACKEND.forward(inputs, forward), gradient

    with recorded_launches() as launches, interpret_triton():
        jax.eval_shape(both, inputs, *cotangents)
    assert device.capability is not None
    compiled = {each.name: report(each, device.capability) for each in launches}
    assert [each.faults for each in compiled.values()] == [[], []]
    assert "redux.sync.max.s32" in compiled["forward"].texts["ptx"]


@pytest.mark.parametrize("name", LARGE)
def test_candidates(name: str):
    check_candidates(BACKEND, inputs_of(LARGE[name]).structs, H100)


def test_reasons():
    inputs = inputs_of(RouterCase("", tokens=2, experts=1025, k=33)).structs
    why = BACKEND.not_supported_reasons(inputs, A100, "forward")
    assert why == ["experts=1025 must be at most 1024", "k=33 must be at most 32"]
    double = inputs_of(CASES[0]).structs
    double = double.replace(logits=jax.ShapeDtypeStruct((5, 8), np.float64))
    assert "not float64" in BACKEND.not_supported_reasons(double, A100, "forward")[-1]
    assert BACKEND.not_supported_reasons(inputs_of(CASES[0]).structs, Device("cpu", "cpu"), "backward")
    largest = inputs_of(LARGE["largest"]).structs
    assert "do not fit into registers" in BACKEND.config_reasons(largest, H100, "forward", TritonRouterParams(4))[0]


@pytest.mark.parametrize("wrong", [(3, 1), (0, 1), (1, 32), (True, 1), (512, 1)])
def test_params_are_checked(wrong: tuple[Any, Any]):
    with pytest.raises(ValueError, match="must be a power of two"):
        TritonRouterParams(*wrong)
