"""Conformance of the XLA backend of the router, and of float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.router.conformance import CASES, RouterConformance, inputs_of
from tilewright.kernels.router.inputs import RouterInputs
from tilewright.kernels.router.xla import XlaRouter
from tilewright.modules import top_k_router
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class TestXla(RouterConformance):
    backend = XlaRouter()

    def params(self, problem: RouterInputs) -> tuple[Any, Any]:
        return FwdParams(), BwdParams()


def test_float64():
    logits = np.random.default_rng(0).standard_normal((7, 12))
    suite = TestXla()
    with jax.enable_x64(True):
        inputs = inputs_of(CASES[0]).replace(logits=jnp.asarray(logits))
        cotangents = suite.cotangents(inputs)
        (weights, experts), pull_back = jax.vjp(lambda x: top_k_router(x, 2), inputs.logits)
        (gradient,) = pull_back((cotangents[0], np.zeros(experts.shape, jax.dtypes.float0)))
        exact, _ = suite.oracle(inputs, cotangents)
    assert weights.dtype == gradient.dtype == np.float64
    assert experts.dtype == np.int32
    np.testing.assert_allclose(weights, exact["weights"], rtol=1e-13)
    np.testing.assert_allclose(gradient, exact["d_logits"], rtol=1e-12, atol=1e-15)
