"""The launcher, really compiled, on a stand-in for the CUDA runtime: what it checks, sets, launches and reports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import nvcc_marks
from tests.support import fake_nvcc
from tests.support.row_sum import row_sum_table
from tilewright.kernels.cuda import BuildCache, Group, build
from tilewright.kernels.cuda.toolchain import find_compiler, missing

ROOT = Path(__file__).parents[3]
REASONS = missing(90)
pytestmark = nvcc_marks(REASONS)

# In a process of its own, whose CUDA runtime is the stand-in. Says of each call what was done, and its error.
PROGRAM = """
import ctypes, os, sys
import numpy as np
from tests.support.ffi_call import Caller

libc = ctypes.CDLL(None)
runtime = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
call = Caller(ctypes.CDLL(sys.argv[2]).tilewright_call)

def row_sum(title, variant, rows=2, width=8, ordinal=0, workspace=None, **change):
    print("#", title, flush=True)
    inputs = [np.zeros((rows, width), np.float32), np.zeros(0, np.float32)]
    needed = 4 * rows if workspace is None else workspace
    outputs = [np.zeros(rows, np.float32), np.zeros(needed, np.uint8)]
    attributes = {"variant": variant, "problem": np.array([rows, width]), "scale": np.float32(2), "offset": np.int64(5)}
    attributes |= change
    given = {name: value for name, value in attributes.items() if value is not None}
    error = call(inputs, outputs, given, ordinal)
    libc.fflush(None)
    print("error:", error, flush=True) if error else None

row_sum("first call", "shared1024")
row_sum("second call", "shared1024")
row_sum("much shared memory", "shared61440", width=5000)
row_sum("again", "shared61440", width=5000)
row_sum("other device", "shared61440", width=5000, ordinal=1)
row_sum("other device again", "shared61440", width=5000, ordinal=1)
row_sum("too much for the other device", "shared65536", width=16384, ordinal=1)
row_sum("too much for any device", "shared1048576")
row_sum("no rows", "shared1024", rows=0)
row_sum("too wide", "shared1024", width=300)
row_sum("unknown variant", "nonesuch")
row_sum("no variant", None)
row_sum("too many fields", "shared1024", problem=np.array([1, 2, 3]))
row_sum("problem of another type", "shared1024", problem=np.array([1.0, 2.0]))
row_sum("no offset", "shared1024", offset=None)
row_sum("offset of another type", "shared1024", offset=np.float32(5))
row_sum("workspace too small", "shared1024", workspace=7)
row_sum("no such device", "shared1024", ordinal=9)
row_sum("another capability", "shared1024", ordinal=2)
os.environ["FAKE_CUDA_FAIL"] = "1"
row_sum("a launch that fails", "shared1024", ordinal=1)
del os.environ["FAKE_CUDA_FAIL"]
row_sum("the call after it", "shared1024", ordinal=1)
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What each call did, by its title."""
    if fake_nvcc.HOST_COMPILER is None:
        pytest.skip(fake_nvcc.NEEDED)
    folder = tmp_path_factory.mktemp("launcher")
    table = row_sum_table(folder, "-cudart", "shared")
    (library,) = build([Group(table, "all", 90)], cache=BuildCache(folder / "builds")).values()
    major = find_compiler().version.split(".")[0]
    runtime, versions = folder / f"libcudart.so.{major}", folder / "versions"
    versions.write_text(f"libcudart.so.{major} {{ global: *; }};\n")
    subprocess.run(
        [fake_nvcc.HOST_COMPILER, "-x", "c", "-shared", "-fPIC", ROOT / "tests" / "support" / "fake_cudart.c", "-o",
         runtime, f"-Wl,-soname,{runtime.name},--version-script,{versions}"],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, runtime, library], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("# ")[1:]
    return {title: lines for title, *lines in (part.strip().splitlines() for part in parts)}


def launches(device=0, shared=1024, blocks=2):
    return [
        f"launch to_workspace grid {blocks} block 32 shared {shared} stream 7 on device {device}",
        f"launch from_workspace grid 1 block {blocks} shared 0 stream 7 on device {device}",
    ]


def test_a_device_is_described_once(calls):
    asked = [f"get_attribute {attribute} of device 0" for attribute in (75, 76, 97, 16)]
    assert calls["first call"] == asked + launches()
    assert calls["second call"] == launches()


def test_shared_memory_is_asked_for_once_for_each_kernel_and_device(calls):
    allowed = "allow to_workspace 61440 bytes on device "
    assert calls["much shared memory"] == [f"{allowed}0", *launches(shared=61440)]
    assert calls["again"] == launches(shared=61440)
    asked = [f"get_attribute {attribute} of device 1" for attribute in (75, 76, 97, 16)]
    wanted = [f"{allowed}1", *launches(1, 61440)]
    assert calls["other device"] == ["set_device 1", *asked, *wanted, "set_device 0"]
    assert calls["other device again"] == ["set_device 1", *launches(1, 61440), "set_device 0"]


def test_requirements_are_checked_again(calls):
    assert calls["too wide"] == [
        "error: tilewright: shared1024: width must be at most 256 (rows=2, width=300)",
    ]
    (*_, error) = calls["another capability"]
    assert "shared1024 is not for compute capability 7.0" in error
    (*others, error) = calls["too much for the other device"]
    assert others == ["set_device 1", "set_device 0"]
    assert "shared65536: shared_bytes must be at most shared_memory" in error


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("unknown variant", 'there is no variant "nonesuch" in this group'),
        ("no variant", 'there is no attribute "variant"'),
        ("too many fields", "a problem has 2 fields, not 3"),
        ("problem of another type", 'attribute "problem": '),
        ("no offset", 'there is no attribute "offset"'),
        ("offset of another type", 'attribute "offset": '),
        ("workspace too small", "shared1024 needs a workspace of 8 bytes as its last result"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_error(title, message, calls):
    (error,) = calls[title]
    assert message in error


def test_errors_of_cuda_are_errors_of_the_call(calls):
    assert calls["too much for any device"] == [
        "allow to_workspace 1048576 bytes on device 0",
        "error: cudaFuncSetAttribute(MaxDynamicSharedMemorySize): cudaErrorOther: error 1",
    ]
    assert calls["no such device"][-1] == "error: cudaSetDevice: cudaErrorOther: error 101"
    assert calls["a launch that fails"] == [
        "set_device 1",
        launches(1)[0],
        "set_device 0",
        "error: cudaLaunchKernelEx: cudaErrorIllegalAddress: error 700",
    ]
    assert calls["the call after it"] == ["set_device 1", *launches(1), "set_device 0"]


def test_a_grid_without_blocks_is_no_launch(calls):
    assert calls["no rows"] == [launches(blocks=0)[1]]
