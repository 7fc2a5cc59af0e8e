"""Flash attention on XLA by tile size, beside JAX's own attention on XLA: where the heuristic's sizes come from.

``python -m benchmarks.xla_tiles``
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record
from tilewright.kernels.op.choice import PerDirection
from tilewright.modules import flash_attention
from tilewright.ops import BwdParams, FwdParams
from tilewright.ops.tuning.timing import time_interleaved

CASES = ((4, 4096, 16, 128), (16, 1024, 16, 128), (4, 4096, 32, 64))
"""Batch, length, heads, head_dim; causal, bfloat16."""

SIDES = (256, 512, 1024, 2048, 4096)


def forward_and_both(attention: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward pass, and forward and backward, jitted."""
    return jax.jit(attention), jax.jit(lambda *qkv: jax.vjp(attention, *qkv)[1](qkv[0]))


def ours(side: int | None) -> Callable[..., Any]:
    """Flash attention with square tiles, or with the heuristic's."""
    if side is None:
        return lambda *qkv: flash_attention(*qkv, causal=True, platform="xla")
    cfg = PerDirection(FwdParams(q_blocksize=side, kv_blocksize=side), BwdParams(q_blocksize=side, kv_blocksize=side))
    return lambda *qkv: flash_attention(*qkv, causal=True, platform="xla", cfg=cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    said = []
    for batch, length, heads, dim in CASES:
        keys = jax.random.split(jax.random.key(0), 3)
        qkv = [jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys]
        theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        named: dict[str, Any] = {"jax.nn": theirs, "heuristic": ours(None)} | {
            str(s): ours(s) for s in SIDES if s <= length
        }
        both = [forward_and_both(attention) for attention in named.values()]
        for part, index in (("forward", 0), ("forward and backward", 1)):
            timings = time_interleaved([pair[index] for pair in both], qkv, warmup=2, iters=rounds)
            medians = {name: timing.median_ms for name, timing in zip(named, timings, strict=True)}
            print(f"{(batch, length, heads, dim)} {part}: {', '.join(f'{n} {t:.2f}' for n, t in medians.items())} ms")
            samples = {name: list(timing.samples_ms) for name, timing in zip(named, timings, strict=True)}
            said.append({"case": [batch, length, heads, dim], "part": part, "unit": "ms", "samples": samples})
    print(f"written to {record('xla_tiles', {'causal': True, 'dtype': 'bfloat16', 'rows': said})}")


if __name__ == "__main__":
    main()
