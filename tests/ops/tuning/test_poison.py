"""Elements that a kernel leaves unwritten show, whatever its memory held before."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support.hostile import Halting, Hostile, Way
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.tuning.workload import Workload

SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
ffi::Error twice(ffi::Buffer<ffi::F32> x, int64_t left_out, ffi::ResultBuffer<ffi::F32> out) {
  for (int64_t i = 0; i < int64_t(x.element_count()); ++i) {
    if (i != left_out) out->typed_data()[i] = 2 * x.typed_data()[i];
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Twice, twice, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Attr<int64_t>("left_out")
    .Ret<ffi::Buffer<ffi::F32>>());
"""
X = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder: Path = tmp_path_factory.mktemp("twice")
    (folder / "twice.cc").write_text(SOURCE)
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{jax.ffi.include_dir()}",
        "twice.cc",
        "-o",
        "twice.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "twice.so"))
    jax.ffi.register_ffi_target("tests_twice", jax.ffi.pycapsule(library.Twice), platform="cpu")
    return "tests_twice"


class Compiled(Hostile):
    """Leaves out an element where it is not "right"."""

    def __init__(self, target: str, *ways: str):
        super().__init__(*ways)
        self.target = target

    def run(self, x: Any, *, cfg: Way) -> Any:
        call = jax.ffi.ffi_call(self.target, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, left_out=-1 if cfg.name == "right" else 1234)


def test_only_the_complete_one_stands(twice: str):
    work = Workload(Invocation(Compiled(twice, "right", "incomplete"), (X,)), ConfigSelectorChain())
    for _ in range(3):
        assert work.recheck(Way("right")) == []
        assert work.recheck(Way("incomplete"))


def test_it_never_wins(twice: str, monkeypatch: pytest.MonkeyPatch):
    # Where the memory still holds what the right one wrote there, the first check finds nothing.
    check = Workload.check
    monkeypatch.setattr(Workload, "check", lambda self, results: [w for w in check(self, results) if "non-finite" in w])
    kernel = Compiled(twice, "incomplete", "right")
    # The first keeps its place against all that take as long.
    tuner = Tuner(0, 1, timer=Halting())
    (call,) = Autotuner(tuner, chooser=ConfigSelectorChain()).tune(Invocation(kernel, (X,)))
    assert call.winner.config == Way("right")
    assert "non-finite" in call.candidates[0].error
