"""Attention kernels at real lengths: against the oracle with a fresh seed, and further runs against the first."""

import secrets
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import cotangents, inputs_of, judge, oracles
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.op.backend import Backend
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

RUNS = 50
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

type Configs = Callable[[AttentionInputs, Direction], Iterable[Any]]


def long_case(q_length: int, kv_length: int | None = None, **options: Any) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **sizes | options)


REAL = {
    "causal": long_case(1400, batch=2, causal=True),
    "narrow": long_case(1408, head_dim=64, causal=True),
    "wide": long_case(1280, head_dim=256, causal=True),
    "full": long_case(2048),
    "float32": long_case(1024, dtype="float32", causal=True),
    "float32_wide": long_case(700, dtype="float32", head_dim=256, sliding_window=100),
    "grouped": long_case(1024, heads=4, kv_heads=2, causal=True),
    "more_queries": long_case(1300, 700, causal=True, causal_alignment="bottom_right"),
    "more_keys": long_case(700, 1300, dtype="float16", causal=True, causal_alignment="bottom_right"),
    "ragged": long_case(1399, 1277, head_dim=72, dtype="float16", causal=True),
    "window": long_case(1500, head_dim=64, causal=True, sliding_window=300),
    "packed": long_case(1500, causal=True, packed=True),
    "lengths": long_case(1024, batch=2, head_dim=96, lengths=True),
    "cap": long_case(1024, logits_soft_cap=20.0, sinks=1),
    "dropout": long_case(1024, head_dim=64, dropout_prob=0.2),
    "mask": long_case(1024, mask="hqk"),
    "bias": long_case(1024, bias="hqk", causal=True),
    "values": long_case(1024, head_dim=64, value_dim=128),
}
"""What most kernels serve, at lengths of many tiles."""


def skip_unless_served(backend: Backend, inputs: AttentionInputs) -> None:
    structs = inputs.structs.replace(return_lse=True)
    for direction in DIRECTIONS:
        if why := backend.not_supported_reasons(structs, current_device(), direction):
            pytest.skip("; ".join(why))


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


def check_at_real_lengths(
    backend: Backend, case: AttentionCase, configs: Configs, added: Callable[[AttentionInputs], tuple[str, ...]]
) -> None:
    """Runs every config of both directions; what need not repeat bit for bit are the gradients that ``added`` names.

    They are sums in global memory, in whatever order programs finish, of configs that do not repeat.
    """
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
        loose = () if backend.repeats(params) else added(inputs)
        for part, difference in differences(run).items():
            assert difference <= (2.0**-7 if part in loose else 0.0), (seed, params, part, difference)


def looped(case: AttentionCase, loop: str, direction: Direction, **options: Any) -> np.ndarray[Any, Any]:
    """The result of eight calls in a loop, each on the result of the last, or on it and its gradient."""
    query, key, value = (jnp.asarray(a) for a in case.arguments()[0])

    def call(x: Any) -> Any:
        return flash_attention(x, key, value, causal=True, **options)

    def step(x: Any) -> Any:
        if direction == "forward":
            return call(x)
        return x + 0.1 * jax.grad(lambda x: call(x).astype(jnp.float32).sum())(x)

    if loop == "fori":
        run = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: step(x), x))
    else:
        run = jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=8)[0])
    return np.asarray(run(query), np.float32)


def check_on_every_device(case: AttentionCase, **options: Any) -> None:
    arrays = [jnp.asarray(a) for a in case.arguments()[0]]
    run = jax.jit(lambda *a: flash_attention(*a, causal=True, **options))
    results = [np.asarray(run(*jax.device_put(arrays, device)), np.float32) for device in jax.local_devices()]
    for other in results[1:]:
        assert np.array_equal(results[0], other)
