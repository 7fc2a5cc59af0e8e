"""The layer of experts for few tokens, as in decoding, on a GPU: its time beside the bytes of the matrices it needs.

Device time and the wall clock of queued calls of an inference, and as a share of it the time that the matrices of the
experts that are chosen take at the rate of the better of two kernels of XLA: a copy, and a maximum by rows. "hand" is a
sort, gathers, and the grouped matmuls of this package.
``python -m benchmarks.experts_decode``, or with names of models.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import memory_rates, record
from benchmarks.experts import ROUNDS, seconds
from benchmarks.step_models import experts_by_hand
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.modules import moe_mlp, top_k_router
from tilewright.ops.tuning.timing import gpu_kernels, traced

MODELS = {
    "qwen3_30b": ExpertsCase("", d=2048, n=768, num_experts=128, k=8),
    "mixtral": ExpertsCase("", d=4096, n=14336, num_experts=8, k=2),
    "gpt_oss_20b": ExpertsCase("", d=2880, n=2880, num_experts=32, k=4, activation="swiglu_oai", biases=True),
    "deepseek_v3_quarter": ExpertsCase("", d=7168, n=2048, num_experts=64, k=8),
}
TOKENS = (16, 64, 128, 256, 512)
READ = 1 << 31
"""Bytes of the array that is read and copied."""


def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
    draw = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(lambda key: scale * draw(key))(key)


def device_ms(run: Callable[[], Any]) -> float:
    """Time of a call's kernels."""
    calls = 10
    profile = traced(lambda: jax.block_until_ready([run() for _ in range(calls)]))
    return sum(ms for _, ms in gpu_kernels(profile)) / calls


def bytes_per_ms() -> dict[str, float]:
    """Bytes that kernels of XLA read, and read and write."""
    rates = memory_rates(READ, lambda run: device_ms(run) / 1e3)
    return {name: rate / 1e3 for name, rate in rates.items()}


def layers(case: ExpertsCase, biases: Any) -> dict[str, Callable[..., jax.Array]]:
    """By name, of tokens, weights, experts and three matrices."""
    options: dict[str, Any] = {"activation": case.activation, "biases": biases}
    found: dict[str, Callable[..., jax.Array]] = {
        "moe_mlp": functools.partial(moe_mlp, **options),
        "moe_mlp, triton": functools.partial(moe_mlp, **options, platform="triton"),
    }
    return found if case.biases else found | {"hand": experts_by_hand}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    rates, data = bytes_per_ms(), dict[str, Any]()
    print(", ".join(f"{name} {rate / 1e9:.2f} TB/s" for name, rate in rates.items()), flush=True)
    for name in parser.parse_args().models:
        case = MODELS[name]
        e, d, n, keys = case.num_experts, case.d, case.n, jax.random.split(jax.random.key(0), 8)
        matrices = [normal(keys[0], e, d, n, scale=d**-0.5), normal(keys[1], e, d, n, scale=d**-0.5)]
        matrices.append(normal(keys[2], e, n, d, scale=n**-0.5))
        biases = tuple(map(normal, keys[3:6], (e,) * 3, (n, n, d))) if case.biases else None
        data[name] = {}
        for tokens in TOKENS:
            x, logits = normal(keys[6], tokens, d), normal(keys[7], tokens, e).astype(jnp.float32)
            weights, experts = top_k_router(logits, case.k)
            touched = len(set(experts.reshape(-1).tolist()))
            least = 3 * touched * d * n * x.dtype.itemsize / max(rates.values())
            found: dict[str, Any] = {"experts": touched, "bytes_ms": least}
            for label, layer in layers(case, biases).items():
                program = jax.jit(layer)
                run = functools.partial(program, x, weights, experts, *matrices)
                jax.block_until_ready(run())
                wall = [1e3 * seconds(run, jax.block_until_ready) for _ in range(ROUNDS)]
                found[label] = {"device_ms": device_ms(run), "wall_ms": wall}
            data[name][tokens] = found
            shares = ", ".join(
                f"{label} {1e3 * each['device_ms']:.0f} µs ({least / each['device_ms']:.2f} device, "
                f"{least / statistics.median(each['wall_ms']):.2f} wall)"
                for label, each in found.items()
                if isinstance(each, dict)
            )
            print(f"{name}, {tokens} tokens, {touched} experts, bytes {1e3 * least:.0f} µs: {shares}", flush=True)
    sizes = {name: dataclasses.asdict(case) for name, case in MODELS.items()}
    print(record("experts_decode", {"bytes_per_ms": rates, "sizes": sizes, "models": data}))


if __name__ == "__main__":
    main()
