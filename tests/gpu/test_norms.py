"""The norms in Triton on a GPU: conformance, and every heuristic and a few candidates at real sizes."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check
from tests.kernels.norms.conformance import NormConformance, cotangents_of, oracle, run
from tilewright.kernels.norms.cases import LayerNormCase, NormCase, RmsNormCase
from tilewright.kernels.norms.inputs import NormInputs
from tilewright.kernels.norms.triton.backend import TritonNorm
from tilewright.kernels.op.backend import Backend
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

BACKEND = TritonNorm()

CASES: tuple[NormCase, ...] = tuple(
    dataclasses.replace(case, rows=rows, columns=columns)
    for case in (
        RmsNormCase("", dtype="bfloat16", residual=True),
        LayerNormCase("", dtype="bfloat16"),
        LayerNormCase("", residual=True, shift=100.0, residual_shift=1000.0),
    )
    for rows, columns in ((1, 16384), (300, 12288), (70, 20480), (1000, 3000), (5000, 256), (20, 65536), (9, 4097))
)


class TestTriton(NormConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = BACKEND

    def params(self, problem: NormInputs) -> tuple[Any, Any]:
        return BACKEND.heuristic(problem, current_device(), "forward"), BACKEND.heuristic(
            problem, current_device(), "backward"
        )


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{type(case).__name__}-{case.dtype}-{case.rows}x{case.columns}"
)
def test_at_real_sizes(case: NormCase):
    """Repeatable bit for bit, as right as the formula; memory is not left as it was found."""
    inputs, device = case.inputs(), current_device()
    problem, cotangents = inputs.structs, cotangents_of(inputs)
    exact = oracle(inputs, cotangents)
    every = [
        [BACKEND.heuristic(problem, device, way), *list(BACKEND.candidates(problem, device, way))[:3]]
        for way in ("forward", "backward")
    ]
    for params in zip(*every, strict=False):
        got, again = (run(BACKEND, inputs, cotangents, params) for _ in range(2))
        check(got, exact)
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))


def test_in_a_program():
    """Under jit, grad and vmap, by the public function."""
    from tilewright.modules import rms_norm

    x, weight = jnp.linspace(-1, 2, 6 * 5 * 64).reshape(6, 5, 64), jnp.linspace(0.5, 1.5, 64)

    def loss(x: Any, weight: Any, platform: str) -> Any:
        return jnp.sum(jnp.sin(jax.vmap(lambda x: rms_norm(x, weight, platform=platform))(x)))

    got, want = (
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, weight, platform) for platform in ("triton", "xla")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
