"""``scaled_linear`` on a GPU: microseconds of device time of a training step of one layer, beside bfloat16.

The step is the result and both gradients of a layer of ``--shape`` rows, k, n, quantising included. Times are sums of
all kernels, taken as ``benchmarks.norms`` takes them, in turn. ``python -m benchmarks.scaled_linear``
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record
from benchmarks.norms import FLUSHED_BYTES, Run, measure_in_turn, sample, wall_sample
from tilewright.modules import Recipe, scaled_linear

RECIPES = {
    "tensor": Recipe(),
    "tensor e4m3": Recipe("tensor", gradient_format="e4m3"),
    "row": Recipe("row"),
    "block": Recipe("block"),
}


def step(linear: Any) -> Any:
    """The result of a layer and the gradients for given cotangents."""

    def run(x: jax.Array, w: jax.Array, d: jax.Array) -> Any:
        out, pull_back = jax.vjp(linear, x, w)
        return out, pull_back(d)

    return jax.jit(run)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8192,4096,14336", help="rows, k and n")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    given = parser.parse_args(argv)
    rows, k, n = map(int, given.shape.split(","))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, k), (k, n), (rows, n)
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    runs: dict[str, Run] = {}
    for name in ("bfloat16", *given.recipes.split(",")):
        linear = jnp.matmul if name == "bfloat16" else functools.partial(scaled_linear, recipe=RECIPES[name])
        try:
            program = step(linear).lower(*operands).compile()
            jax.block_until_ready(program(*operands))
            runs[name] = functools.partial(program, *operands)
        except Exception as error:  # one that does not run must not take the others along
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
    found = measure_in_turn(runs, given.rounds, FLUSHED_BYTES, wall_sample if given.wall else sample)
    plain = found.get("bfloat16", {}).get("median_us")
    for name, each in found.items():
        time_us = each.get("median_us", float("nan"))
        print(
            f"{name:>12} {time_us:9.1f} µs {plain / time_us if plain else 0:5.2f} x  {each.get('kernels', '')}"[:1200],
            flush=True,
        )
    record("scaled_linear", {"shape": [rows, k, n], "rounds": given.rounds, "steps": found})


if __name__ == "__main__":
    main()
