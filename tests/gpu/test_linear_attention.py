"""Linear attention in XLA on a GPU: conformance in one loop and in segments, and layers of real sizes in 16 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.conformance import LinearAttentionConformance, inputs_of
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.linear_attention.xla.backend import XlaLinearAttention
from tilewright.kernels.linear_attention.xla.params import XlaLinearAttentionParams
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


class TestXla(LinearAttentionConformance):
    backend = XlaLinearAttention()

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return XlaLinearAttentionParams(16), XlaLinearAttentionParams(16)


class TestSegments(TestXla):
    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return XlaLinearAttentionParams(16, 2), XlaLinearAttentionParams(16, 2)


@pytest.mark.parametrize("length", [1000, 4096])
@pytest.mark.parametrize("name", LinearAttention.cases.by_device["gpu"])
def test_layers_of_models(name: str, length: int):
    """Results and states beside those by token in float32, whose products are not rounded to TensorFloat-32."""
    case = dataclasses.replace(LinearAttention.cases.by_device["gpu"][name], length=length, state=True)
    inputs = inputs_of(case)
    params = XlaLinearAttention().heuristic(inputs.structs, current_device(), "forward")
    got = jax.jit(lambda inputs: XlaLinearAttention().forward(inputs, params))(inputs)
    want = jax.jit(linear_attention_reference)(inputs)
    for found, exact, limit in ((got.out, want.out, 4e-3), (got.state, want.state, 2e-3)):
        error = np.asarray(found.astype(jnp.float32) - exact)
        assert np.sqrt(np.mean(error**2)) < limit * np.sqrt(np.mean(np.asarray(exact) ** 2))


def test_gradients_repeat_bitwise_where_sequences_are_packed():
    case = dataclasses.replace(
        LinearAttention.cases.by_device["gpu"]["gated_delta_rule"], length=2000, sequences="cum_seqlens", state=True
    )
    inputs = inputs_of(case)
    suite = TestXla()
    params = suite.backend.heuristic(inputs.structs, current_device(), "backward")
    cotangents = suite.cotangents(inputs)
    run = jax.jit(lambda i, c: suite.backend.backward(i, suite.backend.forward(i, params), c, params))
    first, *others = ({n: np.asarray(x).tobytes() for n, x in run(inputs, cotangents).items()} for _ in range(5))
    assert all(each == first for each in others)
