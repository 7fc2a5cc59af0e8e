"""The linear cross-entropy on the CPU beside the logits in memory: time and peak memory at a vocabulary of 32768.

Goals: with its gradients it takes no longer than XLA with the logits in memory, and a tenth of its memory. Both forms
of the gradients are measured. Memory is that of a fresh process beyond its operands, and XLA's own count of
temporaries.
``python -m benchmarks.linear_cross_entropy_cpu``
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.common import interleaved, record
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase, dense
from tilewright.kernels.linear_cross_entropy.xla.params import XlaLossBackwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_cross_entropy

CASES = {
    case.name: case
    for case in (
        LinearCrossEntropyCase("4096x512x32768", tokens=4096, d=512, vocab=32768),
        LinearCrossEntropyCase("half ignored", tokens=4096, d=512, vocab=32768, ignored=0.5),
    )
}
SIDES = ("tilewright", "tilewright, recomputed", "logits in memory")
RECOMPUTED = PerDirection(backward=Choice("xla", XlaLossBackwardParams(256, 4096)))
TIME_GOAL, MEMORY_GOAL = 1.0, 0.1


def programs(side: str, case: LinearCrossEntropyCase) -> dict[str, Callable[[], Any]]:
    """The loss without and with both gradients, and XLA's bytes of temporaries of the latter."""
    (x, weight, labels), options = case.arguments()
    peer: Any = dense(case)

    def loss(x: Any, weight: Any) -> Any:
        if side == "logits in memory":
            return peer(x, weight, labels, **options)
        return linear_cross_entropy(x, weight, labels, **options, cfg=RECOMPUTED if "recomputed" in side else None)

    forward = jax.jit(loss).lower(x, weight).compile()
    both = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight).compile()
    analysis: Any = both.memory_analysis()
    temporary = analysis.temp_size_in_bytes
    return {
        "forward": lambda: forward(x, weight),
        "both": lambda: both(x, weight),
        "temporaries": lambda: temporary,
    }


def print_peak(side: str, case: LinearCrossEntropyCase) -> None:
    run = programs(side, case)
    before = _resident_peak()
    jax.block_until_ready(run["both"]())
    print(json.dumps({"before": before, "peak": _resident_peak(), "temporaries": run["temporaries"]()}))


def _resident_peak() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # macOS counts bytes, Linux kilobytes


def peak_memory(side: str, case: LinearCrossEntropyCase) -> dict[str, float]:
    """Bytes of a fresh process before and after one loss with its gradients."""
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy_cpu", "--peak", side, "--case", case.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(case: LinearCrossEntropyCase, memory: dict[str, dict[str, float]], rounds: int) -> dict[str, Any]:
    """Times all sides in turn, and prints them with their memory."""
    made = {side: programs(side, case) for side in SIDES}
    timings = interleaved(
        {f"{what} {side}": made[side][what] for side in SIDES for what in ("forward", "both")}, rounds, warmup=1
    )
    found: dict[str, Any] = {}
    theirs = memory[SIDES[-1]]
    for side in SIDES:
        found[side] = {"memory": memory[side]}
        share = memory[side]["temporaries"] / theirs["temporaries"]
        said = f"temporaries {memory[side]['temporaries'] / 1e6:6.0f} MB ({share:.3f})   "
        said += f"process +{(memory[side]['peak'] - memory[side]['before']) / 1e6:5.0f} MB"
        for what in ("forward", "both"):
            ours, peers = timings[f"{what} {side}"], timings[f"{what} {SIDES[-1]}"]
            ratio = statistics.median(a / b for a, b in zip(ours.samples, peers.samples, strict=True))
            found[side][what] = {"ratio": ratio, "time": ours.to_json()}
            said += f"   {what} {ours.median * 1e3:6.0f} ms ({ratio:.2f})"
        print(f"{case.name:16} {side:24} {said}", flush=True)
    return found | {"goals": {"time": TIME_GOAL, "memory": MEMORY_GOAL}, "case": dataclasses.asdict(case)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="print only, write no record")
    chosen = parser.parse_args()
    if chosen.peak:
        print_peak(chosen.peak, CASES[chosen.case])
        return
    # First of all: on Linux a new process begins with the peak of the one that starts it.
    memory = {name: {side: peak_memory(side, case) for side in SIDES} for name, case in CASES.items()}
    found = {name: compare(case, memory[name], chosen.rounds) for name, case in CASES.items()}
    if not chosen.dry:
        print(f"written to {record('linear_cross_entropy_cpu', {'cases': found})}")


if __name__ == "__main__":
    main()
