"""Steps from a pool of states: against whole sequences, slot by slot, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.causal_conv1d.conformance import inputs_of, oracle
from tests.kernels.causal_conv1d.steps import CASES, check_step, inputs_of_step
from tests.kernels.causal_conv1d.steps import oracle as step_oracle
from tilewright.kernels.causal_conv1d.cases import ConvCase
from tilewright.kernels.causal_conv1d.xla import XlaConvStep
from tilewright.modules import causal_conv1d, causal_conv1d_step
from tilewright.ops.utils.datacarrier import FwdParams

X, POOL, WEIGHT = jnp.ones((2, 8)), jnp.ones((2, 8, 3)), jnp.ones((8, 4))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_xla(case: Any):
    inputs = inputs_of_step(case)
    check_step(inputs, jax.jit(lambda inputs: XlaConvStep().forward(inputs, FwdParams()))(inputs))


def test_decoding_continues_a_prefill():
    """Tokens one by one, then three at once, from the state that the first five left."""
    case = ConvCase("", batch=2, length=12, channels=8, return_state=True, initial_state=True)
    inputs = inputs_of(case)
    want = oracle(inputs, type("Zeros", (), {"out": jnp.zeros(inputs.x.shape), "state": None})())
    arguments = inputs.weight, inputs.bias
    _, state = causal_conv1d(
        inputs.x[:, :5], *arguments, activation="silu", initial_state=inputs.initial_state, return_state=True
    )
    pool = jnp.full((7, 8, 3), jnp.nan).at[jnp.asarray([4, 1])].set(state)
    step = jax.jit(lambda x, pool: causal_conv1d_step(x, pool, *arguments, activation="silu", state_indices=[4, 1]))
    found = []
    for t in range(5, 9):
        y, pool = step(inputs.x[:, t], pool)
        found.append(y[:, None])
    y, pool = step(inputs.x[:, 9:], pool)
    np.testing.assert_allclose(jnp.concatenate([*found, y], 1), want["out"][:, 5:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(pool[jnp.asarray([4, 1])], inputs.x[:, 9:].swapaxes(1, 2))
    assert np.isnan(np.delete(np.asarray(pool), [4, 1], 0)).all()


def test_a_roll_back():
    """Rejected tokens of a speculative step are gone if its state went to another slot."""
    (x, pool, weight, bias), _ = CASES["moves"].arguments()
    read, write = jnp.asarray([0, 1, 2]), jnp.asarray([3, 4, 5])
    options: dict[str, Any] = {"activation": "silu", "state_indices": read}
    _, after = causal_conv1d_step(x[:3], pool, weight, bias, write_indices=write, **options)
    np.testing.assert_array_equal(after[:3], pool[:3])
    once, _ = causal_conv1d_step(x[:3, :1], pool, weight, bias, **options)
    again, _ = causal_conv1d_step(x[:3, :1], after, weight, bias, **options)
    np.testing.assert_array_equal(once, again)


def test_split_by_channels():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    inputs = inputs_of_step(CASES["indices"])
    want = step_oracle(inputs)
    arrays = inputs.x, inputs.conv_pool, inputs.weight, inputs.bias
    specs = P(None, None, "model"), P(None, "model"), P("model"), P(None)
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        call = lambda *a: causal_conv1d_step(*a, activation="silu", state_indices=inputs.state_indices)
        y, pool = jax.jit(call)(*split)
        by_token = jax.device_put(inputs.x, jax.NamedSharding(mesh, P(None, "model")))
        with pytest.raises(ValueError, match="by channels alone"):
            jax.jit(call)(by_token, *arrays[1:])
    assert jax.typeof(pool).sharding.spec == P(None, "model", None)
    np.testing.assert_allclose(y, want["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(pool, want["pool"])


def test_no_gradient():
    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda x: causal_conv1d_step(x, POOL, WEIGHT)[0].sum())(X)


@pytest.mark.parametrize(
    ("said", "error", "arguments", "options"),
    [
        ("x must be a floating-point array", ValueError, (jnp.ones(8), POOL, WEIGHT), {}),
        ("1 to 8 tokens", ValueError, (jnp.ones((2, 9, 8)), POOL, WEIGHT), {}),
        ("1 to 8 tokens", ValueError, (jnp.ones((2, 0, 8)), POOL, WEIGHT), {}),
        (r"\[any, 8, 3\]", ValueError, (X, jnp.ones((2, 3, 8)), WEIGHT), {}),
        (r"\[any, 8, 3\]", ValueError, (X, jnp.ones((2, 8, 3), jnp.int8), WEIGHT), {}),
        ("must have rows=2 slots", ValueError, (X, jnp.ones((5, 8, 3)), WEIGHT), {}),
        ("state_indices must have the shape", ValueError, (X, POOL, WEIGHT), {"state_indices": [0]}),
        ("write_indices must hold integers", TypeError, (X, POOL, WEIGHT), {"write_indices": [0.0, 1.0]}),
        ("activation must be", ValueError, (X, POOL, WEIGHT), {"activation": True}),
    ],
)
def test_refusals(said: str, error: Any, arguments: Any, options: Any):
    with pytest.raises(error, match=said):
        causal_conv1d_step(*arguments, **options)
