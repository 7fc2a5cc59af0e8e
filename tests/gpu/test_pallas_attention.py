"""The Hopper kernels on the card: conformance, real lengths with fresh seeds, and what repeats bit for bit."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import check_at_real_lengths, long_case
from tests.kernels.flash_attention.conformance import (
    CASES,
    Conformance,
)
from tilewright.kernels import kernel
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.op.backend import Backend
from tilewright.modules import flash_attention
from tilewright.ops import default_executor
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)

BACKEND = PallasGpuFlashAttention()


class TestPallasOnHopper(Conformance):
    backend: ClassVar[Backend] = BACKEND
    # A third of them, for the time that compilation takes: all run in the interpreter.
    cases = CASES[::3]


# The first four are run with every config of their head dims.
LONG = {
    "causal": long_case(1400, batch=2, causal=True),
    "narrow": long_case(1408, head_dim=64, causal=True),
    "wide": long_case(1280, head_dim=256, causal=True),
    "full": long_case(2048),
    "converted_early": long_case(1024, batch=8, heads=16, kv_heads=8, head_dim=64, causal=True),
    "grouped": long_case(1024, heads=4, kv_heads=2, causal=True),
    "one_kv_head": long_case(1024, 1300, heads=4, kv_heads=1, head_dim=64),
    "ragged": long_case(1399, 1277, head_dim=64, dtype="float16", causal=True),
    "window": long_case(1500, head_dim=64, causal=True, sliding_window=300),
    "packed": long_case(1500, causal=True, packed=True),
    "segments": long_case(1024, batch=2, segments=True),
    "lengths": long_case(1024, batch=2, head_dim=96, lengths=True),
    "cap": long_case(1024, logits_soft_cap=20.0, sinks=1),
    "dropout": long_case(1024, head_dim=64, dropout_prob=0.2),
    "mask": long_case(1024, mask="hqk"),
    "bias": long_case(1024, bias="hqk", causal=True),
    "values": long_case(1024, head_dim=64, value_dim=128),
    "wide_192": long_case(1100, 1024, head_dim=192, causal=True),
    "wide_values": long_case(1024, head_dim=128, value_dim=256, kv_heads=1),
    "wide_queries": long_case(1024, head_dim=256, value_dim=128, dtype="float16", sliding_window=200),
    "wide_segments": long_case(1024, head_dim=256, segments=True, logits_soft_cap=20.0),
}
EVERY_CONFIG = list(LONG)[:4]


def configs(name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    """Those to be run: the heuristic and, where there are two of them, a config that repeats and one that need not."""
    found = list(BACKEND.candidates(inputs.structs, current_device(), direction))
    if name in EVERY_CONFIG:
        return found
    kinds = {getattr(params, "deterministic", True): params for params in reversed(found)}
    return found[:1] if direction == "forward" else list(kinds.values())


@pytest.mark.parametrize("name", LONG)
def test_at_real_lengths(name: str):
    check_at_real_lengths(BACKEND, LONG[name], functools.partial(configs, name))


def test_it_is_the_default_and_differentiates():
    query, key, value = (jnp.asarray(a) for a in LONG["causal"].arguments()[0])

    def loss(platform, *arrays):
        return flash_attention(*arrays, causal=True, platform=platform).astype(jnp.float32).sum()

    text = jax.jit(lambda *a: flash_attention(*a, causal=True)).lower(query, key, value).as_text()
    assert "mosaic_gpu" in text
    ours = jax.jit(jax.grad(lambda *a: loss(None, *a), argnums=(0, 1, 2)))(query, key, value)
    xla = jax.jit(jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1, 2)))(query, key, value)
    for a, b in zip(ours, xla, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()


def test_vmap():
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in LONG["window"].arguments()[0])
    one = flash_attention(query[0], key[0], value[0], causal=True)
    both = jax.jit(jax.vmap(lambda *a: flash_attention(*a, causal=True)))(query, key, value)
    assert np.array_equal(np.asarray(one), np.asarray(both[0]))
    assert np.array_equal(np.asarray(one), np.asarray(both[1]))


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
