"""What the generated suite shares."""

from typing import Any

import pytest
from jax._src.lib import gpu_triton

from tilewright.kernels.cuda import toolchain


class _TritonCall:
    """A stand-in for the part of jaxlib that is only where CUDA's plugin is."""

    def __init__(self, *args: Any):
        self.args = args

    def to_proto(self, *_: Any) -> bytes:
        return b"proto"


@pytest.fixture
def without_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in CUDA C++, which take minutes to build, have no compiler; Triton's are lowered without a GPU."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: ["there is no nvcc"])
    monkeypatch.setattr(gpu_triton, "TritonKernel", lambda *args: args, raising=False)
    monkeypatch.setattr(gpu_triton, "TritonKernelCall", _TritonCall, raising=False)
    monkeypatch.setattr(gpu_triton, "create_array_parameter", lambda *args: args, raising=False)
    monkeypatch.setattr(gpu_triton, "create_scalar_parameter", lambda *args: args, raising=False)
