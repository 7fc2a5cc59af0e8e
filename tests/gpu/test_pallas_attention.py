"""The Hopper kernels on the card: conformance, real lengths with fresh seeds, and what repeats bit for bit."""

import dataclasses
import secrets
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import Conformance, cotangents, oracle
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.pallas_gpu import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.pallas_gpu_backward import HopperBackwardParams
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.registry import Implementation
from tilewright.modules import flash_attention
from tilewright.ops.execution.numerics import violations
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)

BACKEND = PallasGpuFlashAttention()


class TestPallasOnHopper(Conformance):
    backend: ClassVar[Implementation] = BACKEND


LONG = {
    "full": AttentionCase("", 1, 2048, heads=4, head_dim=128, dtype="bfloat16"),
    "causal": AttentionCase("", 2, 2048, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", causal=True),
    "ragged": AttentionCase("", 1, 1999, 1777, heads=2, head_dim=64, dtype="float16", causal=True),
    "window": AttentionCase("", 1, 2048, heads=2, head_dim=64, dtype="bfloat16", causal=True, sliding_window=300),
    "packed": AttentionCase("", 1, 2048, heads=2, head_dim=128, dtype="bfloat16", causal=True, packed=True),
    "segments": AttentionCase("", 2, 1024, heads=2, head_dim=128, dtype="bfloat16", segments=True),
    "lengths": AttentionCase("", 2, 1024, heads=2, head_dim=96, dtype="bfloat16", lengths=True),
    "cap": AttentionCase("", 1, 1024, heads=2, head_dim=128, dtype="bfloat16", logits_soft_cap=20.0, sinks=1),
    "dropout": AttentionCase("", 1, 1024, heads=2, head_dim=64, dtype="bfloat16", dropout_prob=0.2),
    "mask": AttentionCase("", 1, 1024, heads=2, head_dim=128, dtype="bfloat16", mask="hqk"),
    "values": AttentionCase("", 1, 1024, heads=2, head_dim=64, value_dim=128, dtype="bfloat16"),
}


def prepared(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    arrays, kwargs = case.arguments(seed)
    args, kwargs = FlashAttention().prepare(*arrays, **kwargs)
    return FlashAttention().inputs(*args, **kwargs)


def candidates(inputs: AttentionInputs, direction: str) -> list:
    return list(BACKEND.candidates(AttentionProblem.of(inputs), current_device(), direction))


@pytest.mark.parametrize("name", LONG)
def test_every_config_at_real_lengths(name: str):
    seed = secrets.randbits(30)
    case = LONG[name]
    inputs = prepared(case, seed)
    d_out, d_lse = cotangents(inputs, seed)
    exact, low = oracle(inputs, d_out, d_lse), oracle(inputs, d_out, d_lse, inputs.query.dtype)
    factor = case.tolerance_factor
    for params in candidates(inputs, "forward"):
        out, lse = jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))(inputs)
        for part, got in (("out", out), ("lse", lse)):
            assert not violations(got, exact.results[part], low.results[part], factor), (seed, params, part)
    for params in candidates(inputs, "backward"):
        run = jax.jit(lambda inputs, results, d, params=params: BACKEND.backward(inputs, results, d, params))
        gradients = run(inputs, (out, lse), (d_out, d_lse))
        for part, ref in exact.gradients.items():
            assert not violations(gradients[part], ref, low.gradients[part], factor), (seed, params, part)


@pytest.mark.parametrize("name", ["causal", "packed", "window"])
def test_repeats(name: str):
    """50 runs of one input: forward and deterministic backward bit for bit, the other within rounding."""
    inputs = prepared(dataclasses.replace(LONG[name], dropout_prob=0.0))
    d_out, _ = cotangents(inputs)
    for params in candidates(inputs, "forward"):
        run = jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))
        first = [np.asarray(part) for part in run(inputs)]
        for _ in range(50):
            assert all(
                np.array_equal(a, np.asarray(b), equal_nan=True) for a, b in zip(first, run(inputs), strict=True)
            )
    results = run(inputs)
    for params in candidates(inputs, "backward"):
        assert isinstance(params, HopperBackwardParams)
        backward = jax.jit(
            lambda inputs, results, d, params=params: BACKEND.backward(inputs, results, (d, None), params)
        )
        once = backward(inputs, results, d_out)
        for _ in range(50):
            again = backward(inputs, results, d_out)
            for part in ("query", "key", "value"):
                a, b = np.asarray(once[part], np.float32), np.asarray(again[part], np.float32)
                if params.deterministic or part != "query":
                    assert np.array_equal(a, b), (params, part)
                else:
                    assert np.abs(a - b).max() <= 2.0**-7 * np.abs(a).max(), params


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
