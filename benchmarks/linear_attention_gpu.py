"""Linear attention on a GPU: milliseconds of each backend, forward and backward.

The shapes are those of published layers and of the tables of FlashQLA, FlashInfer and mamba-ssm: heads of queries and
of values, and batch x length, with 128 channels. Those with decays of channels, kda, gla and rwkv, are of the tables
of cuLA, attention-gym and flash-linear-attention. Each backend takes its heuristic, with ``--sweep`` every candidate.
All programs are compiled first, by threads. Results are compared with those of XLA from float32 values before anything
is timed. Calls are queued, so that a time is that of the device where it is longer than a launch.

  python -m benchmarks.linear_attention_gpu [--case NAME] [--backend NAME] [--sweep] [--unchecked]
"""

import argparse
import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, queued, record, usable_cores
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.op.cases import variants
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

KERNEL = LinearAttention()
BACKENDS: dict[str, Any] = {each.name: each.backend for each in KERNEL.backends if each.backend is not None}
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


def structs(case: LinearAttentionCase) -> LinearAttentionInputs:
    """The inputs of a case, without their values."""
    args, kwargs = case.abstract_arguments()
    return KERNEL.inputs_of(prepared(KERNEL, args, kwargs, concrete=False)[0])


def drawn(case: LinearAttentionCase) -> LinearAttentionInputs:
    """The inputs of a case, drawn on the device."""
    return KERNEL.sampled(structs(case), jax.random.key(0))


def program(backend: Any, direction: Direction, params: Any) -> Any:
    """A call of a backend with params, as a jitted function of inputs and cotangents."""
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


def widened(tree: Any) -> Any:
    """The values of 16 bits in float32."""
    narrow = (jnp.bfloat16, jnp.float16)
    return jax.tree.map(lambda x: widen(x) if x.dtype in narrow else x, tree)


def widen(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """A pass of a case by one backend, or with ``backend`` "exact" by XLA from the same values in float32."""

    case: str
    direction: Direction
    backend: str
    params: Any

    def compiled(self) -> Any:
        backend: Any = BACKENDS["xla" if self.backend == "exact" else self.backend]
        inputs = structs(CASES[self.case])
        given = inputs, LinearAttentionResults(inputs.value, None)
        run = program(backend, self.direction, self.params)
        if self.backend != "exact":
            return run.lower(*given).compile()
        with jax.default_matmul_precision("highest"):
            return run.lower(*widened(given)).compile()


def programs(case: str, direction: Direction, backends: Sequence[str], *, sweep: bool) -> list[Program]:
    """What is measured of a case, with the heuristic's params or with every candidate."""
    inputs, device = structs(CASES[case]), current_device()
    found = []
    for name in backends:
        backend = BACKENDS["xla" if name == "exact" else name]
        if not backend.not_supported_reasons(inputs, device, direction):
            swept = sweep and name not in ("xla", "exact")
            listed = list(backend.candidates(inputs, device, direction)) if swept else []
            listed = listed or [backend.heuristic(inputs, device, direction)]
            found += [Program(case, direction, name, params) for params in listed]
    return found


def measured(case: str, compiled: Mapping[Program, Any], rounds: int, calls: int) -> dict[str, Any]:
    """Seconds and errors of the programs of a direction of a case, by backend and params."""
    inputs = drawn(CASES[case])
    out = jnp.cos(jnp.arange(inputs.value.size, dtype=jnp.float32)).reshape(inputs.value.shape)
    given = inputs, LinearAttentionResults(out.astype(inputs.value.dtype), None)
    want = next((run(*widened(given)) for each, run in compiled.items() if each.backend == "exact"), None)
    runs, errors = {}, {}
    for each, run in compiled.items():
        if each.backend != "exact":
            name = f"{each.backend} {each.params}"
            errors[name] = None if want is None else float(error(run(*given), want))
            runs[name] = queued(run, given, calls)
    timings = interleaved(runs, rounds)
    return {
        name: {"error": errors[name], "seconds": timing.minimum / calls, **timing.to_json()}
        for name, timing in timings.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="of all, if it is not given")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="of all, if it is not given")
    parser.add_argument("--sweep", action="store_true", help="time every candidate")
    parser.add_argument(
        "--unchecked", action="store_true", help="without errors, whose exact values take long to compile"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="calls that are queued")
    parser.add_argument("--name", default="linear_attention_gpu", help="of the recorded file")
    given = parser.parse_args(argv)
    backends = [*(given.backend or BACKENDS), *(() if given.unchecked else ("exact",))]
    directions: tuple[Direction, ...] = ("forward", "backward")
    groups = {
        (case, direction): programs(case, direction, backends, sweep=given.sweep)
        for case in given.case or CASES
        for direction in directions
    }
    cells: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        waiting = {each: pool.submit(each.compiled) for group in groups.values() for each in group}
        concurrent.futures.wait(waiting.values())
        for (case, direction), group in groups.items():
            found = measured(case, {each: waiting.pop(each).result() for each in group}, given.rounds, given.calls)
            cells.append({"case": case, "direction": direction, "found": found})
            for key, each in sorted(found.items(), key=lambda item: item[1]["seconds"]):
                error_of = "" if each["error"] is None else f"error {each['error']:.1e}"
                print(f"{case:28} {direction:8} {each['seconds'] * 1e3:9.3f} ms  {error_of}  {key}", flush=True)
            record(given.name, {"rounds": given.rounds, "calls": given.calls, "cells": cells})


if __name__ == "__main__":
    main()
