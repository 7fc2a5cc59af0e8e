"""Linear attention in XLA on a GPU: conformance in one loop and in segments, and layers of real sizes in 16 bits."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.conformance import Found
from tests.kernels.linear_attention.conformance import LinearAttentionConformance, exact, inputs_of
from tests.kernels.linear_attention.gpu_conformance import relative_error
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

    def check(
        self, got: Found, inputs: LinearAttentionInputs, cotangents: Any, factor: float = 2.0, where: object = ""
    ) -> None:
        if inputs.value.dtype.itemsize == 4:
            super().check(got, inputs, cotangents, factor, where)
            return
        # Of 16-bit values matmuls are in TensorFloat-32 here, and gradients of float32 arrays have its digits.
        want = exact(inputs, cotangents)
        errors = {name: relative_error(x, want[name]) for name, x in got.items()}
        assert all(error < 4e-3 for error in errors.values()), (where, errors)


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
    assert relative_error(got.out, want.out) < 4e-3
    assert relative_error(got.state, want.state) < 2e-3


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
