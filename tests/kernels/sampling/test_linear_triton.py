"""Conformance of the Triton backend of ``linear_sample``, by Triton's interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check_same
from tests.kernels.conftest import H100
from tests.kernels.sampling.conformance import check_draw, named
from tests.kernels.sampling.linear_conformance import LinearSampleConformance, inputs_of, oracle_of
from tilewright.kernels import kernel
from tilewright.kernels.sampling.cases import LinearSampleCase
from tilewright.kernels.sampling.inputs import LinearSampleInputs
from tilewright.kernels.sampling.triton.linear_sample import TritonLinearSample, TritonLinearSampleParams
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonLinearSample()
PARAMS = TritonLinearSampleParams(TritonTile(16, 128, 16))


class TestTriton(LinearSampleConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, problem: LinearSampleInputs) -> tuple[Any, Any]:
        return PARAMS, None


def drawn_by(inputs: LinearSampleInputs, params: TritonLinearSampleParams = PARAMS) -> dict[str, Any]:
    with interpret_triton(), jax.default_matmul_precision("highest"):
        return named(jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs)))


def test_tiles_of_several_groups():
    inputs = inputs_of(LinearSampleCase("", rows=20, d=32, vocab=700, temperature=0.8))
    want = oracle_of(inputs)
    for tile in (TritonTile(16, 256, 32), TritonTile(32, 128, 16)):
        check_draw(drawn_by(inputs, TritonLinearSampleParams(tile)), want, tolerance=2e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_vmap(shared: bool):
    """Of rows with one matrix, which are one call, and with one each."""
    inputs = inputs_of(LinearSampleCase("", rows=4, d=16, vocab=200, bias=True, temperature=0.7))
    weight = jnp.stack([inputs.weight, -inputs.weight])
    given = inputs.replace(
        x=inputs.x.reshape(2, 2, -1),
        key=jnp.asarray(inputs.key).reshape(2, 2, 2),
        temperature=jnp.asarray(inputs.temperature).reshape(2, 2),
        weight=inputs.weight if shared else weight,
    )
    axes = given.replace(x=0, key=0, temperature=0, weight=None if shared else 0, bias=None)
    with recorded_launches() as launches, interpret_triton(), jax.default_matmul_precision("highest"):
        got = jax.block_until_ready(jax.jit(jax.vmap(lambda x: named(BACKEND.forward(x, PARAMS)), (axes,)))(given))
    assert launches[-1].outputs[0].shape == ((4,) if shared else (2,))
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        one = inputs.replace(
            x=inputs.x[rows],
            key=inputs.key[rows],
            temperature=jnp.asarray(inputs.temperature)[rows],
            weight=inputs.weight if shared else weight[i],
        )
        check_same({name: x[i] for name, x in got.items()}, drawn_by(one))


def prepared(**fields: Any) -> Any:
    case = dataclasses.replace(LinearSampleCase("", d=4096, vocab=128256, dtype="bfloat16"), **fields)
    args, kwargs = case.abstract_arguments()
    return kernel("linear_sample").prepare(*args, **kwargs).structs


def test_two_programs_share_a_multiprocessor():
    """One loads while the other draws; the noise stays in the layout of the tensor cores."""
    with recorded_launches() as launches, interpret_triton():
        jax.eval_shape(lambda x: BACKEND.forward(x, BACKEND.heuristic(x, H100, "forward")), prepared())
    tiles, rows = (report(each, (9, 0)) for each in launches)
    assert tiles.faults == rows.faults == []
    assert 2 * tiles.registers * 32 * launches[0].num_warps <= 1 << 16
    assert 2 * tiles.shared_bytes <= 227 << 10
    assert tiles.texts["ttgir"].count("tt.join") == 1


@pytest.mark.parametrize("fields", [{}, {"rows": 1}, {"rows": 512}, {"d": 64, "dtype": "float32"}], ids=str)
def test_candidates(fields: dict[str, Any]):
    inputs = prepared(**fields)
    listed = list(BACKEND.candidates(inputs, H100, "forward"))
    assert BACKEND.heuristic(inputs, H100, "forward") == listed[0]
    assert len(listed) == len(set(listed)) >= 2
    for params in listed:
        assert untagged(tagged(params)) == params
        assert params.tile.rows * params.tile.columns <= 32 * 32 * params.tile.num_warps


def test_reasons():
    mixed = prepared().replace(weight=jax.ShapeDtypeStruct((4096, 1 << 21), np.float32))
    why = BACKEND.not_supported_reasons(mixed, H100, "forward")
    assert why == [
        "x and weight must have one dtype, got bfloat16 and float32",
        "vocab=2097152 must be at most 1048576",
    ]
    double = prepared().replace(x=jax.ShapeDtypeStruct((64, 4096), np.float64))
    assert "x must be one of" in BACKEND.not_supported_reasons(double, H100, "forward")[0]
    assert BACKEND.not_supported_reasons(prepared(), Device("cpu", "cpu"), "forward")


def test_params_are_checked():
    with pytest.raises(ValueError, match="multiple of 128"):
        TritonLinearSampleParams(TritonTile(16, 64, 16))
