"""The function: its distribution, its keys, what it takes and refuses, and how it is mapped and split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

from tests.kernels.sampling.conformance import kept_of, weights_of
from tests.support.draws import draw
from tilewright.kernels.sampling.noise import gumbel
from tilewright.modules import sample

LOGITS = draw(6, 300)
KEY = jax.random.key(7)
EVERY: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}


def equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "temperature": 2},
    ],
    ids=str,
)
def test_tokens_have_the_distribution(options: dict[str, Any]):
    logits = np.array([0.3, -1.0, 2.0, 1.5, -0.2, 0.0, 1.0, -2.0, 0.7, -np.inf, 1.2, 0.5])
    count = 40000
    tokens = jax.jit(lambda x: sample(x, KEY, **options))(jnp.broadcast_to(jnp.float32(logits), (count, 12)))
    t = options.get("temperature", 1.0)
    kept = kept_of(logits, t, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
    weights = np.where(kept, weights_of(logits, t), 0.0)
    found = np.bincount(tokens, minlength=12)
    assert not found[~kept].any()
    assert stats.chisquare(found[kept], count * weights[kept] / weights.sum()).pvalue > 0.01


def test_a_large_vocabulary_is_drawn_from_evenly():
    """Of equal logits: by groups, by lanes in a group, and by the halves of a call of the generator."""
    tokens = np.asarray(jax.jit(lambda x: sample(x, KEY))(jnp.zeros((20000, 1024), jnp.float32)))
    for parts in (tokens // 128, tokens % 128, tokens % 2, tokens // 64):
        assert stats.chisquare(np.bincount(parts)).pvalue > 0.01


def test_noise_is_gumbels():
    keys = jnp.stack([jnp.full(64, 3, jnp.uint32), jnp.arange(64, dtype=jnp.uint32)], -1)
    noise = np.asarray(gumbel(keys[:, None], jnp.arange(2000, dtype=jnp.uint32)))
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 0.01
    for first, second in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01


def test_temperature_0_is_argmax_and_small_ones_are_near_it():
    logits = jnp.round(4 * LOGITS) / 4
    want = np.argmax(logits, -1)
    equal(sample(logits, KEY, temperature=0.0), want)
    equal(sample(logits, KEY, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5), want)
    for temperature in (1e-30, 1e-40, 1e-3):
        got = sample(logits, KEY, temperature=temperature)
        equal(jnp.take_along_axis(logits, got[:, None], -1)[:, 0], logits.max(-1))
    hot = sample(jnp.tile(LOGITS[:1, :8], (4000, 1)), KEY, temperature=jnp.inf * jnp.ones(4000))
    assert stats.chisquare(np.bincount(hot, minlength=8)).pvalue > 0.01


def test_no_limit_is_said_in_several_ways():
    want = sample(LOGITS, KEY, return_log_probs=True)
    ways = ({"top_k": 0}, {"top_k": -1}, {"top_k": 300}, {"top_k": 10**12}, {"top_p": 1.0}, {"top_p": 3}, {"min_p": 0})
    for options in (*ways, {"top_k": jnp.array([300, 301, 0, -1, 2**31 - 1, -(2**31)])}, {"top_p": jnp.ones(6)}):
        equal(sample(LOGITS, KEY, **options, return_log_probs=True), want)
    small = [None] * 2
    for i, share in enumerate((0.0, 1e-20)):
        small[i] = sample(LOGITS, KEY, top_p=share)
        equal(small[i], np.argmax(LOGITS, -1))


def test_one_key_is_folded_with_the_rows_number():
    want = sample(LOGITS, KEY, **EVERY)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(6))
    equal(sample(LOGITS, folded, **EVERY), want)
    equal([sample(LOGITS[i], folded[i], **EVERY) for i in range(6)], list(want))
    equal(sample(LOGITS.reshape(2, 3, 300), KEY, **EVERY), want.reshape(2, 3))
    equal(sample(LOGITS, jax.random.key_data(KEY), **EVERY), want)
    equal(sample(LOGITS, jax.random.key_data(folded), **EVERY), want)
    assert len({tuple(np.asarray(sample(LOGITS, key))) for key in jax.random.split(KEY, 8)}) == 8


def test_other_kinds_of_keys():
    for kind in ("rbg", "unsafe_rbg"):
        keys = jax.random.split(jax.random.key(3, impl=kind), 6)
        words = jax.random.key_data(keys)[:, :2]
        equal(sample(LOGITS, keys), sample(LOGITS, words))


def test_transforms():
    keys = jax.random.split(KEY, 6)
    want = sample(LOGITS, keys, **EVERY, return_log_probs=True)
    one = lambda logits, key, t: sample(logits, key, **{**EVERY, "temperature": t}, return_log_probs=True)
    equal(jax.jit(lambda x, k: sample(x, k, **EVERY, return_log_probs=True))(LOGITS, keys), want)
    equal(jax.vmap(one, (0, 0, None))(LOGITS, keys, 0.8), want)
    equal(jax.jit(jax.vmap(one))(LOGITS, keys, jnp.full(6, 0.8, jnp.float32)), want)
    pairs = jax.vmap(one, (0, 0, None))(LOGITS.reshape(2, 3, 300), keys.reshape(2, 3), 0.8)
    equal(pairs, jax.tree.map(lambda x: x.reshape(2, 3), want))
    scanned = jax.lax.scan(lambda c, xs: (c, one(*xs, 0.8)), 0, (LOGITS, keys))[1]
    equal(scanned, want)


def test_it_generates_in_a_loop():
    def step(carry: Any, number: Any) -> Any:
        logits, token = carry
        token = sample(jnp.roll(logits, token), jax.random.fold_in(KEY, number), temperature=0.9)
        return (logits, token), token

    tokens = jax.jit(lambda x: jax.lax.scan(step, (x, jnp.int32(0)), jnp.arange(20))[1])(LOGITS[0])
    assert len(set(np.asarray(tokens).tolist())) > 10


def test_float64_is_rounded():
    with jax.enable_x64(True):
        got = sample(jnp.asarray(np.asarray(LOGITS, np.float64)), KEY, **EVERY, return_log_probs=True)
    assert [x.dtype for x in got] == [np.int32, np.float32]
    equal(got, sample(LOGITS, KEY, **EVERY, return_log_probs=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": jnp.zeros((2, 3), jnp.int32)}, ValueError, "logits must be a floating-point array"),
        ({"logits": jnp.zeros((2, 0))}, ValueError, "logits must have a vocabulary"),
        ({"key": 3}, TypeError, r"pass jax.random.key\(seed\)"),
        ({"key": np.zeros(2, np.int32)}, TypeError, "key must be made by jax.random.key"),
        ({"key": np.zeros(4, np.uint32)}, TypeError, "key must be made by jax.random.key"),
        ({"key": np.zeros((5, 2), np.uint32)}, ValueError, r"of the shape \(6,\), got keys of the shape \(5,\)"),
        ({"temperature": -0.5}, ValueError, "temperature must not be negative, got temperature=-0.5"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": None}, TypeError, "temperature must be an array"),
        ({"temperature": jnp.ones(5)}, ValueError, r"temperature must be a number or .* \(6,\), got .*\(5,\)"),
        ({"temperature": jnp.ones(6, bool)}, TypeError, "temperature must hold real numbers"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"top_k": jnp.ones(6)}, TypeError, "top_k must hold integers"),
        ({"top_p": -0.1}, ValueError, "top_p must not be negative"),
        ({"top_p": True}, TypeError, "top_p must be a number"),
        ({"min_p": 1.5}, ValueError, "min_p must be from 0 to 1"),
        ({"return_log_probs": 1}, TypeError, "return_log_probs must be True or False"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str):
    arguments = {"logits": LOGITS, "key": KEY} | change
    with pytest.raises(error, match=f"sample: .*{message}"):
        sample(**arguments)


def test_it_has_no_gradient():
    with pytest.raises(TypeError, match="see linear_log_probs"):
        jax.grad(lambda x: sample(x, KEY, return_log_probs=True)[1].sum())(LOGITS)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])


def test_rows_split_over_explicit_axes():
    """Options and keys that are whole, or one for all rows, take the split of the logits."""
    top_k = jnp.array([5, 0, 20, 300, 7, 1])
    want = sample(LOGITS, KEY, **{**EVERY, "top_k": top_k}, return_log_probs=True)
    with jax.set_mesh(mesh()):
        logits = jax.device_put(LOGITS, jax.NamedSharding(mesh(), P("a", None)))
        got = jax.jit(lambda x, k: sample(x, KEY, **{**EVERY, "top_k": k}, return_log_probs=True))(logits, top_k)
    assert jax.typeof(got[0]).sharding.spec == P("a")
    equal(got, want)


def test_a_split_vocabulary_is_refused():
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match="logits must be split by its first 1 dimensions alone"):
        jax.jit(lambda x: sample(x, KEY))(jax.device_put(LOGITS, jax.NamedSharding(mesh(), P(None, "a"))))
