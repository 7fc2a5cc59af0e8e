"""The Hopper kernels on the card are the default, and repeat bit for bit where they shall."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import REAL
from tilewright.kernels import kernel
from tilewright.modules import flash_attention
from tilewright.ops import default_executor
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)


def test_it_is_the_default_and_differentiates():
    query, key, value = (jnp.asarray(a) for a in REAL["causal"].arguments()[0])

    def loss(platform, *arrays):
        return flash_attention(*arrays, causal=True, platform=platform).astype(jnp.float32).sum()

    text = jax.jit(lambda *a: flash_attention(*a, causal=True)).lower(query, key, value).as_text()
    assert "mosaic_gpu" in text
    ours = jax.jit(jax.grad(lambda *a: loss(None, *a), argnums=(0, 1, 2)))(query, key, value)
    xla = jax.jit(jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1, 2)))(query, key, value)
    for a, b in zip(ours, xla, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()


@pytest.mark.parametrize("shape", [(8, 1024, 16, 64), (4, 2048, 16, 128), (2, 2048, 8, 256)])
def test_every_run_gives_the_same_bits_where_xla_shall(shape: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    batch, length, heads, head_dim = shape
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((batch, length, heads, head_dim)), jnp.bfloat16) for _ in range(3)]
    loss = lambda *xs: jnp.sum(jnp.sin(flash_attention(*xs, causal=True).astype(jnp.float32)))
    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    assert "deterministic=True" in str(default_executor().explain(kernel("flash_attention"), *arrays, causal=True))
    first = [np.asarray(x, np.float32) for x in step(*arrays)]
    for _ in range(8):
        for mine, other in zip(step(*arrays), first, strict=True):
            np.testing.assert_array_equal(np.asarray(mine, np.float32), other)
