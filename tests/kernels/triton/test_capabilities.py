"""Triton kernels compile for every compute capability that is served; what is not is refused before LLVM sees it."""

import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.conftest import H100
from tilewright.errors import BuildError
from tilewright.kernels.triton import recorded_launches, requirements, unavailable
from tilewright.kernels.triton.requirements import PTX_VERSIONS
from tilewright.ops.types import Device

pytest.importorskip("triton")

from tests.kernels.triton import kernels
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.compiler import _compiled, compiled
from tilewright.kernels.triton.interpreter import interpret_triton

# LLVM ends a process with SIGABRT where it cannot make code for a target, so each target has a process of its own.
COMPILING = """
import sys
import jax
from tilewright.kernels import kernel
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.norms.cases import RmsNormCase
from tilewright.kernels.norms.triton.backend import TritonNorm
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device

capability = tuple(map(int, sys.argv[1:]))
device = Device("gpu", "NVIDIA", capability, 100)
attention = AttentionCase("", batch=1, q_length=128, heads=2, head_dim=64, dtype="bfloat16", causal=True)
norm = RmsNormCase("", rows=64, columns=1024, dtype="bfloat16")
for op, backend, case in (
    ("flash_attention", TritonFlashAttention(), attention), ("rms_norm", TritonNorm(), norm)
):
    args, kwargs = case.abstract_arguments()
    inputs = kernel(op).inputs_of(prepared(kernel(op), args, kwargs, concrete=False)[0])
    assert not backend.not_supported_reasons(inputs, device, "forward")
    params = backend.heuristic(inputs, device, "forward")
    with recorded_launches() as launches, interpret_triton():
        jax.eval_shape(lambda inputs: backend.forward(inputs, params), inputs)
    for each in launches:
        made = report(each, capability)
        assert made.registers > 0
        print(made.name, *(line for line in made.texts["ptx"].splitlines() if line.startswith((".version", ".target"))))
"""


@pytest.mark.parametrize("capability", PTX_VERSIONS, ids=lambda pair: "sm_{}{}".format(*pair))
def test_real_kernels_compile(capability: tuple[int, int]):
    # To machine code, by the ptxas that Triton brings; tests/aot bounds their spills.
    command = [sys.executable, "-c", COMPILING, *map(str, capability)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    version, number = PTX_VERSIONS[capability], 10 * capability[0] + capability[1]
    lines = process.stdout.splitlines()
    assert len(lines) == 2, lines
    for line in lines:
        assert f".version {version // 10}.{version % 10}" in line
        assert f".target sm_{number}{'a' if number >= 90 else ''}" in line


def test_the_oldest_ptx_isa_that_has_the_target():
    """Of CUDA 12.8 wherever that does: a driver of that version loads the code."""
    assert {pair: version for pair, version in PTX_VERSIONS.items() if version != 87} == {
        (10, 3): 88, (11, 0): 90, (12, 1): 88,
    }  # fmt: skip


@pytest.mark.parametrize("capability", [(8, 8), (10, 1), (13, 0)])
def test_unknown_capabilities_are_declined(capability: tuple[int, int]):
    (why,) = unavailable(Device("gpu", "NVIDIA Next", capability, 100))
    assert "compiles for compute capabilities 8.0, 8.6," in why
    assert "got NVIDIA Next ({}.{})".format(*capability) in why
    with pytest.raises(BuildError, match=r"Triton kernels compile for compute capabilities 8\.0, .*, got capability="):
        compiled(_launch(), capability)


def test_an_older_triton_is_declined_where_its_ptxas_does_not_know_the_target():
    with mock.patch.object(requirements, "_version", return_value=(3, 6, 0)):
        thor = unavailable(Device("gpu", "NVIDIA Thor", (11, 0), 20))
        assert thor == ["needs triton 3.7 or later, got 3.6.0: pip install 'tilewright[triton]'"]
        assert unavailable(H100) == []


def test_the_ptx_version_is_part_of_the_key_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """Code of another version, which a process with another table made before, is not what a later one loads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}
    for version in (87, 88, 87):
        table = mock.patch.object(requirements, "PTX_VERSIONS", {(12, 0): version})
        with table, mock.patch("tilewright.kernels.triton.compiler.PTX_VERSIONS", {(12, 0): version}):
            _compiled.cache_clear()
            kernel = compiled(_launch(), (12, 0))
            assert f".version {version // 10}.{version % 10}" in kernel.asm["ptx"]
            found.setdefault(version, kernel.hash)
            assert found[version] == kernel.hash
    _compiled.cache_clear()
    assert len(set(found.values())) == 2


def _launch() -> Any:
    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    with recorded_launches() as launches, interpret_triton():
        jax.eval_shape(
            lambda x: launch(kernels.scaled, [x], [x], grid=[1], scalars={"length": 16}, constants={"block": 16}), x
        )
    return launches[0]
