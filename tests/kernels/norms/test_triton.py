"""Conformance of the Triton backend of the norms, by Triton's interpreter; what selection sees of it."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check, run_both
from tests.kernels.conftest import A100, H100, RTX5090
from tests.kernels.norms.conformance import NormConformance, cotangents_of, named, oracle, run
from tilewright.kernels.norms.cases import LayerNormCase, RmsNormCase
from tilewright.kernels.norms.inputs import NormInputs, NormResults
from tilewright.kernels.norms.triton.backend import TritonNorm
from tilewright.kernels.norms.triton.params import NormBackwardParams, NormForwardParams, kept_elements
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonNorm()


type Both = tuple[NormForwardParams, NormBackwardParams]


def params_of(columns: int, rows: int = 2, programs: int = 2, warps: int = 4, blocks: int = 1) -> Both:
    """Params that keep rows, in so many blocks or one more."""
    block = 1 << (max(columns // blocks, 1) - 1).bit_length()
    return NormForwardParams(rows, block, warps), NormBackwardParams(rows, block, programs, warps, 2)


def two_passes(block: int) -> Both:
    return NormForwardParams(1, block, 4, passes=2), NormBackwardParams(2, block, 2, 4, 2, passes=2)


class TestWholeRows(NormConformance):
    """Rows that fit into registers."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, problem: NormInputs) -> Both:
        return params_of(problem.columns, *((1, 1), (2, 2), (4, 3))[problem.columns % 3])


class TestBlocksOfRows(TestWholeRows):
    """The same in several blocks, of which the last may be short; 16-bit ones stay as they are."""

    def params(self, problem: NormInputs) -> Both:
        rows = 16 if problem.columns < 200 else 2
        found = params_of(problem.columns, rows, 2, 1, 3)
        if problem.columns == 130:
            assert kept_elements(problem, found[0]) > 32, "converted anew"
        return found


class TestTwoPasses(TestWholeRows):
    """Rows that do not fit."""

    def params(self, problem: NormInputs) -> Both:
        return two_passes(max(1 << (problem.columns // 3).bit_length(), 16))


@pytest.mark.parametrize("params", [params_of(130, 1), two_passes(64)])
@pytest.mark.parametrize("shared", [True, False])
def test_vmap(params: Both, shared: bool):
    """Of rows as of groups; a weight of all of them, or of each its own."""
    case = LayerNormCase("", rows=5, columns=130, residual=True)
    inputs = case.inputs()
    cotangents = cotangents_of(inputs)
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), inputs)
    axes = jax.tree.map(lambda _: 0, inputs)
    if shared:
        many = dataclasses.replace(many, weight=inputs.weight, bias=inputs.bias)
        axes = dataclasses.replace(axes, weight=None, bias=None)

    call = lambda inputs: named(*run_both(BACKEND, inputs, cotangents, params))
    with interpret_triton():
        got = jax.block_until_ready(jax.jit(jax.vmap(call, in_axes=(axes,)))(many))
    for index in range(3):
        one = jax.tree.map(lambda x: x[index] if x.ndim == 3 else x, many)  # noqa: B023
        if not shared:
            one = dataclasses.replace(one, weight=many.weight[index], bias=many.bias[index])
        check({name: x[index] for name, x in got.items()}, oracle(one, cotangents))


def test_vmap_of_single_rows():
    """As Equinox calls a norm: the rows are what vmap made."""
    weight, x = jnp.linspace(0.5, 1.5, 64), jnp.asarray(np.random.default_rng(0).standard_normal((9, 64)), jnp.float32)
    options = RmsNormCase("").options
    params = params_of(64, 1, 1)

    def loss(x: Any, weight: Any) -> Any:
        return jax.vmap(lambda row: BACKEND.forward(NormInputs(row, weight=weight, **options), params[0]).out)(x)

    with interpret_triton():
        got = jax.block_until_ready(jax.jit(loss)(x, weight))
    inputs = NormInputs(x, weight=weight, **options)
    np.testing.assert_allclose(got, oracle(inputs, cotangents_of(inputs))["out"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 300, 70000])
@pytest.mark.parametrize("columns", [1, 33, 128, 1000, 3000, 7168, 12288, 16384, 20480, 40000, 65536])
def test_what_ships_can_run(rows: int, columns: int):
    for case in (
        RmsNormCase("", rows=rows, columns=columns, dtype="bfloat16", residual=True),
        LayerNormCase("", rows=rows, columns=columns),
    ):
        problem = case.structs
        for direction in ("forward", "backward"):
            assert not BACKEND.not_supported_reasons(problem, H100, direction)
            best = BACKEND.heuristic(problem, H100, direction)
            candidates = list(BACKEND.candidates(problem, H100, direction))
            assert best not in candidates
            assert not BACKEND.config_reasons(problem, H100, direction, best)
            assert candidates or columns < 300
            assert untagged(json.loads(json.dumps(tagged(best)))) == best


@pytest.mark.parametrize("device", [A100, RTX5090], ids=lambda device: device.name)
@pytest.mark.parametrize("columns", [1000, 8192, 12288, 16384, 20480])
def test_heuristics_fit_the_shared_memory_of_other_cards(columns: int, device: Device):
    """Of wide rows two tiles in flight are 128 KB, more than the 99 KB of a block on compute capability 12.0."""
    for case in (
        RmsNormCase("", rows=8192, columns=columns, dtype="bfloat16", residual=True),
        LayerNormCase("", rows=8192, columns=columns, dtype="bfloat16"),
    ):
        for direction in ("forward", "backward"):
            best = BACKEND.heuristic(case.structs, device, direction)
            assert BACKEND.config_reasons(case.structs, device, direction, best) == []


def test_reasons():
    case = RmsNormCase("", rows=4, columns=64)
    double = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), case.structs)
    assert "not float64" in BACKEND.not_supported_reasons(double, A100, "forward")[-1]
    assert BACKEND.not_supported_reasons(case.structs, Device("cpu", "cpu"), "forward")
    problem = RmsNormCase("", rows=4, columns=4096).structs
    for said, params in (
        ("256 elements of rows of each thread", NormForwardParams(8, 4096, 4)),
        ("131072 bytes of rows do not fit", NormForwardParams(8, 4096, 32)),
        ("a program norms one row", NormForwardParams(2, 1024, 4, passes=2)),
        ("may have 232448", NormBackwardParams(2, 4096, 100, 16, 5)),
    ):
        direction: Any = "forward" if isinstance(params, NormForwardParams) else "backward"
        assert any(said in why for why in BACKEND.config_reasons(problem, H100, direction, params)), said


@pytest.mark.parametrize("wrong", [(3, 64, 4), (1, 0, 4), (1, 64, 64), (True, 64, 4), (1, 48, 4), (1, 64, 4, 3)])
def test_params_are_checked(wrong: tuple[int, ...]):
    with pytest.raises(ValueError, match="NormForwardParams needs"):
        NormForwardParams(*wrong)


def test_no_cotangent_of_the_total():
    inputs = RmsNormCase("", rows=4, columns=32, residual=True).inputs()
    cotangents = NormResults(cotangents_of(inputs).out, None)
    with interpret_triton():
        got = run(BACKEND, inputs, cotangents, params_of(32))
    check(got, oracle(inputs, cotangents))
