"""Kernels that update arrays in place, in loops over stacked arrays: the same as by steps that are written out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.modules import flash_attention, mla_decode, rope_update_pages

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

STEPS = 3


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (STEPS, *shape), jnp.bfloat16)


def pages(query: jax.Array, key: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
    """Four tokens are written; all other pages stay as they are."""
    table = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    lengths = jnp.array([3, 17, 32, 1])
    return rope_update_pages(query, keys, values, key, key, table, lengths, platform="triton")


def latents(query: jax.Array, latent: jax.Array) -> Any:
    """Of two sequences one at least is the result of a single CTA, which the kernel that combines leaves alone."""
    table = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    return mla_decode(query, latent, table, jnp.array([100, 3]), platform="pallas")


def gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The kernels add up dQ, in place."""

    def loss(*operands: jax.Array) -> jax.Array:
        return (flash_attention(*operands, causal=True, platform="pallas").astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(query, key, value)


CALLS: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
    "pages": (pages, (draw(0, 4, 32, 128), draw(1, 4, 8, 128), draw(2, 8, 16, 8, 128), draw(3, 8, 16, 8, 128))),
    "latents": (latents, (draw(0, 2, 64, 576), draw(1, 4, 64, 576))),
    "gradients, head dim 64": (gradients, (draw(0, 2, 1024, 8, 64), draw(1, 2, 1024, 2, 64), draw(2, 2, 1024, 2, 64))),
    "gradients, head dim 128": (gradients, (draw(0, 2, 512, 4, 128), draw(1, 2, 512, 4, 128), draw(2, 2, 512, 4, 128))),
    "gradients, head dim 256": (gradients, (draw(0, 1, 512, 4, 256), draw(1, 1, 512, 2, 256), draw(2, 1, 512, 2, 256))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_loop_over_stacked_arrays(name: str) -> None:
    step, stacks = CALLS[name]
    want = jax.tree.map(lambda *x: np.stack(x), *[jax.jit(step)(*[x[i] for x in stacks]) for i in range(STEPS)])
    looped = jax.jit(lambda *stacks: jax.lax.map(lambda operands: step(*operands), stacks))(*stacks)
    for got, expected in zip(jax.tree.leaves(looped), jax.tree.leaves(want), strict=True):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        # dQ is added up in any order unless a deterministic kernel is asked for.
        np.testing.assert_allclose(got, expected, atol=0.02 * np.abs(expected).max(), rtol=0)
