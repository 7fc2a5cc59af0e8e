"""How long the kernels of the demo's train step take to be tuned, and how far the search is behind an exhaustive one.

Each search tunes from nothing. What it chose and what the exhaustive search chose are then measured in turn.
``python -m benchmarks.demo_tuning``
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.attention_tuned import compare
from benchmarks.common import RESULTS, record
from tilewright.ops import Autotuner, ConfigCache, ConfigSelectorChain, Tuner
from tilewright.ops.program import find_invocations

EXHAUSTIVE = "exhaustive"
TUNERS = {
    "in this process": Tuner(),
    "in a process of their own": Tuner(isolation="process"),
    EXHAUSTIVE: Tuner(search="exhaustive", iters=9),
}


def demo_step(batch: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    """The train step of ``make demo``, and its arguments."""
    sys.path.insert(0, str(RESULTS.parents[1] / "examples"))
    from byte_transformer import ModelConfig, OptimizerConfig, initial_state, train_step
    from train_demo import tilewright_attention

    model, optimizer = ModelConfig(), OptimizerConfig(steps=1)
    step = functools.partial(train_step, model=model, optimizer=optimizer, attention=tilewright_attention)
    state = jax.eval_shape(functools.partial(initial_state, model), jax.random.key(0))
    return step, (state, jax.ShapeDtypeStruct((batch, length + 1), "int32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, help="seconds for one call")
    chosen = parser.parse_args()
    step, arguments = demo_step(chosen.batch, chosen.length)
    invocations = find_invocations(step, *arguments)
    searches: dict[str, Any] = {}
    results: dict[str, Any] = {}
    chain = ConfigSelectorChain(ConfigCache())
    with tempfile.TemporaryDirectory() as empty:
        for name, tuner in TUNERS.items():
            chain = ConfigSelectorChain(ConfigCache(), tables=Path(empty))
            start = time.perf_counter()
            results[name] = Autotuner(tuner, chooser=chain, budget_s=chosen.budget).tune(*invocations)
            searches[name] = {"seconds": time.perf_counter() - start, "calls": []}
            print(f"{name}: {searches[name]['seconds']:.1f} s for {len(invocations)} calls", flush=True)
    for i, inv in enumerate(invocations):
        winners = {name: result.entries[i].winner for name, result in results.items()}
        samples = compare(inv, winners, chain, chosen.rounds)
        medians = {name: statistics.median(s) for name, s in samples.items() if isinstance(s, list)}
        for name, result in results.items():
            call = result.entries[i]
            behind = medians[name] / medians[EXHAUSTIVE] - 1
            searches[name]["calls"].append(
                {
                    "shapes": call.shapes,
                    "direction": call.direction,
                    "candidates": len(call.candidates),
                    "failed": [(str(c.config), c.error[:300]) for c in call.candidates if c.error],
                    "winner": str(call.winner.config),
                    "default": None if call.heuristic is None else str(call.heuristic.config),
                    "speedup": call.speedup,
                    "regret": call.regret,
                    "behind_exhaustive": behind,
                    "samples_ms": samples[name],
                }
            )
            said = f"{call.direction} {name}: {call.winner.config} {medians[name]:.4g} ms, {behind:+.1%} of exhaustive"
            print(f"{said}, regret {call.regret:.1%}, {len(call.candidates)} candidates", flush=True)
    print(f"written to {record('demo_tuning', {'searches': searches})}")


if __name__ == "__main__":
    main()
