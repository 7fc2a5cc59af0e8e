"""Times to trace, lower and compile attention on a Hopper GPU the first time: each case in a process of its own.

No GPU is needed: programs are made for an H100. They are compiled too where JAX's CUDA plugin and ptxas are installed
(``make aot``). ``JAX_PLATFORMS=cpu python -m benchmarks.compile_time``
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import tilewright
from tilewright.modules import flash_attention
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.topology import missing_compiler

H100 = "NVIDIA H100 80GB HBM3"
LENGTH = 4096
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal_d128": (128, {"causal": True}),
    "full_d128": (128, {}),
    "causal_d64": (64, {"causal": True}),
    "causal_d256": (256, {"causal": True}),
    "window_d128": (128, {"causal": True, "sliding_window": 255}),
    "soft_cap_d128": (128, {"causal": True, "logits_soft_cap": 30.0}),
    "dropout_d128": (128, {"causal": True, "dropout_prob": 0.1, "dropout_seed": 0}),
}
"""Head dim and options of each case, all with a batch of 2, 32 query and 8 key heads, in bfloat16."""

STAGES = ("trace", "lower", "compile")


def measure(name: str, gradient: bool) -> dict[str, float]:
    """Seconds of each stage, in this process, which must not have made a program before."""
    head_dim, options = CASES[name]
    query, key = (jax.ShapeDtypeStruct((2, LENGTH, heads, head_dim), jnp.bfloat16) for heads in (32, 8))

    def attend(query: Any, key: Any, value: Any) -> Any:
        return flash_attention(query, key, value, **options)

    def loss(*arrays: Any) -> Any:
        return attend(*arrays).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else attend)
    times = [time.perf_counter()]
    with tilewright.target_device(H100) as target:
        traced = program.trace(query, key, key)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        if not missing_compiler(find_device(H100)):
            lowered.compile(device_assignment=target.devices)
            times.append(time.perf_counter())
    return {stage: end - start for stage, start, end in zip(STAGES, times, times[1:], strict=False)}


def in_new_process(name: str, direction: str) -> dict[str, float]:
    """``measure`` in an interpreter of its own."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", name, direction]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TILEWRIGHT_LOWERED": "0"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], args.child[1] == "gradient")))
        return
    print(f"seconds, median of {args.rounds} new processes: {', '.join(STAGES)}")
    for name in args.cases:
        for direction in ("forward", "gradient"):
            rounds = [in_new_process(name, direction) for _ in range(args.rounds)]
            medians = (statistics.median(one[stage] for one in rounds) for stage in STAGES if stage in rounds[0])
            print(f"{name:16} {direction:9} " + "  ".join(f"{seconds:5.2f}" for seconds in medians), flush=True)


if __name__ == "__main__":
    main()
