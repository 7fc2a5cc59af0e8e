"""Rematerialisation: a policy that names the call's results saves its forward pass, and each byte once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # what jax.ad_checkpoint.print_saved_residuals prints
from jax.extend.core import jaxpr_as_fun

from tests.support.draws import draw
from tilewright.modules import flash_attention

X = draw(2, 32, 4, 16)
W = draw(16, 16, seed=1) / 4
NAMES = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_residuals")


def block(x, w):
    y = x @ w
    return jnp.sin(flash_attention(y, y, y, causal=True, platform="xla") @ w)


def loss(block, x, w):
    return block(block(x, w), w).sum()


def forward_calls(block):
    """How often the program of a training step runs the forward pass, and its floating-point operations."""
    step = jax.value_and_grad(lambda x, w: loss(block, x, w), argnums=(0, 1))
    text = str(jax.make_jaxpr(step)(X, W))
    flops = jax.jit(step).lower(X, W).compile().cost_analysis()["flops"]
    return text.count("stage='forward'") + text.count("stage='run'"), flops


def test_a_policy_by_name_saves_one_forward_pass_a_layer():
    (without, least), (remat, most), (named, between) = (
        forward_calls(each) for each in (block, jax.checkpoint(block), jax.checkpoint(block, policy=NAMES))
    )
    attention = 2 * 2 * 2 * 32 * 32 * 4 * 16  # two matrix products, of two layers
    assert named == without < remat
    assert most - between > 0.8 * 2 * attention / 2
    assert between < most
    assert least <= between


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, lambda f: jax.checkpoint(f, policy=NAMES)])
def test_the_gradients_are_those_without(checkpoint):
    wanted = jax.grad(lambda w: loss(block, X, w))(W)
    # Sums near 100 that cancel: how XLA fuses what is computed again depends on the machine's vectors.
    exact = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(jax.grad(lambda w: loss(checkpoint(block), X, w))(W), wanted, **exact)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda w: loss(checkpoint(block), X, w)))(W), wanted, **exact)


def named_bytes(function, *arguments):
    """The bytes that a checkpoint under the policy keeps, arguments not counted."""
    kept = saved_residuals(jax.checkpoint(function, policy=NAMES), *arguments)
    return sum(aval.size * aval.dtype.itemsize for aval, source in kept if "argument" not in source)


ONCE = X.nbytes + 4 * 2 * 4 * 32  # the output and the log-sum-exp
CALLS = {
    "batched": (lambda x: jnp.sin(flash_attention(x, x, x)), X, ONCE),
    "unbatched": (lambda x: jnp.sin(flash_attention(x, x, x)), X[0], ONCE // 2),
    "vmap": (jax.vmap(lambda x: jnp.sin(flash_attention(x, x, x))), X, ONCE),
    "with lse": (lambda x: jnp.sin(flash_attention(x, x, x, return_lse=True)[0]), X, ONCE),
    "jit": (jax.jit(lambda x: jnp.sin(flash_attention(x, x, x))), X, ONCE),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_log_sum_exp_are_kept_once(name):
    function, x, wanted = CALLS[name]
    assert named_bytes(function, x) == wanted


def test_without_a_checkpoint_too():
    _, pull = jax.vjp(lambda x: jnp.sin(flash_attention(x, x, x)), X)
    kept = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(pull)}
    # The array itself as query, key and value, the output, its log-sum-exp, and what sine keeps.
    assert sum(kept.values()) <= 3 * X.nbytes + ONCE + X.nbytes


def test_each_name_alone_saves_what_it_names():
    def kept(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        saved = saved_residuals(jax.checkpoint(lambda x: jnp.sin(flash_attention(x, x, x)), policy=policy), X)
        return sum(aval.size * aval.dtype.itemsize for aval, source in saved if "argument" not in source)

    assert kept("flash_attention_out") == X.nbytes
    assert kept("flash_attention_residuals") == ONCE - X.nbytes
    assert kept("something_else") == 0


def test_a_scan_over_layers_keeps_them_for_every_layer():
    layers = jnp.stack([W] * 3)

    def run(checkpoint):
        return lambda layers: jax.lax.scan(lambda x, w: (checkpoint(block)(x, w), None), X, layers)[0].sum()

    wanted = jax.grad(run(lambda f: f))(layers)
    got = jax.jit(jax.grad(run(lambda f: jax.checkpoint(f, policy=NAMES))))
    np.testing.assert_allclose(got(layers), wanted, rtol=1e-4, atol=1e-5)
    text = str(got.trace(layers).jaxpr)
    assert text.count("stage='forward'") + text.count("stage='run'") == 1
    assert jaxpr_as_fun(got.trace(layers).jaxpr)(layers)[0].shape == layers.shape
