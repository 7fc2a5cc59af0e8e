"""Conformance of the Triton kernels of the selective scan, by Triton's interpreter; what selection sees of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check, check_candidates, run_both
from tests.kernels.conftest import A100, H100
from tests.kernels.selective_scan.conformance import BOTH, OP, ScanConformance, cotangents_of, named, oracle, small
from tilewright.kernels.selective_scan.cases import SelectiveScanCase
from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs
from tilewright.kernels.selective_scan.triton.params import MAX_STATE, ScanParams, piece_size
from tilewright.kernels.selective_scan.triton.selective_scan import TritonSelectiveScan
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonSelectiveScan()


class TestWholeSequences(ScanConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, inputs: SelectiveScanInputs) -> tuple[ScanParams, ScanParams]:
        return ScanParams(8, 8), ScanParams(8, 4)


class TestPieces(TestWholeSequences):
    """Several pieces of a sequence, and blocks that do not cover the channels evenly."""

    cases = tuple(
        small(f"pieces_{case.name}", **{name: getattr(case, name) for name in ("batch", "ids", "cum", "row_lengths")},
              length=case.length, initial_state=case.initial_state, return_state=case.return_state)
        for case in TestWholeSequences.cases
        if case.name in ("rows", "lengths", "packed", "segments")
    )  # fmt: skip
    poisons = ("the next sequence", "a segment before")

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("tilewright.kernels.selective_scan.inputs.CHUNK", 8)

    def params(self, inputs: SelectiveScanInputs) -> tuple[ScanParams, ScanParams]:
        assert piece_size(inputs, ScanParams(piece=8)) < inputs.length
        return ScanParams(4, 4, piece=8), ScanParams(4, 2, piece=8)


@pytest.mark.parametrize("piece", [0, 8])
def test_several_chunks_of_a_piece(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilewright.kernels.selective_scan.inputs.CHUNK", 8)
    inputs = small("", length=27, channels=3, state=2, **BOTH).inputs()
    cotangents = cotangents_of(inputs)
    params = ScanParams(4, 8, piece=2 * piece), ScanParams(4, 4, piece=2 * piece)
    with interpret_triton():
        call = jax.jit(lambda *given: named(*run_both(BACKEND, *given, params, OP.residuals)))
        got = jax.block_until_ready(call(inputs, cotangents))
    check(got, oracle(inputs, cotangents))


def test_vmap():
    inputs = small("", length=8, channels=2, state=2).inputs()
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), inputs)
    with interpret_triton():
        got = jax.block_until_ready(jax.jit(jax.vmap(lambda each: BACKEND.forward(each, ScanParams(2, 8)).out))(many))
    for index in range(2):
        one = jax.tree.map(lambda x: x[index], many)  # noqa: B023
        np.testing.assert_allclose(got[index], oracle(one, cotangents_of(one))["out"], rtol=1e-5, atol=1e-5)


def structs(**fields: Any) -> SelectiveScanInputs:
    args, options = SelectiveScanCase("", **fields).abstract_arguments()
    return OP.prepare(*args, **options)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("length", [1, 100, 4096, 1 << 20])
@pytest.mark.parametrize(("channels", "state"), [(5120, 16), (64, 128), (3, 1)])
def test_what_ships_can_run(batch: int, length: int, channels: int, state: int):
    inputs = structs(batch=batch, length=length, channels=channels, state=state, dtype="bfloat16")
    assert not BACKEND.not_supported_reasons(inputs, H100, "forward")
    for direction, found in check_candidates(BACKEND, inputs, H100).items():
        for params in found:
            assert inputs.chunk % params.block_t == 0, direction
            size = piece_size(inputs, params)
            assert size % inputs.chunk == 0
            assert size * channels < 1 << 31 or size == inputs.chunk


def test_few_channels_are_computed_in_pieces():
    few, many = (BACKEND.heuristic(structs(batch=n, length=32768, channels=5120), H100, "forward") for n in (1, 32))
    assert few.piece
    assert not many.piece
    assert few.piece * few.block_d < 32768 * 32


def test_reasons():
    fine = structs(channels=64)
    assert not BACKEND.not_supported_reasons(fine, A100, "backward")
    assert BACKEND.not_supported_reasons(fine, Device("cpu", "cpu"), "forward")
    double = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), fine)
    assert any("not float64" in why for why in BACKEND.not_supported_reasons(double, H100, "forward"))
    for fields, said in (
        ({"state": MAX_STATE + 1}, "states of at most 128"),
        ({"length": 0}, "need tokens"),
        ({"batch": 3, "length": 1 << 30}, "tokens, got"),
    ):
        assert any(said in why for why in BACKEND.not_supported_reasons(structs(**fields), H100, "forward")), said


@pytest.mark.parametrize("wrong", [(0, 8), (48, 8), (32, 16), (32, 8, 64), (32, 8, 1, 12), (32, 8, 1, -8), (True, 8)])
def test_params_are_checked(wrong: tuple[int, ...]):
    with pytest.raises(ValueError, match="ScanParams needs"):
        ScanParams(*wrong)
