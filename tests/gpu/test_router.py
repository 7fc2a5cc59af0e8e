"""The router in Triton on a GPU: conformance, and what it gives beside XLA at real sizes."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.router.conformance import RouterConformance
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.router.cases import RouterCase
from tilewright.kernels.router.inputs import RouterInputs
from tilewright.kernels.router.op import TopKRouter
from tilewright.kernels.router.triton.backend import TritonRouter
from tilewright.modules import top_k_router
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

CASES = TopKRouter.cases.by_device["gpu"] | {
    "most experts": RouterCase("", tokens=3000, experts=1024, k=32, normalize=False, dtype="float16"),
    "odd": RouterCase("", tokens=1001, experts=60, k=6, scoring="sigmoid", num_groups=5, top_groups=3),
}


class TestTriton(RouterConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonRouter()

    def params(self, problem: RouterInputs) -> tuple[Any, Any]:
        device = current_device()
        return self.backend.heuristic(problem, device, "forward"), self.backend.heuristic(problem, device, "backward")


@pytest.mark.parametrize("name", CASES)
def test_at_real_sizes(name: str):
    """By logits alone the choice is that of XLA; with scores only ties of their roundings may differ."""
    (logits, k), options = CASES[name].arguments()
    cotangents = jnp.linspace(-1.0, 2.0, logits.shape[0] * k).reshape(-1, k)

    # As arguments: XLA would sort constants itself, on the host, for minutes.
    def run(platform: str, logits: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        weights, pull_back, experts = jax.vjp(
            lambda logits: top_k_router(logits, k, **options, platform=platform), logits, has_aux=True
        )
        return weights, experts, pull_back(cotangents)[0].astype(jnp.float32)

    logits, program = jnp.asarray(logits), jax.jit(run, static_argnums=0)
    got, want = (program(platform, logits, cotangents) for platform in ("triton", "xla"))
    same = (got[1] == want[1]).all(-1)
    by_logits = options["bias"] is None and options["num_groups"] == options["top_groups"]
    assert same.all() if by_logits else same.mean() > 0.999
    for ours, theirs, tolerance in ((got[0], want[0], 1e-5), (got[2], want[2], 2e-2 if logits.itemsize == 2 else 1e-5)):
        np.testing.assert_allclose(np.asarray(ours)[same], np.asarray(theirs)[same], rtol=tolerance, atol=1e-5)
