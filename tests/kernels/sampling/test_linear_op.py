"""The function of hidden states: its distribution, its relation to ``sample``, and what it takes and refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

from tests.support.draws import draw
from tilewright.modules import linear_log_probs, linear_sample, sample

X, WEIGHT = draw(6, 32), 0.5 * draw(32, 300, seed=1)
KEY = jax.random.key(7)


def equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_have_the_distribution(temperature: float):
    count = 40000
    x, weight = jnp.broadcast_to(X[:1, :8], (count, 8)), WEIGHT[:8, :12]
    tokens, log_probs = jax.jit(lambda x: linear_sample(x, weight, KEY, temperature=temperature))(x)
    logits = np.asarray(X[0, :8], np.float64) @ np.asarray(weight, np.float64) / temperature
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert stats.chisquare(np.bincount(tokens, minlength=12), count * probabilities).pvalue > 0.01
    np.testing.assert_allclose(log_probs, np.log(probabilities)[np.asarray(tokens)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
def test_it_is_sample_of_the_logits(temperature: float):
    for options in ({}, {"logits_soft_cap": 3.0}, {"bias": draw(300, seed=2)}):
        logits = X @ WEIGHT + options.get("bias", 0.0)
        cap = options.get("logits_soft_cap")
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        want = sample(logits, KEY, temperature=temperature, return_log_probs=True)
        got = linear_sample(X, WEIGHT, KEY, temperature=temperature, **options)
        equal(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
        equal(linear_sample(X, WEIGHT.T, KEY, temperature=temperature, vocab_first=True, **options)[0], got[0])


def test_log_probs_are_those_of_linear_log_probs():
    for temperature in (0.0, 1.0):
        tokens, log_probs = linear_sample(X, WEIGHT, KEY, temperature=temperature)
        np.testing.assert_allclose(log_probs, linear_log_probs(X, WEIGHT, tokens), rtol=1e-5, atol=1e-5)


def test_rows_and_keys():
    temperature = jnp.array([1.0, 0.0, 0.5, 2.0, 1.0, 0.1])
    want = linear_sample(X, WEIGHT, KEY, temperature=temperature)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(6))
    got = linear_sample(X.reshape(2, 3, 32), WEIGHT, keys.reshape(2, 3), temperature=temperature.reshape(2, 3))
    equal(got[0].reshape(6), want[0])
    for i in range(6):
        equal(linear_sample(X[i], WEIGHT, keys[i], temperature=temperature[i])[0], want[0][i])
    mapped = jax.vmap(lambda x, key, t: linear_sample(x, WEIGHT, key, temperature=t))(X, keys, temperature)
    equal(mapped[0], want[0])
    scanned = jax.lax.scan(lambda c, xs: (c, linear_sample(xs[0], WEIGHT, xs[1])), 0, (X, keys))[1]
    equal(scanned[0], linear_sample(X, WEIGHT, keys)[0])


def test_float64():
    with jax.enable_x64(True):
        got = linear_sample(*(jnp.asarray(np.asarray(x), jnp.float64) for x in (X, WEIGHT)), KEY)
    assert [x.dtype for x in got] == [np.int32, np.float32]
    equal(got[0], linear_sample(X, WEIGHT, KEY)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": WEIGHT.T}, ValueError, "weight must be"),
        ({"weight": jnp.zeros((32, 0))}, ValueError, "must have a vocabulary"),
        ({"x": jnp.zeros((6, 32), jnp.int32)}, ValueError, "x must be a floating-point array"),
        ({"key": jax.random.split(KEY, 5)}, ValueError, "one for each row"),
        ({"temperature": -1.0}, ValueError, "temperature must not be negative"),
        ({"bias": jnp.zeros(299)}, ValueError, "bias must be"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be positive"),
        ({"top_k": 5}, TypeError, "no argument 'top_k'"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str):
    arguments = {"x": X, "weight": WEIGHT, "key": KEY} | change
    with pytest.raises(error, match=f"linear_sample.*{message}"):
        linear_sample(**arguments)


def test_it_has_no_gradient():
    with pytest.raises(TypeError, match="see linear_log_probs"):
        jax.grad(lambda x: linear_sample(x, WEIGHT, KEY)[1].sum())(X)


def test_rows_split_over_explicit_axes():
    want = linear_sample(X, WEIGHT, KEY, temperature=0.7)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("a", None)))
        got = jax.jit(lambda x, weight: linear_sample(x, weight, KEY, temperature=0.7))(x, WEIGHT)
    assert jax.typeof(got[0]).sharding.spec == P("a")
    equal(got[0], want[0])
