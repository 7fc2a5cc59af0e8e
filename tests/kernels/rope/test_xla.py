"""Conformance of the XLA backend of the rotary embedding, and of float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.rope.conformance import RopeConformance, inputs_of, turned
from tilewright.kernels.rope.cases import RopeCase
from tilewright.kernels.rope.inputs import RopeInputs
from tilewright.kernels.rope.xla import XlaRope
from tilewright.modules import rope
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class TestXla(RopeConformance):
    backend = XlaRope()

    def params(self, problem: RopeInputs) -> tuple[Any, Any]:
        return FwdParams(), BwdParams()


def test_float64():
    x = np.random.default_rng(0).standard_normal((7, 2, 16))
    positions = np.array([0, 1, -5, 2**31, 2**40, 7, 123456789])
    with jax.enable_x64(True):
        got = rope(jnp.asarray(x), jnp.asarray(positions), base=500.0)
        inputs = inputs_of(RopeCase("", dtype="float64", head_dim=16)).replace(
            x=jnp.asarray(x), positions=jnp.asarray(positions)[:, None], base=500.0
        )
        wanted = turned(inputs, x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
