"""Sampling in Triton on a GPU: conformance, and what it gives beside XLA at real sizes."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sampling.conformance import SampleConformance, inputs_of
from tests.kernels.sampling.linear_conformance import LinearSampleConformance
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.sampling.cases import LinearSampleCase, SampleCase
from tilewright.kernels.sampling.inputs import LinearSampleInputs, SampleInputs
from tilewright.kernels.sampling.ops.linear_sample import LinearSample
from tilewright.kernels.sampling.ops.sample import Sample
from tilewright.kernels.sampling.triton.linear_sample import TritonLinearSample
from tilewright.kernels.sampling.triton.sample import TritonSample
from tilewright.modules import linear_log_probs, linear_sample, sample
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

EVERY: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7, "return_log_probs": True}
CASES = Sample.cases.by_device["gpu"] | {
    "every limit": SampleCase("", rows=128, vocab=128256, **EVERY),
    "log-probabilities": SampleCase("", rows=33, vocab=50257, return_log_probs=True, dtype="float16"),
    "many of top_k": SampleCase("", rows=16, vocab=131072, top_k=20000, return_log_probs=True),
    "flat": SampleCase("", rows=16, vocab=131072, scale=1.0, top_p=0.9, return_log_probs=True),
    "greedy": SampleCase("", rows=64, vocab=131072, temperature=0.0, dtype="bfloat16"),
    "largest": SampleCase("", rows=3, vocab=1 << 20, top_k=50, top_p=0.9),
}


class TestTriton(SampleConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonSample()

    def params(self, problem: SampleInputs) -> tuple[Any, Any]:
        return self.backend.heuristic(problem, current_device(), "forward"), None


@pytest.mark.parametrize("name", CASES)
def test_at_real_sizes(name: str):
    """The tokens are those of XLA: where two are as good, its exponentials and logarithms may choose another."""
    (logits, key), options = CASES[name].arguments()
    program = jax.jit(lambda platform, *arrays: sample(*arrays, **options, platform=platform), static_argnums=0)
    got, want = (jax.tree.leaves(program(platform, logits, key)) for platform in ("triton", "xla"))
    same = np.asarray(got[0]) == np.asarray(want[0])
    assert same.mean() > 0.98
    if len(got) > 1:
        np.testing.assert_allclose(np.asarray(got[1])[same], np.asarray(want[1])[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limits", [{}, EVERY, {"top_p": 0.9}], ids=["all", "every limit", "top_p"])
def test_no_token_depends_on_neighbours_or_on_the_config(limits: dict[str, Any]):
    """The same tokens alone, in other batches, and with every config."""
    backend, device = TritonSample(), current_device()
    inputs = inputs_of(SampleCase("", rows=48, vocab=131072, **limits))
    want = np.asarray(jax.jit(lambda x: backend.forward(x, backend.heuristic(x.structs, device, "forward")))(inputs)[0])
    for params in backend.candidates(inputs.structs, device, "forward"):
        got = jax.jit(lambda x, params=params: backend.forward(x, params))(inputs)[0]
        np.testing.assert_array_equal(got, want)
    for rows in (np.array([5]), np.arange(40, 48), np.arange(48)[::-1]):
        part: Any = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        got = jax.jit(lambda x: backend.forward(x, backend.heuristic(x.structs, device, "forward")))(part)[0]
        np.testing.assert_array_equal(got, want[rows])


class TestLinearTriton(LinearSampleConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonLinearSample()

    def params(self, problem: LinearSampleInputs) -> tuple[Any, Any]:
        return self.backend.heuristic(problem, current_device(), "forward"), None


LINEAR = LinearSample.cases.by_device["gpu"] | {
    "odd": LinearSampleCase("", rows=77, d=1000, vocab=50257, bias=True, dtype="float16", temperature=0.7),
    "greedy": LinearSampleCase("", rows=64, d=2048, vocab=32000, dtype="bfloat16", temperature=0.0),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_at_real_sizes(name: str):
    """The tokens are those of XLA but for the rounding of logits, and so are their log-probabilities."""
    arrays, options = LINEAR[name].arguments()
    program = jax.jit(lambda platform, *x: linear_sample(*x, **options, platform=platform), static_argnums=0)
    got, want = (program(platform, *arrays) for platform in ("triton", "xla"))
    same = np.asarray(got[0]) == np.asarray(want[0])
    assert same.mean() > 0.95
    np.testing.assert_allclose(np.asarray(got[1])[same], np.asarray(want[1])[same], rtol=1e-3, atol=1e-3)
    if options["temperature"] in (0.0, 1.0):
        head = {name: options[name] for name in ("vocab_first", "logits_soft_cap")}
        exact = linear_log_probs(arrays[0], arrays[1], got[0], **head)
        np.testing.assert_allclose(got[1], exact, rtol=1e-3, atol=1e-3)
