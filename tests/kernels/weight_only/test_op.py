"""Matmuls of packed weights through the public functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.weight_only.conformance import CASES, weight_of
from tilewright.errors import UnsupportedError
from tilewright.kernels.weight_only.op import WEIGHT_ONLY_MATMUL
from tilewright.modules import PackedWeight, glu, matmul, quantize_weight, weight_only_matmul


def packed_weight(**options: Any) -> PackedWeight:
    return quantize_weight(np.random.default_rng(0).standard_normal((128, 24)).astype(np.float32), **options)


X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 128)), jnp.float32)


@pytest.mark.parametrize("name", ["groups_of_32", "int8_float16", "mxfp4", "ordered"])
def test_the_oracle_is_the_definition(name: str):
    args, options = CASES[name].arguments()
    inputs = WEIGHT_ONLY_MATMUL.prepare(*args, **options)
    inputs = inputs.replace(x=inputs.x.astype(jnp.float32), out_dtype="float32")
    want = np.asarray(inputs.x, np.float64) @ weight_of(inputs)
    np.testing.assert_allclose(WEIGHT_ONLY_MATMUL.reference(inputs), want, rtol=1e-4, atol=1e-3)


def test_matmul_takes_one_in_place_of_a_matrix():
    weight = packed_weight(symmetric=False, group=32)
    want = np.asarray(X, np.float64) @ np.asarray(weight.dequantize(), np.float64)
    for found in (matmul(X, weight), jax.jit(matmul)(X, rhs=weight), jax.vmap(matmul, (0, None))(X, weight)):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert matmul(X, weight, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    (call,) = tilewright.explain(matmul, X, weight)
    assert (call.op, call.config.backend) == ("weight_only_matmul", "xla")
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        rows = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
        (call,) = tilewright.explain(matmul, rows, weight)
        assert call.config.backend == "triton"


def test_the_gradient_of_x_is_by_the_transposed_weight():
    weight = packed_weight()
    d_out = np.random.default_rng(2).standard_normal((2, 3, 24))
    (got,) = jax.vjp(lambda x: matmul(x, weight), X)[1](jnp.asarray(d_out, jnp.float32))
    np.testing.assert_allclose(got, d_out @ np.asarray(weight.dequantize(), np.float64).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu(activation: Any):
    gate, up = packed_weight(), packed_weight(format="int8")
    x = X.astype(jnp.bfloat16)
    found = glu(x, gate, up, activation=activation)
    wide = [np.asarray(x, np.float64) @ np.asarray(each.dequantize(jnp.bfloat16), np.float64) for each in (gate, up)]
    act: Any = jax.nn.silu if activation == "silu" else jax.nn.gelu
    want = np.asarray(act(jnp.asarray(wide[0], jnp.float32)), np.float64) * wide[1]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda w: matmul(X, w, transpose_rhs=True), "a packed weight is multiplied as it is"),
        (lambda w: matmul(X, w, precision="highest"), "a packed weight is multiplied as it is"),
        (lambda w: matmul(X[..., :100], w), "must have the k=128 of the weight"),
        (lambda w: matmul(X, jax.tree.map(lambda x: x[None], w)), "must have the axes"),
        (lambda w: glu(X, w, w.dequantize()), "must both be packed"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, format="int8"), "codes must be uint8"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, group=64), "scales must be"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, zeros=w.scales), "zeros must be integers"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, order=[1, 2]), "order must be integers"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, order=np.arange(1, 129)), "order must"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, zeros=np.full((1, 24), 9)), "zeros must"),
        (lambda w: weight_only_matmul(X, w.codes, scales=w.scales, format="mxfp4"), "32 in mxfp4"),
        (lambda w: weight_only_matmul(X.astype(jnp.int8), w.codes, scales=w.scales), "x must be a floating-point"),
    ],
)
def test_wrong_calls(call: Any, said: str):
    with pytest.raises((ValueError, TypeError), match=said):
        call(packed_weight())


def test_a_named_platform_is_strict():
    with pytest.raises(UnsupportedError, match="x must be float16 or bfloat16"):
        matmul(X, packed_weight(), platform="triton")
