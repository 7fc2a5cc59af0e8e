"""The selective scan in Triton on a GPU: conformance, and what it gives beside XLA at real sizes."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.selective_scan.conformance import BOTH, OP, ScanCase, ScanConformance, cotangents_of, small
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.selective_scan.cases import SelectiveScanCase, SelectiveScanStepCase
from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs
from tilewright.kernels.selective_scan.triton.params import ScanParams
from tilewright.kernels.selective_scan.triton.selective_scan import TritonSelectiveScan
from tilewright.modules import selective_scan, selective_scan_step
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")


class TestTriton(ScanConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonSelectiveScan()
    cases: ClassVar[tuple[ScanCase, ...]] = (
        *ScanConformance.cases,
        small("several_chunks", batch=2, length=300, channels=70, state=16, **BOTH),
        small("wide_state", length=70, channels=9, state=128),
        small("packed_chunks", length=290, channels=33, cum=(1, 1, 66, 67, 140, 289), **BOTH),
        small("segments_chunks", length=140, ids=((4,) * 65 + (2,) * 40 + (-1,) * 5 + (2,) * 30,)),
    )

    def params(self, inputs: SelectiveScanInputs) -> tuple[Any, Any]:
        device = current_device()
        return self.backend.heuristic(inputs, device, "forward"), self.backend.heuristic(inputs, device, "backward")


class TestPieces(TestTriton):
    """The same with sequences in pieces of one chunk, and blocks of two warps."""

    def params(self, inputs: SelectiveScanInputs) -> tuple[Any, Any]:
        return ScanParams(64, 4, 2, piece=64), ScanParams(64, 4, 2, piece=64)


def _errors(got: Any, want: Any) -> dict[str, float]:
    """Root mean squares of differences, relative to those of the wanted arrays."""
    wide = {name: (np.asarray(got[name], np.float64), np.asarray(want[name], np.float64)) for name in want}
    return {name: float(np.sqrt(np.mean((a - b) ** 2) / max(np.mean(b**2), 1e-30))) for name, (a, b) in wide.items()}


REAL = {
    "mamba_130m": SelectiveScanCase("", batch=8, length=2048, channels=1536, dtype="bfloat16"),
    "one_long_sequence": SelectiveScanCase("", length=8192, channels=5120, dtype="bfloat16"),
    "packed": SelectiveScanCase("", length=8192, channels=2048, packed=9, dtype="bfloat16"),
    "segments": SelectiveScanCase("", batch=2, length=4096, channels=1024, segments=5),
    "state_64": SelectiveScanCase("", batch=2, length=1024, channels=2048, state=64, groups=8, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", REAL)
def test_at_real_sizes(name: str):
    """Results and gradients are those of XLA in float32, but for the rounding of inputs, of which both get the same."""
    args, options = REAL[name].arguments()
    arrays = dict(zip(["u", "delta", "A", "B", "C", "D"], args, strict=True)) | options
    floats = {n: x for n, x in arrays.items() if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)}
    others = {n: x for n, x in arrays.items() if n not in floats}
    weight = jax.random.normal(jax.random.key(3), args[0].shape)

    def program(platform: str) -> Any:
        def loss(floats: Any) -> Any:
            out = selective_scan(**floats, **others, platform=platform)
            return jnp.sum(out.astype(jnp.float32) * weight), out

        return jax.jit(jax.grad(loss, has_aux=True))

    (got, got_out), (want, want_out) = (program(platform)(floats) for platform in ("triton", "xla"))
    errors = _errors(got | {"out": got_out}, want | {"out": want_out})
    assert max(errors.values()) < (1e-2 if REAL[name].dtype == "bfloat16" else 1e-4), errors
    again, _ = program("triton")(floats)
    for each, x in got.items():
        np.testing.assert_array_equal(x, again[each], err_msg=each)


@pytest.mark.parametrize("piece", [0, 512])
@pytest.mark.parametrize("block_t", [2, 4])
def test_configs_agree(piece: int, block_t: int):
    """Every config of the backward pass, at a size where its scratch memory is read long after it is written."""
    args, options = SelectiveScanCase("", batch=4, length=2048, channels=2048, dtype="bfloat16").arguments()
    backend, inputs = TritonSelectiveScan(), OP.prepare(*args, **options)
    cotangents = cotangents_of(inputs)

    @functools.partial(jax.jit, static_argnums=2)
    def run(inputs: Any, cotangents: Any, params: ScanParams) -> Any:
        residuals = OP.residuals(backend.forward(inputs, ScanParams()))
        return backend.backward(inputs, residuals, cotangents, params)

    got, want = (run(inputs, cotangents, each) for each in (ScanParams(32, block_t, 1, piece), ScanParams(64, 2, 2)))
    errors = _errors(got, want)
    assert max(errors.values()) < 1e-2, errors


def test_a_step_updates_its_pool_in_place():
    """The results are XLA's, and with a donated pool no slot is copied."""
    case = SelectiveScanStepCase("", rows=64, slots=300, channels=5120, dtype="bfloat16")
    (pool, *rest), options = case.arguments()
    programs = {
        platform: jax.jit(
            lambda pool, rest, platform=platform: selective_scan_step(pool, *rest, **options, platform=platform),
            donate_argnums=0,
        )
        for platform in ("triton", "xla")
    }
    (got, got_pool), (want, want_pool) = (program(jnp.copy(pool), rest) for program in programs.values())
    assert max(_errors({"out": got, "pool": got_pool}, {"out": want, "pool": want_pool}).values()) < 1e-2
    kept = np.setdiff1d(np.arange(300), np.asarray(options["state_indices"]))
    np.testing.assert_array_equal(np.asarray(got_pool)[kept], np.asarray(pool)[kept])
    memory = programs["triton"].lower(pool, rest).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes // 4
