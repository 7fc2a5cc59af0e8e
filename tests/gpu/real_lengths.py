"""Attention kernels at real lengths: against the oracle with a fresh seed, and further runs against the first."""

import secrets
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from tests.kernels.flash_attention.conformance import cotangents, inputs_of, judge, oracles
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.registry import Implementation
from tilewright.ops.core.types import Direction

RUNS = 50

type Configs = Callable[[AttentionInputs, Direction], Iterable[Any]]


def long_case(q_length: int, kv_length: int | None = None, **options: Any) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **sizes | options)


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


def check_at_real_lengths(backend: Implementation, case: AttentionCase, configs: Configs) -> None:
    """Runs every config of both directions; ``deterministic`` in a config says whether it must repeat bit for bit."""
    seed = secrets.randbits(30)
    inputs = inputs_of(case, seed)
    d_out, d_lse = cotangents(inputs, seed)
    exact, low = oracles(inputs, d_out, d_lse)
    for params in configs(inputs, "forward"):
        forward = jax.jit(lambda inputs, params=params: backend.forward(inputs, params))
        out, lse = forward(inputs)
        judge({"out": out, "lse": lse}, exact.results, low.results, case.tolerance_factor, seed, params)
        repeats = differences(lambda forward=forward: dict(zip(("out", "lse"), forward(inputs), strict=True)))
        assert not any(repeats.values()), (seed, params, repeats)
    for params in configs(inputs, "backward"):
        backward = jax.jit(lambda inputs, results, d, params=params: backend.backward(inputs, results, d, params))

        def run(backward: Any = backward) -> dict[str, jax.Array]:
            gradients = backward(inputs, (out, lse), (d_out, d_lse))
            return {part: gradients[part] for part in exact.gradients}

        judge(run(), exact.gradients, low.gradients, case.tolerance_factor, seed, params)
        # What is added up in global memory is in whatever order programs finish.
        added = () if params.deterministic else ("query", "bias")
        for part, difference in differences(run).items():
            assert difference <= (2.0**-7 if part in added else 0.0), (seed, params, part, difference)
