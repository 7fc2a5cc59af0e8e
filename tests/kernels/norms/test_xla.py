"""Conformance of the XLA backend of the norms, and of float64, which it alone has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.norms.conformance import NormConformance, cotangents_of, oracle, run
from tilewright.kernels.norms.cases import LayerNormCase, RmsNormCase
from tilewright.kernels.norms.inputs import NormInputs
from tilewright.kernels.norms.xla import XlaNorm
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

PARAMS = (FwdParams(), BwdParams())


class TestXla(NormConformance):
    backend = XlaNorm()

    def params(self, problem: NormInputs) -> tuple[Any, Any]:
        return PARAMS


def test_float64():
    inputs = LayerNormCase("", rows=4, columns=30, residual=True).inputs()
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), inputs)
        cotangents = cotangents_of(inputs)
        got, want = run(XlaNorm(), inputs, cotangents, PARAMS), oracle(inputs, cotangents)
    for name, exact in want.items():
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], exact, rtol=1e-12, atol=1e-12)


def test_symbolic_rows():
    (rows,) = jax.export.symbolic_shape("rows")

    def forward(x: Any, weight: Any) -> Any:
        return XlaNorm().forward(NormInputs(x, weight=weight, **RmsNormCase("").options), FwdParams()).out

    x, weight = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jnp.ones(16)
    assert jax.export.export(jax.jit(forward))(x, weight).out_avals[0].shape == (rows, 16)
