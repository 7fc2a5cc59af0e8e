"""Conformance of the Triton backend of the norms, by Triton's interpreter; what selection sees of it."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.norms.conformance import NormConformance, check, cotangents_of, oracle, run
from tilewright.kernels.norms.cases import GPU_CASES, NormCase
from tilewright.kernels.norms.inputs import NormInputs, NormProblem, NormResults
from tilewright.kernels.norms.triton import NormBackwardParams, NormForwardParams, TritonNorm
from tilewright.kernels.registry import Implementation
from tilewright.kernels.triton_bridge.interpreter import interpret_triton
from tilewright.ops.core.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonNorm()


def params_of(columns: int, rows: int = 2, programs: int = 2) -> tuple[NormForwardParams, NormBackwardParams]:
    block = 1 << (columns - 1).bit_length()
    return NormForwardParams(rows, block, 4), NormBackwardParams(rows, block, programs, 4, 2)


class TestWholeRows(NormConformance):
    """Rows that fit into registers."""

    backend: ClassVar[Implementation] = BACKEND
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = staticmethod(interpret_triton)

    def params(self, problem: NormProblem) -> tuple[Any, Any]:
        return params_of(problem.columns, *((1, 1), (2, 2), (4, 3))[problem.columns % 3])


class TestBlocksOfColumns(TestWholeRows):
    """Rows that do not."""

    def params(self, problem: NormProblem) -> tuple[Any, Any]:
        block = max(1 << (problem.columns // 3).bit_length(), 16)
        return NormForwardParams(1, block, 4), NormBackwardParams(2, block, 2, 4, 2)


@pytest.mark.parametrize("block", [256, 64])
@pytest.mark.parametrize("shared", [True, False])
def test_vmap(block: int, shared: bool):
    """Of rows as of groups; a weight of all of them, or of each its own."""
    case = NormCase("", "layer", (5,), 130, bias=True, residual=True)
    inputs, params = case.inputs(), (NormForwardParams(1, block, 4), NormBackwardParams(2, block, 2, 4, 2))
    cotangents = cotangents_of(inputs)
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), inputs)
    axes = jax.tree.map(lambda _: 0, inputs)
    if shared:
        many = dataclasses.replace(many, weight=inputs.weight, bias=inputs.bias)
        axes = dataclasses.replace(axes, weight=None, bias=None)

    def both(inputs: NormInputs) -> Any:
        results = BACKEND.forward(inputs, params[0])
        return results, BACKEND.backward(inputs, results, cotangents, params[1])

    with interpret_triton():
        results, gradients = jax.block_until_ready(jax.jit(jax.vmap(both, in_axes=(axes,)))(many))
    for index in range(3):
        one = jax.tree.map(lambda x: x[index] if x.ndim == 3 else x, many)  # noqa: B023
        if not shared:
            one = dataclasses.replace(one, weight=many.weight[index], bias=many.bias[index])
        found = {"out": results.out[index], "total": results.total[index]}
        found |= {f"d_{name}": x[index] for name, x in gradients.items()}
        check(found, oracle(one, cotangents))


def test_vmap_of_single_rows():
    """As Equinox calls a norm: the rows are what vmap made."""
    weight, x = jnp.linspace(0.5, 1.5, 64), jnp.asarray(np.random.default_rng(0).standard_normal((9, 64)), jnp.float32)
    options = NormCase("").options
    params = params_of(64, 1, 1)

    def loss(x: Any, weight: Any) -> Any:
        return jax.vmap(lambda row: BACKEND.forward(NormInputs(row, None, weight, None, options), params[0]).out)(x)

    with interpret_triton():
        got = jax.block_until_ready(jax.jit(loss)(x, weight))
    inputs = NormInputs(x, None, weight, None, options)
    np.testing.assert_allclose(got, oracle(inputs, cotangents_of(inputs))["out"], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_weight_has_one_order():
    """It is that of programs' sums, whatever else changes."""
    inputs = NormCase("", rows=(33,), columns=40).inputs()
    cotangents = cotangents_of(inputs)
    with interpret_triton():
        first, second = (run(BACKEND, inputs, cotangents, params_of(40, 2, 5)) for _ in range(2))
    np.testing.assert_array_equal(first["d_weight"], second["d_weight"])


@pytest.mark.parametrize("name", GPU_CASES)
def test_what_ships_can_run(name: str):
    problem = NormProblem.of(GPU_CASES[name].structs)
    for direction in ("forward", "backward"):
        assert not BACKEND.not_supported_reasons(problem, H100, direction)
        best = BACKEND.heuristic(problem, H100, direction)
        candidates = list(BACKEND.candidates(problem, H100, direction))
        assert best not in candidates
        assert candidates
        for params in (best, *candidates):
            assert not BACKEND.config_reasons(problem, H100, direction, params)
        assert untagged(json.loads(json.dumps(tagged(best)))) == best


def test_reasons():
    case = NormCase("", rows=(4,), columns=64)
    double = dataclasses.replace(NormProblem.of(case.structs), dtype=np.dtype("float64"))
    assert "not float64" in BACKEND.not_supported_reasons(double, A100, "forward")[-1]
    assert BACKEND.not_supported_reasons(NormProblem.of(case.structs), Device("cpu", "cpu"), "forward")
    problem = NormProblem.of(NormCase("", rows=(4,), columns=4096).structs)
    (why,) = BACKEND.config_reasons(problem, H100, "forward", NormForwardParams(8, 4096, 4))
    assert "do not fit into registers" in why
    (why,) = BACKEND.config_reasons(problem, H100, "forward", NormForwardParams(2, 1024, 4))
    assert "must be 1" in why


@pytest.mark.parametrize("wrong", [(3, 64, 4), (1, 0, 4), (1, 64, 64), (True, 64, 4), (1, 48, 4)])
def test_params_are_checked(wrong: tuple[int, int, int]):
    with pytest.raises(ValueError, match="NormForwardParams needs"):
        NormForwardParams(*wrong)


def test_no_cotangent_of_the_total():
    inputs = NormCase("", rows=(4,), columns=32, residual=True).inputs()
    cotangents = NormResults(cotangents_of(inputs).out, None)
    with interpret_triton():
        got = run(BACKEND, inputs, cotangents, params_of(32))
    check(got, oracle(inputs, cotangents))
