"""The two ops: what they take, give, and how they are differentiated, mapped and split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.norms.conformance import check, cotangents_of, oracle
from tilewright.kernels.norms.cases import NormCase
from tilewright.kernels.norms.inputs import NormResults
from tilewright.kernels.norms.op import LayerNorm, RmsNorm

OPS: dict[str, Any] = {"rms": RmsNorm(), "layer": LayerNorm()}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_results_and_gradients(kind: Any, residual: bool):
    case = NormCase("", kind, (2, 5), 24, bias=kind == "layer", residual=residual, weight_offset=float(kind == "rms"))
    inputs = case.inputs()
    cotangents = cotangents_of(inputs)
    positional, options = case.arguments()
    residual_array = options.pop("residual")

    def call(residual: Any, *arrays: Any) -> Any:
        return OPS[kind](*arrays, residual=residual, **options)

    found, pull_back = jax.vjp(call, residual_array, *positional)
    out, total = found if residual else (found, None)
    d_residual, *gradients = pull_back((cotangents.out, cotangents.total) if residual else cotangents.out)
    got = {"out": out, **{f"d_{name}": x for name, x in zip(("x", "weight", "bias"), gradients, strict=False)}}
    if residual:
        got |= {"total": total, "d_residual": d_residual}
    check(got, oracle(inputs, NormResults(cotangents.out, cotangents.total)))


def test_split_rows():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    case = NormCase("", rows=(8, 3), columns=16)
    (x, weight), _ = case.arguments()
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.NamedSharding(mesh, P("data", None, None)))
        loss = lambda x, weight: (OPS["rms"](x, weight) ** 3).sum()
        d_x, d_weight = jax.jit(jax.grad(loss, (0, 1)))(split, weight)
    want = jax.grad(loss, (0, 1))(x, weight)
    assert jax.typeof(d_x).sharding.spec == P("data", None, None)
    for got, exact in zip((d_x, d_weight), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "arguments", "options"),
    [
        ("rank 1 or more", (1.0,), {}),
        ("floating-point", (jnp.ones((2, 3), jnp.int32),), {}),
        ("weight must be", (jnp.ones((2, 3)), jnp.ones(2)), {}),
        ("residual must be like x", (jnp.ones((2, 3)),), {"residual": jnp.ones(3)}),
        ("eps=-1", (jnp.ones((2, 3)),), {"eps": -1.0}),
    ],
)
def test_what_an_op_does_not_take(said: str, arguments: Any, options: Any):
    with pytest.raises(ValueError, match=said):
        OPS["rms"](*arguments, **options)
