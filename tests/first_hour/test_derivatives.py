"""Derivatives in forward mode, where JAX's own ``custom_vjp`` would refuse them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.support.draws import draw
from tilewright.modules import FlashAttention, decode_attention, flash_attention
from tilewright.ops import Kernel

Q, K, V = (draw(2, 20, 4, 8, seed=i) for i in range(3))
SMALL = tuple(x[:1, :4, :2] for x in (Q, K, V))


def oracle(*arrays, **options):
    return FlashAttention().reference(FlashAttention().prepare(*arrays, **options))


OPTIONS = {
    "plain": {},
    "causal window, soft cap": {"causal": True, "sliding_window": 5, "logits_soft_cap": 3.0},
    "rows without keys": {"key_value_seq_lengths": jnp.array([0, 13])},
    "bias, lse": {"bias": draw(1, 4, 20, 20, seed=7), "return_lse": True},
    "sinks": {"softmax_aux": jnp.ones(4)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jvp_is_that_of_the_oracle(name, how):
    got = how(lambda *x: jax.jvp(lambda *y: flash_attention(*y, **OPTIONS[name]), x, (K, V, Q)))(Q, K, V)
    wanted = jax.jvp(lambda *y: oracle(*y, **OPTIONS[name]), (Q, K, V), (K, V, Q))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), got, wanted)


def first_row(x):
    return flash_attention(x, *SMALL[1:], causal=True)[0, -1, 0]


def test_jacfwd_and_linearize_and_hessian():
    x = SMALL[0]
    np.testing.assert_allclose(jax.jacfwd(first_row)(x), jax.jacrev(first_row)(x), atol=1e-6)
    _, linear = jax.linearize(first_row, x)
    np.testing.assert_allclose(linear(x), jax.jvp(first_row, (x,), (x,))[1], atol=1e-6)
    wanted = jax.hessian(lambda x: oracle(x, *SMALL[1:], causal=True)[0, -1, 0].sum())(x)
    np.testing.assert_allclose(jax.hessian(lambda x: first_row(x).sum())(x), wanted, atol=1e-5)


def test_of_some_arguments_under_vmap_and_a_gradient_around_it():
    x = SMALL[0]

    def along(x):
        return jax.jvp(first_row, (x,), (jnp.sin(x),))[1].sum()

    def wanted(x):
        row = lambda x: oracle(x, *SMALL[1:], causal=True)[0, -1, 0]
        return jax.jvp(row, (x,), (jnp.sin(x),))[1].sum()

    np.testing.assert_allclose(jax.grad(along)(x), jax.grad(wanted)(x), atol=1e-5)
    batch = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(along)(batch), jax.vmap(wanted)(batch), atol=1e-5)


def test_a_platform_without_forward_mode_names_the_op_and_what_to_use():
    def tangent(x):
        return jax.jvp(lambda x: flash_attention(x, x, x, platform="pallas"), (x,), (x,))[1]

    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        traced = jax.jit(tangent).trace(jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16))
        with pytest.raises(TypeError, match=r"flash_attention has no forward-mode .*'pallas'.*platform='xla'"):
            traced.lower(lowering_platforms=("cuda",))


def test_inference_says_so_in_both_modes():
    query, lengths = Q[:, 0], jnp.array([3, 4])
    for derivative in (
        lambda f: jax.grad(lambda x: f(x).sum())(query),
        lambda f: jax.jvp(f, (query,), (query,)),
    ):
        with pytest.raises(TypeError, match="decode_attention is for inference and has no gradient; see flash_att"):
            derivative(lambda x: decode_attention(x, K, V, lengths))


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


class Cube(Kernel):
    def __init__(self):
        super().__init__("tests.cube")

    def run(self, x, *, cfg):
        return x**3

    def heuristic_cfg(self, inv):
        return Config()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * 3 * primals[0] ** 2,)


class ForwardCube(Cube):
    def forward_mode_cfg(self, inv):
        return Config()


def test_a_users_kernel_with_gradients_of_its_own():
    x = jnp.arange(3.0)
    with pytest.raises(TypeError, match=r"tests\.cube has gradients of its own for reverse mode .*forward_mode_cfg"):
        jax.jvp(Cube(), (x,), (x,))


def test_a_users_kernel_that_names_a_config_for_forward_mode():
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jvp(ForwardCube(), (x,), (x,))[1], 3 * x**3)
