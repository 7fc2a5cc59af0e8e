"""The Hopper kernels on the card: conformance, real lengths with fresh seeds, and what repeats bit for bit."""

import secrets
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import (
    CASES,
    Conformance,
    ConformanceCase,
    cotangents,
    describe,
    inputs_of,
    oracle,
)
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.pallas_gpu import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.registry import Implementation
from tilewright.modules import flash_attention
from tilewright.ops.core.types import Direction
from tilewright.ops.execution.numerics import violations
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)

BACKEND = PallasGpuFlashAttention()


class TestPallasOnHopper(Conformance):
    backend: ClassVar[Implementation] = BACKEND

    # A third of them, for the time that compilation takes: all run in the interpreter.
    @pytest.mark.parametrize("conformance_case", CASES[::3], ids=describe)
    def test_pairwise(self, conformance_case: ConformanceCase):
        super().test_pairwise(conformance_case)


def long_case(q_length: int, kv_length: int | None = None, **options: Any) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **sizes | options)


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
RUNS = 50


def configs(name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    """Those to be run: the heuristic and, where there are two of them, a config that repeats and one that need not."""
    found = list(BACKEND.candidates(AttentionProblem.of(inputs), current_device(), direction))
    if name in EVERY_CONFIG:
        return found
    kinds = {getattr(params, "deterministic", True): params for params in reversed(found)}
    return found[:1] if direction == "forward" else list(kinds.values())


def differences(run: Callable[[], dict[str, jax.Array]]) -> dict[str, float]:
    """By how much of its magnitude each result of further runs was off the first one's."""
    first = {name: np.asarray(array, np.float32) for name, array in run().items()}
    found = dict.fromkeys(first, 0.0)
    for _ in range(RUNS):
        for name, array in run().items():
            got = np.asarray(array, np.float32)
            if not np.array_equal(got, first[name], equal_nan=True):
                found[name] = max(found[name], float(np.abs(got - first[name]).max() / np.abs(first[name]).max()))
    return found


@pytest.mark.parametrize("name", LONG)
def test_at_real_lengths(name: str):
    """Against the oracle with a fresh seed, and in further runs of one input bit for bit or within rounding."""
    seed = secrets.randbits(30)
    case = LONG[name]
    inputs = inputs_of(case, seed)
    d_out, d_lse = cotangents(inputs, seed)
    exact, low = oracle(inputs, d_out, d_lse), oracle(inputs, d_out, d_lse, inputs.query.dtype)
    for params in configs(name, inputs, "forward"):
        forward = jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))
        out, lse = forward(inputs)
        for part, got in (("out", out), ("lse", lse)):
            assert not violations(got, exact.results[part], low.results[part], case.tolerance_factor), (seed, params)
        found = differences(lambda forward=forward: dict(zip(("out", "lse"), forward(inputs), strict=True)))
        assert not any(found.values()), (seed, params, found)
    for params in configs(name, inputs, "backward"):
        backward = jax.jit(lambda inputs, results, d, params=params: BACKEND.backward(inputs, results, d, params))

        def run(backward: Any = backward) -> dict[str, jax.Array]:
            gradients = backward(inputs, (out, lse), (d_out, d_lse))
            return {part: gradients[part] for part in exact.gradients}

        for part, got in run().items():
            found = violations(got, exact.gradients[part], low.gradients[part], case.tolerance_factor)
            assert not found, (seed, params, part, found)
        # What is added up in global memory is in whatever order programs finish.
        added = () if params.deterministic else ("query", "bias")
        for part, difference in differences(run).items():
            assert difference <= (2.0**-7 if part in added else 0.0), (seed, params, part, difference)


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
