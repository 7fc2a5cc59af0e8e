"""The layer of experts over all GPUs of a host, ``moe_mlp`` with ``axis_name``, beside one GPU with all experts.

Each GPU has 8192 tokens. Forward without and with what the backward pass needs, and backward alone; TFLOP/s a GPU of 6
and of 12 · tokens · k · d · n. ``python -m benchmarks.expert_parallel``
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import record
from benchmarks.experts import ROUNDS, in_jax, seconds
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.modules import moe_mlp, top_k_router

CASES = {
    "qwen3_30b": ExpertsCase("", tokens=8192, d=2048, n=768, num_experts=128, k=8),
    "mixtral": ExpertsCase("", tokens=8192, d=4096, n=14336, num_experts=8, k=2),
}
"""Sizes of a device's tokens, and of all experts."""


def drawn(case: ExpertsCase, devices: int, sharding: NamedSharding) -> tuple[jax.Array, ...]:
    """Tokens of all devices, the router's logits, three matrices, and cotangents, each device's own part there."""
    keys, tokens = jax.random.split(jax.random.key(0), 6), devices * case.tokens
    e, d, n = case.num_experts, case.d, case.n

    @functools.partial(jax.jit, static_argnums=(1, 2), out_shardings=sharding)
    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    shapes = ((tokens, d), (tokens, e), (e, d, n), (e, d, n), (e, n, d), (tokens, d))
    scales = (1.0, 1.0, d**-0.5, d**-0.5, n**-0.5, 1.0)
    return tuple(normal(*each) for each in zip(keys, shapes, scales, strict=True))


def layer(x: Any, logits: Any, gate: Any, up: Any, down: Any, *, k: int, **options: Any) -> jax.Array:
    weights, experts = top_k_router(logits.astype(jnp.float32), k)
    found: jax.Array = moe_mlp(x, weights, experts, gate, up, down, **options)
    return found


def times(case: ExpertsCase, layer: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    """Samples in milliseconds and rates of an inference, of a training's forward pass and of its backward pass."""
    *operands, _ = arrays
    run = functools.partial(layer, k=case.k)
    found, inference = in_jax(run, arrays), jax.jit(run)
    passes = {"inference": lambda: inference(*operands), "forward": found.forward, "backward": found.backward}
    for each in passes.values():
        found.wait(each())
    samples = {name: [1e3 * seconds(each, found.wait) for _ in range(ROUNDS)] for name, each in passes.items()}
    flops = 6.0 * case.tokens * case.k * case.d * case.n
    rates = {
        name: flops * (2 if name == "backward" else 1) / statistics.median(each) / 1e9 for name, each in samples.items()
    }
    return {"ms": samples, "tflops_of_a_device": rates, "kept_bytes": found.kept()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    devices, data = jax.device_count(), dict[str, Any]()
    mesh = jax.make_mesh((devices,), ("experts",), axis_types=(AxisType.Auto,))
    for name in parser.parse_args().cases:
        case = CASES[name]
        arrays = drawn(case, devices, NamedSharding(mesh, P("experts")))

        def parallel(*xs: Any, k: int) -> jax.Array:
            run = functools.partial(layer, k=k, axis_name="experts")
            return jax.shard_map(run, mesh=mesh, in_specs=(P("experts"),) * 5, out_specs=P("experts"))(*xs)

        data[name] = {f"{devices} devices": times(case, parallel, arrays)}
        one = tuple(jax.device_put(x[: case.tokens] if x.ndim == 2 else x, jax.devices()[0]) for x in arrays)
        del arrays
        data[name]["1 device"] = times(case, layer, one)
        for label, each in data[name].items():
            rates = " ".join(f"{key} {rate:.0f}" for key, rate in each["tflops_of_a_device"].items())
            print(f"{name}, {label}: {rates} TFLOP/s a device", flush=True)
    cases = {name: dataclasses.asdict(case) for name, case in CASES.items()}
    print(record(f"expert_parallel_{devices}", {"sizes": cases, "cases": data}))


if __name__ == "__main__":
    main()
