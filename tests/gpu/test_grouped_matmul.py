"""The grouped matmul on a GPU: conformance of every backend, and Triton's configs at real sizes."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from tests.kernels.grouped_matmul.conformance import GroupedConformance, check, cotangent_of, inputs_of
from tests.kernels.grouped_matmul.oracle import oracle
from tilewright.kernels.grouped_matmul.cases import GroupedMatmulCase
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs, GroupedProblem
from tilewright.kernels.grouped_matmul.ragged_dot import RaggedDot
from tilewright.kernels.grouped_matmul.triton.backend import TritonGroupedMatmul
from tilewright.kernels.grouped_matmul.xla.backend import XlaGroupedMatmul
from tilewright.kernels.registry import Implementation
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def exact(inputs: GroupedInputs) -> GroupedInputs:
    """The same with float32 that is not rounded to TensorFloat-32."""
    options = dataclasses.replace(inputs.options, precision=jax.lax.Precision.HIGHEST)
    return dataclasses.replace(inputs, options=options)


class _OnGpu(GroupedConformance):
    def params(self, problem: GroupedProblem) -> tuple[Any, Any]:
        device = current_device()
        return self.backend.heuristic(problem, device, "forward"), self.backend.heuristic(problem, device, "backward")

    def compiled(self, inputs: GroupedInputs) -> Any:
        run = super().compiled(exact(inputs))
        return lambda inputs, d_out: run(exact(inputs), d_out)


class TestXla(_OnGpu):
    backend: ClassVar[Implementation[Any, Any, Any, Any, Any]] = XlaGroupedMatmul()


class TestRaggedDot(_OnGpu):
    backend: ClassVar[Implementation[Any, Any, Any, Any, Any]] = RaggedDot()


class TestTriton(_OnGpu):
    backend: ClassVar[Implementation[Any, Any, Any, Any, Any]] = TritonGroupedMatmul()


@pytest.mark.parametrize(
    "case",
    [
        GroupedMatmulCase("large", rows=3000, k=512, n=704, groups=6, dtype="bfloat16"),
        GroupedMatmulCase("decode", rows=70, k=1024, n=512, groups=32, dtype="float16", transpose_rhs=True),
        GroupedMatmulCase("float32", rows=1500, k=256, n=320, groups=5),
        GroupedMatmulCase("odd", rows=1500, k=130, n=77, groups=5, dtype="bfloat16"),
    ],
    ids=lambda case: case.name,
)
def test_tritons_candidates_at_real_sizes(case: GroupedMatmulCase):
    """Right, and repeatable bit for bit."""
    pytest.importorskip("triton")
    backend, inputs = TritonGroupedMatmul(), exact(inputs_of(case))
    problem, d_out, device = GroupedProblem.of(inputs), cotangent_of(inputs), current_device()
    want = oracle(inputs, d_out)
    forward, backward = (list(backend.candidates(problem, device, way)) for way in ("forward", "backward"))
    for number in range(max(len(forward), len(backward))):
        params = forward[number % len(forward)], backward[number % len(backward)]

        @jax.jit
        def both(inputs: GroupedInputs, d_out: Any, params: Any = params) -> dict[str, Any]:
            gradients = backend.backward(inputs, None, d_out, params[1])
            return {"out": backend.forward(inputs, params[0])} | {f"d_{name}": x for name, x in gradients.items()}

        got, again = both(inputs, d_out), both(inputs, d_out)
        check(got, want, str(params))
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))
