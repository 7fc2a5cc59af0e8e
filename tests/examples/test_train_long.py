"""The demo's transformer with the bytes of each text split over four devices."""

import dataclasses
import functools

import byte_transformer as bt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_long

from tests.support import tiny_transformer
from tilewright.modules import flash_attention

MODEL = dataclasses.replace(tiny_transformer.MODEL, heads=8)
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


@pytest.fixture(scope="module")
def losses_of_one():
    return losses(attention=whole)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_losses_over_four_devices_are_those_of_one(strategy, losses_of_one):
    mesh = jax.make_mesh((4,), (train_long.AXIS,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    split = losses(attention=None, objective=train_long.split_loss(mesh, strategy))
    # Each step's loss depends on the gradients of the steps before.
    np.testing.assert_allclose(split, losses_of_one, rtol=1e-5)
