"""Conformance of the XLA backend of the causal convolution, and of float64, which it alone has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.causal_conv1d.conformance import CASES, ConvConformance, cotangents_of, inputs_of, oracle
from tests.kernels.conformance import run_both
from tilewright.kernels.causal_conv1d.inputs import ConvInputs
from tilewright.kernels.causal_conv1d.xla import XlaConv
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

PARAMS = (FwdParams(), BwdParams())


class TestXla(ConvConformance):
    backend = XlaConv()

    def params(self, problem: ConvInputs) -> tuple[Any, Any]:
        return PARAMS


def test_float64():
    inputs = inputs_of(CASES["packed_states"])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, inputs)
        cotangents = cotangents_of(wide)
        results, gradients = jax.jit(lambda *call: run_both(XlaConv(), *call, PARAMS))(wide, cotangents)
    want = oracle(wide, cotangents)
    got = {"out": results.out, "state": results.state, **{f"d_{name}": x for name, x in gradients.items()}}
    assert got.keys() == want.keys()
    for name, exact in want.items():
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], exact, rtol=1e-12, atol=1e-12)


def test_a_wider_state_stays_wide():
    """A float32 state before two tokens of bfloat16: what is left of it is not rounded."""
    state = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 3)), jnp.float32)
    inputs = inputs_of(CASES["three_tokens"]).replace(initial_state=state)
    inputs = inputs.replace(x=inputs.x[:, :2].astype(jnp.bfloat16))
    found = XlaConv().forward(inputs, FwdParams()).state
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[..., 0], state[..., 2])
    np.testing.assert_array_equal(found[0, :, 1:], inputs.x[0].T.astype(jnp.float32))
