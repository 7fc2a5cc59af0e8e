"""What is found of compilers, headers and devices, and what is said of what is missing."""

import os
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import H100
from tilewright.kernels.cuda import CURAND, cutlass
from tilewright.kernels.cuda.devices import architecture, capability_of, device_values, parse_architecture
from tilewright.kernels.cuda.toolchain import command, find_compiler, missing, package_folders
from tilewright.ops.types import Device


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which Python looks for modules, before all others."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("// a header\n")


def test_the_compiler_of_cuda_home_is_found(nvcc):
    compiler = find_compiler()
    assert compiler.nvcc == nvcc.folder / "bin" / "nvcc"
    assert compiler.version == "99.1.0"
    assert compiler.capabilities == {80, 90}
    assert "99.1.0" in compiler.identity
    assert missing(90) == []


def test_the_compiler_of_a_wheel_is_found(nvcc, monkeypatch, site):
    os.makedirs(site / "nvidia")
    os.rename(nvcc.folder, site / "nvidia" / "cu13")
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("PATH", os.path.dirname(str(sys.executable)) + ":/usr/bin:/bin")
    compiler = find_compiler()
    assert compiler is not None
    assert compiler.nvcc == site / "nvidia" / "cu13" / "bin" / "nvcc"


def test_no_compiler_is_a_reason(no_nvcc):
    (reason,) = missing(90, [cutlass()])
    assert "there is no nvcc" in reason


def test_an_nvcc_that_does_not_run_is_none(no_nvcc, tmp_path, monkeypatch):
    write(tmp_path / "broken" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "broken"))
    assert find_compiler() is None


def test_no_host_compiler_is_a_reason(nvcc, monkeypatch):
    monkeypatch.setenv("NVCC_CCBIN", "/nonesuch/g++")
    (reason,) = missing(90)
    assert "host compiler" in reason


def test_an_architecture_too_old_or_new_is_a_reason(nvcc):
    assert missing(70) == ["nvcc 99.1.0 compiles for 80, 90, not for 70"]


def test_missing_headers_are_a_reason_that_says_what_to_install(nvcc, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert missing(90, [cutlass(), CURAND]) == [
        "the headers of CUTLASS are missing: pip install nvidia-cutlass",
        "the headers of cuRAND are missing: pip install nvidia-curand",
    ]


def test_headers_of_wheels_are_found_and_come_after_the_compilers_own(nvcc, site):
    source = site / "cutlass_library" / "source"
    write(source / "include" / "cutlass" / "cutlass.h")
    for folder in ("tools/util/include", "examples/41"):
        (source / folder).mkdir(parents=True)
    write(site / "nvidia" / "cu13" / "include" / "curand_kernel.h")
    assert missing(90, [cutlass("examples/41"), CURAND]) == []
    folders = [source / "include", source / "tools/util/include", source / "examples/41"]
    assert package_folders(cutlass("examples/41")) == tuple(folders)
    assert package_folders(CURAND) == (site / "nvidia" / "cu13" / "include",)
    line = command(find_compiler(), "90a", [Path("mine")], [cutlass("examples/41")], ["-DMINE"])
    assert line[line.index("-isystem") + 1] == str(folders[0])
    assert {"-Imine", "-DMINE", "-DTILEWRIGHT_ARCH=90", "arch=compute_90a,code=sm_90a"} <= set(line)


@pytest.mark.parametrize(("headers", "agree"), [("99010", True), ("99020", False), ("13010", False)])
def test_headers_of_another_cuda_are_a_reason_where_cutlass_is_included(nvcc, site, monkeypatch, headers, agree):
    # nvcc from one release's wheel and the runtime from another's: what jax[cuda13] beside a pinned PyTorch installs.
    os.makedirs(site / "nvidia")
    root = site / "nvidia" / "cu13"
    os.rename(nvcc.folder, root)
    script = root / "bin" / "nvcc"
    script.write_text(script.read_text().replace("TOP=/nonesuch", f"TOP={root}"))
    write(root / "include" / "cuda_runtime_api.h")
    (root / "include" / "cuda_runtime_api.h").write_text(f"#pragma once\n#define CUDART_VERSION  {headers}\n")
    write(site / "cutlass_library" / "source" / "include" / "cutlass" / "cutlass.h")
    (site / "cutlass_library" / "source" / "tools" / "util" / "include").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert missing(90) == []
    reasons = missing(90, [cutlass()])
    assert len(reasons) == (not agree)
    assert all("nvcc 99.1.0 and the CUDA headers beside it" in reason for reason in reasons)


def test_a_package_that_lacks_a_folder_is_missing(site):
    write(site / "cutlass_library" / "source" / "include" / "cutlass" / "cutlass.h")
    assert package_folders(cutlass("examples/nonesuch")) != site / "cutlass_library" / "source"


@pytest.mark.parametrize(
    ("text", "capability", "target"),
    [
        ("80", 80, "80"),
        ("90a", 90, "90a"),
        ("90", 90, "90a"),
        ("sm_86", 86, "86"),
        ("9.0", 90, "90a"),
        ("12.1", 121, "121a"),
    ],
)
def test_architectures(text, capability, target):
    assert parse_architecture(text) == capability
    assert architecture(capability) == target


@pytest.mark.parametrize("text", ["", "hopper", "9", "a", "-90", "49", "9.0.0", "²0"])
def test_what_is_no_architecture(text):
    with pytest.raises(ValueError, match="no CUDA architecture"):
        parse_architecture(text)


def test_devices():
    assert capability_of(H100) == 90
    assert device_values(H100) == {"capability": 90, "shared_memory": 227 << 10, "multiprocessors": 132}
    assert device_values(Device("gpu", "NVIDIA A10", (8, 6), 72))["shared_memory"] == 99 << 10
    assert device_values(Device("gpu", "of tomorrow", (19, 3), 1))["shared_memory"] == 48 << 10
    assert device_values(Device("cpu", "cpu")) is None
