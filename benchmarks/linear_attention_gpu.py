"""Linear attention on a GPU: milliseconds of each backend, forward and backward.

The shapes are those of published layers and of the tables of FlashQLA, FlashInfer and mamba-ssm: heads of queries and
of values, and batch x length, with 128 channels. Those with decays of channels, kda, gla and rwkv, are of the tables
of cuLA, attention-gym and flash-linear-attention. Each backend takes its heuristic, with ``--sweep`` every candidate.
Results are compared with those of XLA from float32 values before anything is timed. Calls are queued, so that a time is
that of the device where it is longer than a launch.

  python -m benchmarks.linear_attention_gpu [--case NAME] [--sweep]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, queued, record
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.op.cases import variants
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

KERNEL = LinearAttention()
GATED = LinearAttentionCase("", key_dim=128, dtype="bfloat16", qk_l2norm=True)
CASES: dict[str, LinearAttentionCase] = variants(
    GATED,
    {
        f"gated_delta_{heads}_{value_heads}_{batch}x{length}": {
            "heads": heads, "value_heads": value_heads, "batch": batch, "length": length,
        }
        for heads, value_heads, batch, length in (
            (16, 64, 4, 8192), (16, 48, 8, 4096), (16, 32, 4, 8192), (16, 32, 8, 1024), (16, 64, 1, 32768),
            (16, 32, 1, 32768), (16, 32, 1, 8192), (2, 8, 1, 32768), (2, 8, 1, 8192), (4, 8, 1, 32768),
        )
    }
    | {
        "delta_16_16_1x8192": {"heads": 16, "length": 8192, "gate": "none"},
        "ssd_80_1x32768": {
            "heads": 1, "value_heads": 80, "value_dim": 64, "length": 32768, "update": "add", "qk_l2norm": False,
            "scale": 1.0,
        },
        "kda_64_1x8192": {"heads": 64, "length": 8192, "gate": "channel"},
        "kda_16_1x4096": {"heads": 16, "length": 4096, "gate": "channel"},
        "gla_96_1x8192": {"heads": 96, "length": 8192, "gate": "channel", "update": "add", "qk_l2norm": False},
        "rwkv6_8_8x1024": {
            "heads": 8, "batch": 8, "key_dim": 64, "gate": "channel", "update": "bonus", "qk_l2norm": False,
        },
        "rwkv7_64_1x8192": {
            "heads": 64, "length": 8192, "key_dim": 64, "gate": "channel", "update": "removal", "qk_l2norm": False,
            "scale": 1.0,
        },
        "retention_16_4x4096": {
            "heads": 16, "batch": 4, "length": 4096, "gate": "head", "update": "add", "qk_l2norm": False,
        },
    },
)  # fmt: skip


def drawn(case: LinearAttentionCase) -> LinearAttentionInputs:
    """The inputs of a case, drawn on the device."""
    args, kwargs = case.abstract_arguments()
    invocation, _ = prepared(KERNEL, args, kwargs, concrete=False)
    return KERNEL.sampled(KERNEL.inputs_of(invocation), jax.random.key(0))


def program(backend: Any, direction: Direction, params: Any) -> Callable[..., Any]:
    """A call of a backend with params, as a compiled function of inputs and cotangents."""
    if direction == "forward":
        return jax.jit(lambda inputs, _: backend.forward(inputs, params))
    none = LinearAttentionResults(None, None)
    return jax.jit(lambda inputs, cotangents: backend.backward(inputs, none, cotangents, params))


@jax.jit
def error(got: Any, want: Any) -> jax.Array:
    """The greatest norm of an error relative to that of the exact values."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    found = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs]
    norms = [(jnp.linalg.norm(x - y), jnp.linalg.norm(y)) for x, y in ((x.ravel(), y.ravel()) for x, y in found)]
    return jnp.stack([apart / jnp.maximum(norm, 1e-30) for apart, norm in norms]).max()


def exact(inputs: LinearAttentionInputs, cotangents: LinearAttentionResults, direction: Direction) -> Any:
    """Results or gradients of XLA from the same values in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (inputs, cotangents))
    backend: Any = next(each.backend for each in KERNEL.backends if each.name == "xla")
    with jax.default_matmul_precision("highest"):
        params = backend.heuristic(inputs.structs, current_device(), direction)
        return program(backend, direction, params)(*wide)


def measured(case: LinearAttentionCase, direction: Direction, sweep: bool, rounds: int, calls: int) -> dict[str, Any]:
    """Seconds and errors of every backend that serves a case, by backend and params."""
    inputs, device = drawn(case), current_device()
    out = jnp.cos(jnp.arange(inputs.value.size, dtype=jnp.float32)).reshape(inputs.value.shape)
    cotangents = LinearAttentionResults(out.astype(inputs.value.dtype), None)
    want = exact(inputs, cotangents, direction)
    runs, errors = {}, {}
    for backend in (loaded.backend for loaded in KERNEL.backends):
        if backend is None or backend.not_supported_reasons(inputs.structs, device, direction):
            continue
        listed = [backend.heuristic(inputs.structs, device, direction)]
        if sweep and backend.name != "xla":
            listed = list(backend.candidates(inputs.structs, device, direction))
        for params in listed:
            name = f"{backend.name} {params}"
            run = program(backend, direction, params)
            errors[name] = float(error(run(inputs, cotangents), want))
            runs[name] = queued(run, (inputs, cotangents), calls)
    timings = interleaved(runs, rounds)
    return {
        name: {"error": errors[name], "seconds": timing.minimum / calls, **timing.to_json()}
        for name, timing in timings.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="of all, if it is not given")
    parser.add_argument("--sweep", action="store_true", help="time every candidate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="calls that are queued")
    parser.add_argument("--name", default="linear_attention_gpu", help="of the recorded file")
    given = parser.parse_args(argv)
    cells: list[dict[str, Any]] = []
    directions: tuple[Direction, ...] = ("forward", "backward")
    for name in given.case or CASES:
        for direction in directions:
            begun = time.perf_counter()
            found = measured(CASES[name], direction, given.sweep, given.rounds, given.calls)
            cells.append({"case": name, "direction": direction, "found": found})
            for key, each in sorted(found.items(), key=lambda item: item[1]["seconds"]):
                print(f"{name:28} {direction:8} {each['seconds'] * 1e3:9.3f} ms  error {each['error']:.1e}  {key}")
            print(f"{time.perf_counter() - begun:.0f} s", flush=True)
            record(given.name, {"rounds": given.rounds, "calls": given.calls, "cells": cells})


if __name__ == "__main__":
    main()
