"""Causal flash attention on the CPU beside ``jax.nn.dot_product_attention``: time, share of the matrix rate, memory.

Goals: at batch 1, 8 heads, length 4096, head_dim 64, float32 the forward pass takes at most 0.3 × the time of JAX's,
forward plus backward at most 0.4 ×; at length 16384 forward plus backward peaks under 1 GB, the process included.
``python -m benchmarks.flash_attention_cpu``
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

from benchmarks.common import Timing, interleaved, record
from tilewright.modules import flash_attention

FORWARD_GOAL, BOTH_GOAL, MEMORY_GOAL = 0.3, 0.4, 1e9
MATRIX = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One causal self-attention; ``goals`` says whether the goals are stated for it."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    goals: bool = False

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.length} {self.heads}/{self.kv_heads} d{self.head_dim} {self.dtype}"

    def arrays(self) -> tuple[jax.Array, ...]:
        """query, key, value and the output's cotangent."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(self.batch, self.length, count, self.head_dim) for count in heads]
        return tuple(jax.random.normal(key, shape, self.dtype) for key, shape in zip(keys, shapes, strict=True))

    @property
    def forward_flops(self) -> float:
        """Of the two matmuls, only for the visible scores."""
        visible = self.length * (self.length + 1) / 2
        return 4.0 * self.batch * self.heads * visible * self.head_dim


SHAPES = (
    Shape(1, 4096, 8, 8, 64, goals=True),
    Shape(1, 4096, 8, 2, 64),
    Shape(8, 512, 8, 4, 64),
    Shape(8, 256, 8, 4, 32),
    Shape(1, 2048, 8, 8, 64, "bfloat16"),
)
LONG = Shape(1, 16384, 8, 8, 64)


def attention(side: str) -> Callable[..., Any]:
    if side == "jax.nn":
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return lambda q, k, v: flash_attention(q, k, v, causal=True)


def programs(side: str, shape: Shape) -> dict[str, Callable[[], Any]]:
    query, key, value, cotangent = shape.arrays()
    forward = jax.jit(attention(side))

    @jax.jit
    def both(query, key, value, cotangent):
        out, pull = jax.vjp(attention(side), query, key, value)
        return out, pull(cotangent)

    return {
        f"forward {side}": lambda: forward(query, key, value),
        f"both {side}": lambda: both(query, key, value, cotangent),
    }


def compare(shape: Shape, rounds: int) -> dict[str, Any]:
    """Times both sides and a square matrix product in float32, in turn."""
    matrix = jax.random.normal(jax.random.key(0), (MATRIX, MATRIX))
    product = jax.jit(lambda x: x @ x)
    functions: dict[str, Callable[[], Any]] = programs("tilewright", shape) | programs("jax.nn", shape)
    functions["matrix product"] = lambda: product(matrix)
    timings = interleaved(functions, rounds, warmup=1)
    rate = 2.0 * MATRIX**3 / timings["matrix product"].minimum
    found: dict[str, Any] = {"matrix_flops_per_s": rate}
    for what, factor, goal in (("forward", 1.0, FORWARD_GOAL), ("both", 3.5, BOTH_GOAL)):
        ours, theirs = timings[f"{what} tilewright"], timings[f"{what} jax.nn"]
        share = factor * shape.forward_flops / ours.minimum / rate
        ratio = paired_ratio(ours, theirs)
        found[what] = {
            "ratio": ratio,
            "share_of_matrix_rate": share,
            "tilewright": ours.to_json(),
            "jax.nn": theirs.to_json(),
        } | ({"goal": goal} if shape.goals else {})
        said = f"   goal {goal} {'met' if ratio <= goal else 'missed'}" if shape.goals else ""
        print(
            f"{shape.name:30} {what:8} {ours.median * 1e3:8.1f} ms   jax.nn {theirs.median * 1e3:8.1f} ms   "
            f"ratio {ratio:.3f}   {share:4.0%} of the float32 matrix rate{said}",
            flush=True,
        )
    return found


def paired_ratio(ours: Timing, theirs: Timing) -> float:
    """The median over rounds, so that a slow moment of the machine counts on both sides."""
    return statistics.median(a / b for a, b in zip(ours.samples, theirs.samples, strict=True))


def peak_memory(side: str, shape: Shape) -> dict[str, float]:
    """Peak resident bytes of a fresh process before and after forward plus backward at this shape."""
    command = [sys.executable, "-m", "benchmarks.flash_attention_cpu", "--peak", side, "--length", str(shape.length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_peak(side: str, length: int) -> None:
    shape = dataclasses.replace(LONG, length=length)
    run = programs(side, shape)[f"both {side}"]
    before = _resident_peak()
    jax.block_until_ready(run())
    print(json.dumps({"before": before, "peak": _resident_peak()}))


def _resident_peak() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # macOS counts bytes, Linux kilobytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", choices=("tilewright", "jax.nn"), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=LONG.length, help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="print only, write no record")
    chosen = parser.parse_args()
    if chosen.peak:
        print_peak(chosen.peak, chosen.length)
        return
    memory = {"tilewright": peak_memory("tilewright", LONG)}
    # The direct form at the full length would need more than 8 GB: a quarter of the length shows its square.
    quarter = dataclasses.replace(LONG, length=LONG.length // 4)
    memory["jax.nn at a quarter of the length"] = peak_memory("jax.nn", quarter)
    peak = memory["tilewright"]["peak"]
    print(
        f"{LONG.name:30} both: peak {peak / 1e6:.0f} MB of the process   "
        f"goal {MEMORY_GOAL / 1e6:.0f} {'met' if peak < MEMORY_GOAL else 'missed'}"
    )
    found = {shape.name: compare(shape, chosen.rounds) for shape in SHAPES}
    if not chosen.dry:
        data = {"shapes": found, "memory": {"shape": LONG.name, "goal_bytes": MEMORY_GOAL, **memory}}
        print(f"written to {record('flash_attention_cpu', data)}")


if __name__ == "__main__":
    main()
