"""``jax_enable_x64`` on a GPU: every implementation of every op computes what it computes without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.every_op.matrix import call_of, choices, every_op
from tilewright.kernels.op.choice import PerDirection
from tilewright.modules import flash_attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

SIZES = {"flash_attention": {"q_length": 512}}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", every_op())
def test_every_implementation_computes_what_it_computes_without(op, dtype):
    call = call_of(op, dtype, **SIZES.get(op, {}))
    forward = {choice.backend: choice for choice in choices(call)}
    backward = {c.backend: c for c in choices(call, "backward")} if call.differentiable else {}
    for name, choice in forward.items():
        cfg = PerDirection(choice, backward.get(name)) if call.differentiable else choice
        function, arrays = call.training(cfg=cfg)
        wanted = jax.jit(function)(*arrays)
        with jax.enable_x64(True):
            got = jax.jit(function)(*arrays)
        for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert mine.dtype == other.dtype, name
            # Sums of atomics differ from run to run; all else is equal to the bit.
            tolerance = 0.0 if not call.differentiable else 2.0**-6 * float(jnp.max(jnp.abs(other.astype(jnp.float32))))
            np.testing.assert_allclose(
                np.asarray(mine, np.float32), np.asarray(other, np.float32), rtol=0, atol=tolerance, err_msg=name
            )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_is_chosen_by_itself_is_that_of_without_and_packed_sequences_too(dtype):
    q = jax.random.normal(jax.random.key(0), (1, 768, 4, 64), dtype)
    boundaries = np.array([0, 100, 400, 768])

    def step(q):
        packed = flash_attention(q, q, q, causal=True, cum_seqlens_q=boundaries, cum_seqlens_k=boundaries)
        return (packed + flash_attention(q, q, q, causal=True, sliding_window=100)).astype(jnp.float32).sum()

    wanted = jax.jit(jax.value_and_grad(step))(q)
    with jax.enable_x64(True):
        got = jax.jit(jax.value_and_grad(step))(q)
    for mine, other in zip(got, wanted, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(np.float32(mine), np.float32(other), atol=0.05, rtol=2e-2)


def test_arrays_that_are_float64_by_default_stay_on_fast_kernels():
    with jax.enable_x64(True):
        q = jnp.ones((1, 256, 4, 64), jnp.bfloat16)
        bias = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), 0.0, -1e9)
        assert bias.dtype == jnp.float64
        gradient = jax.grad(lambda b: flash_attention(q, q, q, b, platform="pallas").astype(jnp.float32).sum())(bias)
        assert gradient.dtype == jnp.float64
        assert bool(jnp.isfinite(gradient).all())
