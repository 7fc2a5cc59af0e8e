"""The two ops: what they take, give, and how they are differentiated, mapped and split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.conformance import check
from tests.kernels.norms.conformance import KINDS, cotangents_of, oracle
from tilewright.kernels.norms.inputs import NormResults
from tilewright.modules import layer_norm, rms_norm

OPS: dict[str, Any] = {"rms": rms_norm, "layer": layer_norm}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_results_and_gradients(kind: str, residual: bool):
    inputs = KINDS[kind]("", leading=(2,), rows=5, columns=24, residual=residual).inputs()
    cotangents = cotangents_of(inputs)
    arrays = [x for x in (inputs.x, inputs.weight, inputs.bias) if x is not None]

    def call(residual: Any, *arrays: Any) -> Any:
        return OPS[kind](*arrays, residual=residual)

    found, pull_back = jax.vjp(call, inputs.residual, *arrays)
    out, total = found if residual else (found, None)
    d_residual, *gradients = pull_back((cotangents.out, cotangents.total) if residual else cotangents.out)
    got = {"out": out, **{f"d_{name}": x for name, x in zip(("x", "weight", "bias"), gradients, strict=False)}}
    if residual:
        got |= {"total": total, "d_residual": d_residual}
    check(got, oracle(inputs, NormResults(cotangents.out, cotangents.total)))


def test_gemma():
    x, weight = jnp.asarray([3.0, 4.0]), jnp.asarray([0.5, -1.0])
    np.testing.assert_allclose(rms_norm(x, weight, weight_offset=1.0, eps=0.0), [1.5 * 3 / 12.5**0.5, 0.0], rtol=1e-6)


def test_a_row_that_vmap_hands_out():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 16)), jnp.float32)
    np.testing.assert_allclose(jax.vmap(jax.vmap(layer_norm))(x), layer_norm(x), rtol=1e-6, atol=1e-6)


def test_split_rows():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    inputs = KINDS["rms"]("", leading=(8,), rows=3, columns=16).inputs()
    x, weight = inputs.x, inputs.weight
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.NamedSharding(mesh, P("data", None, None)))
        loss = lambda x, weight: (rms_norm(x, weight) ** 3).sum()
        d_x, d_weight = jax.jit(jax.grad(loss, (0, 1)))(split, weight)
    want = jax.grad(loss, (0, 1))(x, weight)
    assert jax.typeof(d_x).sharding.spec == P("data", None, None)
    for got, exact in zip((d_x, d_weight), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "arguments", "options"),
    [
        ("rank 1 at least", (1.0,), {}),
        ("floating-point array", (jnp.ones((2, 3), jnp.int32),), {}),
        ("weight must be", (jnp.ones((2, 3)), jnp.ones(2)), {}),
        ("residual must be as x", (jnp.ones((2, 3)),), {"residual": jnp.ones(3)}),
        ("eps must not be negative, got -1", (jnp.ones((2, 3)),), {"eps": -1.0}),
    ],
)
def test_what_an_op_does_not_take(said: str, arguments: Any, options: Any):
    with pytest.raises(ValueError, match=said):
        rms_norm(*arguments, **options)
