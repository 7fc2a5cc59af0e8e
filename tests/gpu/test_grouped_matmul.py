"""The grouped matmul on a GPU: conformance of every backend, and the configs of its kernels at real sizes."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from tests.kernels.conformance import check
from tests.kernels.matmul.grouped_conformance import GroupedConformance, cotangent_of, inputs_of
from tests.kernels.matmul.grouped_oracle import oracle
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.hopper.backend import HopperGroupedMatmul
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.backend import TritonGroupedMatmul
from tilewright.kernels.matmul.xla.backend import XlaGroupedMatmul
from tilewright.kernels.matmul.xla.ragged_dot import RaggedDot
from tilewright.kernels.op.backend import Backend
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def exact(inputs: MatmulInputs) -> MatmulInputs:
    """The same with float32 that is not rounded to TensorFloat-32."""
    return inputs.replace(precision=jax.lax.Precision.HIGHEST)


class _OnGpu(GroupedConformance):
    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        device = current_device()
        return self.backend.heuristic(inputs, device, "forward"), self.backend.heuristic(inputs, device, "backward")

    def compiled(self, inputs: MatmulInputs) -> Any:
        run = super().compiled(exact(inputs))
        return lambda inputs, d_out: run(exact(inputs), d_out)


class TestXla(_OnGpu):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = XlaGroupedMatmul()


class TestRaggedDot(_OnGpu):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = RaggedDot()


class TestTriton(_OnGpu):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonGroupedMatmul()


class TestHopper(_OnGpu):
    """In 16 bits, which are all that it serves."""

    backend: ClassVar[Backend[Any, Any, Any, Any]] = HopperGroupedMatmul()

    def adapted(self, case: GroupedMatmulCase) -> GroupedMatmulCase:
        return dataclasses.replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16", rhs_dtype=None)


@pytest.mark.parametrize("backend", [TritonGroupedMatmul(), HopperGroupedMatmul()], ids=lambda x: x.platform)
@pytest.mark.parametrize(
    "case",
    [
        GroupedMatmulCase("large", rows=3000, k=512, n=704, groups=6, dtype="bfloat16"),
        GroupedMatmulCase("decode", rows=70, k=1024, n=512, groups=32, dtype="float16", transpose_rhs=True),
        GroupedMatmulCase("float32", rows=1500, k=256, n=320, groups=5),
        GroupedMatmulCase("long", rows=5000, k=1096, n=1544, groups=9, dtype="bfloat16"),
        GroupedMatmulCase("odd", rows=1500, k=130, n=77, groups=5, dtype="bfloat16"),
    ],
    ids=lambda case: case.name,
)
def test_candidates_at_real_sizes(case: GroupedMatmulCase, backend: Any):
    """Right, and repeatable bit for bit."""
    if backend.late_import:
        pytest.importorskip(backend.late_import)
    inputs = exact(inputs_of(case))
    d_out, device = cotangent_of(inputs), current_device()
    if declined := backend.not_supported_reasons(inputs, device, "backward"):
        pytest.skip("; ".join(declined))
    want = oracle(inputs, d_out)
    forward, backward = (list(backend.candidates(inputs, device, way)) for way in ("forward", "backward"))
    for number in range(max(len(forward), len(backward))):
        params = forward[number % len(forward)], backward[number % len(backward)]

        @jax.jit
        def both(inputs: MatmulInputs, d_out: Any, params: Any = params) -> dict[str, Any]:
            gradients = backend.backward(inputs, None, d_out, params[1])
            return {"out": backend.forward(inputs, params[0]).out} | {f"d_{name}": x for name, x in gradients.items()}

        got, again = both(inputs, d_out), both(inputs, d_out)
        check(got, want, where=str(params))
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))


@pytest.mark.parametrize("scales", ["blocks", "number"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8(dtype: str, scales: Any):
    """K of many steps: summed only by wgmma, the result would be rounded."""
    case = GroupedMatmulCase(
        "", rows=700, k=4112, n=520, groups=4, dtype=dtype, transpose_rhs=True, lhs_scale=scales, rhs_scale=scales,
        preferred_element_type="float32",
    )  # fmt: skip
    backend, inputs, device = HopperGroupedMatmul(), inputs_of(case), current_device()
    if declined := backend.not_supported_reasons(inputs, device, "forward"):
        pytest.skip("; ".join(declined))
    want = oracle(inputs, cotangent_of(inputs))["out"]
    for params in backend.candidates(inputs, device, "forward"):
        got = np.asarray(jax.jit(lambda inputs, params=params: backend.forward(inputs, params).out)(inputs), np.float64)
        # wgmma's own sums of a step have about 14 bits.
        assert np.abs(got - want).max() < 2e-3 * np.abs(want).max(), params
