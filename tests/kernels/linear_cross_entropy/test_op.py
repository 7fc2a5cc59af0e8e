"""``linear_cross_entropy`` and ``linear_log_probs``: what they take, give and refuse, and under transformations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.kernels.linear_cross_entropy.conformance import CASES, call_of, check, expected
from tests.kernels.linear_cross_entropy.oracle import cross_entropy
from tilewright.kernels.linear_cross_entropy.xla.params import XlaLossBackwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_cross_entropy, linear_log_probs


def arrays_of(**fields: Any) -> tuple[Any, dict[str, Any]]:
    return call_of(dataclasses.replace(CASES["float32"], **fields))


def test_it_is_optax_of_the_logits():
    (x, weight, labels), _ = arrays_of()
    ours = lambda x, weight: linear_cross_entropy(x, weight, labels)
    theirs = lambda x, weight: optax.softmax_cross_entropy_with_integer_labels(x @ weight, labels).mean()
    got, want = (jax.value_and_grad(each, (0, 1))(x, weight) for each in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def test_eager_and_compiled_and_a_scaled_loss():
    args, options = arrays_of(ignored=0.3, token_weights=True, dtype="bfloat16")
    loss = lambda x, weight: 65536.0 * linear_cross_entropy(x, weight, args[2], **options)
    want = expected(args, options, 65536.0, None) | {"loss": 65536.0 * expected(args, options, 1.0, None)["loss"]}
    for function in (jax.value_and_grad(loss, (0, 1)), jax.jit(jax.value_and_grad(loss, (0, 1)))):
        value, (d_x, d_weight) = function(*args[:2])
        check({"loss": value, "x": d_x, "weight": d_weight}, want)


def test_a_mask_of_booleans_is_a_weight():
    args, _ = arrays_of()
    mask = np.arange(37) % 3 != 0
    got = linear_cross_entropy(*args, token_weights=mask)
    np.testing.assert_allclose(got, cross_entropy(*args, token_weights=mask)["loss"], rtol=1e-5)
    ignoring = linear_cross_entropy(*args[:2], np.where(mask, args[2], 5000), ignore_index=5000)
    np.testing.assert_allclose(ignoring, got, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_over_nothing_is_zero_and_so_are_its_gradients(weighted: bool):
    (x, weight, labels), _ = arrays_of()
    options = {"token_weights": jnp.zeros(37)} if weighted else {}
    labels = labels if weighted else jnp.full_like(labels, -100)
    loss = lambda *xs: linear_cross_entropy(*xs, labels, **options)
    value, gradients = jax.value_and_grad(loss, (0, 1))(x, weight)
    assert value == 0
    assert not any(np.any(each) for each in gradients)


def test_log_probs():
    (x, weight, labels), _ = arrays_of(ignored=0.2)
    d_out = np.random.default_rng(0).standard_normal(37).astype(np.float32)
    want = cross_entropy(x, weight, labels, reduction="none", d_loss=-d_out)
    out, pull_back = jax.vjp(lambda *xs: linear_log_probs(*xs, labels), x, weight)
    d_x, d_weight = pull_back(d_out)
    check({"loss": out, "x": d_x, "weight": d_weight}, want | {"loss": -want["loss"]})
    _, lse = linear_log_probs(x, weight, labels, return_lse=True)
    check({"lse": lse}, want)


def test_vmap_forward_mode_checkpoint_and_second_derivatives():
    (x, weight, labels), _ = arrays_of(vocab=20, tokens=6, d=3)
    loss = lambda x: linear_cross_entropy(x, weight, labels)
    plain = lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x @ weight), labels[:, None], 1).mean()
    xs = jnp.stack([x, 2 * x, -x])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for ours, theirs in (
        (jax.vmap(loss), jax.vmap(plain)),
        (jax.vmap(jax.grad(loss)), jax.vmap(jax.grad(plain))),
        (lambda xs: jax.grad(jax.checkpoint(loss))(xs[0]), lambda xs: jax.grad(plain)(xs[0])),
        (lambda xs: jax.jvp(loss, (xs[0],), (xs[1],))[1], lambda xs: jax.jvp(plain, (xs[0],), (xs[1],))[1]),
        (lambda xs: jax.hessian(loss)(xs[0]), lambda xs: jax.hessian(plain)(xs[0])),
        (lambda xs: jax.vmap(jax.grad(lambda w: linear_cross_entropy(x, w, labels)))(jnp.stack([weight, -weight])),
         lambda xs: jax.vmap(jax.grad(lambda w: optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()))(
             jnp.stack([weight, -weight]))),
    ):  # fmt: skip
        close(jax.jit(ours)(xs), theirs(xs))


def test_a_scan_of_steps_keeps_no_gradients_if_they_are_recomputed(one_device: None):
    """The gradient of a scan over losses: gradients that the forward pass computes would be kept for every step."""
    (x, weight, labels), _ = arrays_of(tokens=64, d=32, vocab=512)
    cfg = PerDirection(backward=Choice("xla", XlaLossBackwardParams(64, 512)))

    def total(weight: Any, cfg: Any) -> Any:
        step = lambda total, i: (total + linear_cross_entropy(x * i, weight, labels, cfg=cfg), None)
        return jax.lax.scan(step, 0.0, jnp.arange(16.0))[0]

    lower = lambda cfg: jax.jit(jax.grad(lambda weight: total(weight, cfg))).lower(weight).compile()
    kept, recomputed = lower(None), lower(cfg)
    np.testing.assert_allclose(kept(weight), recomputed(weight), rtol=1e-4, atol=1e-6)
    assert recomputed.memory_analysis().temp_size_in_bytes < 0.6 * kept.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (r"x must be a floating-point array \[\.\.\., d\]", {"x": jnp.ones((37, 24), jnp.int32)}),
        (r"weight must be \[d, vocab\] with that d.*vocab_first=False", {"weight": jnp.ones((301, 24))}),
        (r"weight must have a vocabulary", {"weight": jnp.ones((24, 0)), "labels": jnp.full(37, -100)}),
        (r"labels must hold integers", {"labels": jnp.zeros(37)}),
        (r"labels must have the shape of x without its last axis, \(37,\)", {"labels": jnp.zeros(36, jnp.int32)}),
        (r"labels must be from 0 to 300 or ignore_index=-100, got 301 among 37", {"labels": np.full(37, 301)}),
        (r"labels must be from 0 to 300 .*got -1", {"labels": jnp.full(37, -1)}),
        (r"bias must be a floating-point array \[vocab\]", {"bias": jnp.ones(300)}),
        (r"token_weights must have the shape", {"token_weights": jnp.ones((37, 1))}),
        (r"reduction='avg' must be", {"reduction": "avg"}),
        (r"label_smoothing must be from 0 to 1", {"label_smoothing": 1.5}),
        (r"z_loss must not be negative", {"z_loss": -1.0}),
        (r"logits_soft_cap must be positive", {"logits_soft_cap": 0.0}),
        (r"gradient_epsilon must be positive", {"gradient_epsilon": 0.0}),
        (r"gradient_epsilon=0.1 is not taken with", {"gradient_epsilon": 0.1, "axis_name": "vocab"}),
    ],
)
def test_what_it_does_not_take(said: str, change: Any):
    given = dict(zip(("x", "weight", "labels"), arrays_of()[0], strict=True))
    with pytest.raises((ValueError, TypeError), match=f"linear_cross_entropy: .*{said}"):
        linear_cross_entropy(**given | change)
