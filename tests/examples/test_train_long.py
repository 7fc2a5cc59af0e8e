"""The demo's transformer with the bytes of each text split over eight devices."""

import functools

import byte_transformer as bt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_long

from tilewright.modules import flash_attention

MODEL = bt.ModelConfig(layers=2, width=32, heads=8, kv_heads=2, head_dim=8, hidden=48, window=6, ngram_buckets=64)
OPTIMIZER = bt.OptimizerConfig(steps=8, warmup=1, peak=1e-2)


def whole(query, key, value, *, sliding_window):
    return flash_attention(query, key, value, causal=True, sliding_window=sliding_window)


def losses(**step):
    train = jax.jit(functools.partial(bt.train_step, model=MODEL, optimizer=OPTIMIZER, **step))
    state = bt.initial_state(MODEL, jax.random.key(0))
    text = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 2, 65)), jnp.int32)
    found = []
    for tokens in text:
        state, loss = train(state, tokens)
        found.append(float(loss))
    return found


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_losses_over_eight_devices_are_those_of_one(strategy):
    mesh = jax.make_mesh((8,), (train_long.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    split = losses(attention=None, objective=train_long.split_loss(mesh, strategy))
    # Each step's loss depends on the gradients of the steps before.
    np.testing.assert_allclose(split, losses(attention=whole), rtol=1e-5)
