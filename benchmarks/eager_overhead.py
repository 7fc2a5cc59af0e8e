"""What a warm call outside ``jax.jit`` costs beyond the same function jitted by hand.

Goal: at most 50 µs. ``python -m benchmarks.eager_overhead``
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import Timing, interleaved, record
from benchmarks.trivial import Scale, ScaleConfig
from tilewright.modules import flash_attention
from tilewright.ops import ConfigCache, ConfigSelectorChain, Executor

GOAL_S = 50e-6
CALLS = 200


def pairs() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each subject our call and the plain jitted function."""
    executor: Executor[Any, Any] = Executor(ConfigSelectorChain(ConfigCache()))
    kernel = Scale()
    x = jnp.ones(8)
    jitted_scale = jax.jit(lambda x: kernel.run(x, cfg=ScaleConfig()))

    query = jax.random.normal(jax.random.key(0), (1, 16, 2, 16))
    jitted_attention = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True))
    return {
        "trivial kernel": (lambda: executor(kernel, x), lambda: jitted_scale(x)),
        "trivial kernel, default executor": (lambda: kernel(x), lambda: jitted_scale(x)),
        "flash_attention": (
            lambda: flash_attention(query, query, query, causal=True),
            lambda: jitted_attention(query, query, query),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    said = {}
    for name, (ours, alone) in pairs().items():
        timings = interleaved({"tilewright": ours, "jitted": alone}, rounds, warmup=10, calls=CALLS)
        overhead = differences(timings["tilewright"], timings["jitted"])
        jitted_us, ours_us = (timings[side].median * 1e6 for side in ("jitted", "tilewright"))
        print(
            f"{name:34} jitted {jitted_us:6.1f} µs   ours {ours_us:6.1f} µs   overhead {overhead.median * 1e6:6.1f} µs"
            f"   goal {'met' if overhead.median <= GOAL_S else 'missed'}"
        )
        said[name] = {
            "overhead": overhead.to_json(),
            **{side: timing.to_json() for side, timing in timings.items()},
        }
    print(f"written to {record('eager_overhead', {'goal_s': GOAL_S, 'calls_per_sample': CALLS, 'subjects': said})}")


def differences(ours: Timing, alone: Timing) -> Timing:
    """Round by round, so that a slow moment of the machine counts on both sides."""
    return Timing(tuple(a - b for a, b in zip(ours.samples, alone.samples, strict=True)))


if __name__ == "__main__":
    main()
