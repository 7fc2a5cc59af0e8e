"""Attention as it is tuned beside its default and beside the best of every single backend, in milliseconds.

Each call is tuned as ``tilewright.tune`` would, from nothing; the default is what runs where nothing was measured and
no table ships. Then the winner, the default and the fastest of each backend are compiled anew and measured in turn,
with the device to themselves. ``python -m benchmarks.attention_tuned``; with ``--table`` the winners become a tuned
table as they ship in ``tilewright/tables``.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.attention import DIRECTIONS, chosen_cases, driver, versions
from benchmarks.attention_peers import Operands
from benchmarks.common import RESULTS, device_name, environment
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.ops import Autotuner, ConfigCache, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.config.tables import add_to_table
from tilewright.ops.core.types import Direction
from tilewright.ops.execution.bench import Bench, CandidateError, bench_on
from tilewright.ops.execution.results import Candidate, TunedCall
from tilewright.ops.execution.workload import Workload

MOST_BEHIND = 0.02
"""A tuned call that is slower than its default or than a single backend by more is a defect of the tuner."""

NEAR = 1.5
"""An implementation whose fastest is this many times slower than the winner is not measured again."""


def invocation(case: AttentionCase, direction: Direction) -> Invocation[Any, Any]:
    """The call of a case, without its arrays."""
    from tilewright.ops.execution.executor import prepared

    shapes = Operands.shapes(case)
    given = {**shapes.floats, **shapes.options(shapes.extras)}
    inv, _ = prepared(FlashAttention(), (), given, concrete=False)
    return dataclasses.replace(inv, direction=direction)


def contenders(call: TunedCall) -> dict[str, Candidate]:
    """The winner, the default, and the fastest of each implementation that came near by the tuning's own samples."""
    found = {"tuned": call.winner}
    if call.heuristic is not None and call.heuristic.eligible:
        found["default"] = call.heuristic
    times = {c.config: c.time_ms for c in call.candidates if c.eligible and c.time_ms is not None}
    for each in sorted((c for c in call.candidates if c.config in times), key=lambda c: times[c.config]):
        if times[each.config] <= NEAR * min(times.values()):
            found.setdefault(each.config.implementation, each)
    return found


def compare(inv: Invocation[Any, Any], chosen: dict[str, Candidate], chain: ConfigSelectorChain, rounds: int) -> Any:
    """Fresh samples of every contender, in turn, every second round backwards; a message in place of what failed."""
    configs = list(dict.fromkeys(candidate.config for candidate in chosen.values()))
    bench: Bench = bench_on(inv.target, Workload(inv, chain, verify=False), configs, None, warmup=2)
    samples: dict[Any, Any] = {config: [] for config in configs}
    try:
        for i, config in enumerate(configs):
            bench.expect(range(i, len(configs)))
            trial = bench.start(i)
            if trial.error:
                samples[config] = trial.error
        for number in range(rounds):
            for i, config in list(enumerate(configs))[:: -1 if number % 2 else 1]:
                if isinstance(samples[config], list):
                    try:
                        samples[config].append(bench.sample_ms(i))
                    except CandidateError as error:
                        samples[config] = str(error)
    finally:
        bench.close()
    return {name: samples[candidate.config] for name, candidate in chosen.items()}


def cell_of(inv: Invocation[Any, Any], case: AttentionCase, call: TunedCall, took_s: float, samples: Any) -> Any:
    """What the record says of one direction of a case."""
    medians = {name: statistics.median(s) for name, s in samples.items() if isinstance(s, list) and s}
    single = {name: ms for name, ms in medians.items() if name not in ("tuned", "default")}
    tuned = medians.get("tuned", math.nan)
    best = min(single, key=lambda name: single[name], default=None)
    return {
        "case": case.name,
        "direction": inv.direction,
        "shapes": call.shapes,
        "tuning_s": took_s,
        "complete": call.complete,
        "regret": call.regret,
        "tuned_config": str(call.winner.config),
        "default_config": None if call.heuristic is None else str(call.heuristic.config),
        "tuned_ms": tuned,
        "default_ms": medians.get("default"),
        "best_single": best,
        "best_single_ms": None if best is None else single[best],
        "over_default": tuned / medians["default"] if "default" in medians else None,
        "over_best_single": tuned / single[best] if best is not None else None,
        "samples_ms": samples,
        "candidates": [
            {"config": str(c.config), "samples_ms": list(c.samples_ms), "check": c.check, "error": c.error[:300]}
            for c in call.candidates
        ],
    }


def behind(cell: Any) -> bool:
    """Whether a cell breaks the promise."""
    ratios = [cell["over_default"], cell["over_best_single"]]
    return any(ratio is not None and not ratio <= 1 + MOST_BEHIND for ratio in ratios)


def line(cell: Any) -> str:
    implementations = [name for name in cell["samples_ms"] if name not in ("tuned", "default")]
    medians = {
        name: statistics.median(samples)
        for name in implementations
        if isinstance(samples := cell["samples_ms"][name], list)
    }
    others = "  ".join(f"{name} {ms:.4g}" for name, ms in medians.items())
    default = "failed" if cell["default_ms"] is None else f"{cell['default_ms']:.4g}"
    failed = sum(1 for c in cell["candidates"] if c["error"])
    mark = " BEHIND" if behind(cell) else ""
    return (
        f"{cell['case']:22} {cell['direction']:8} tuned {cell['tuned_ms']:.4g}  default {default}  [{others}]  "
        f"{len(cell['candidates'])} candidates, {failed} failed, {cell['tuning_s']:.1f} s{mark}  {cell['tuned_config']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="hopper,own,cuda")
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--budget", type=float, help="seconds for the tuning of one direction of a case")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--search", choices=("halving", "exhaustive"), default="halving")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no call after this many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the cells in --out that this run does not measure")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/attention_tuned.json by default")
    parser.add_argument("--table", type=Path, help="add the winners to this tuned table")
    chosen = parser.parse_args(argv)
    start = time.monotonic()
    out = chosen.out or RESULTS / device_name() / "attention_tuned.json"
    before = json.loads(out.read_text()) if chosen.keep and out.is_file() else {"runs": [], "cells": []}
    command = " ".join(["python", "-m", "benchmarks.attention_tuned", *(sys.argv[1:] if argv is None else argv)])
    run = {"command": command, "environment": environment(), "versions": versions(), "driver": driver()}
    cells = {(cell["case"], cell["direction"]): cell for cell in before["cells"]}
    runs, mine = [*before["runs"], run], []
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as compiled:
        # What is measured again was compiled before.
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for case in chosen_cases(chosen.cases):
            chain = ConfigSelectorChain(ConfigCache(), tables=Path(empty))
            for direction in chosen.directions.split(","):
                if time.monotonic() - start > chosen.seconds:
                    print(f"{case.name} {direction}: not started, the time is over", flush=True)
                    continue
                inv = invocation(case, direction)
                begun = time.monotonic()
                tuner = Autotuner(Tuner(search=chosen.search), chooser=chain, budget_s=chosen.budget)
                try:
                    result = tuner.tune(inv)
                except ExceptionGroup as error:  # the other calls are still measured
                    print(f"{case.name} {direction}: {error.exceptions[0]}"[:600], flush=True)
                    continue
                took_s, (call,) = time.monotonic() - begun, result
                cell = cell_of(inv, case, call, took_s, compare(inv, contenders(call), chain, chosen.rounds))
                cells[case.name, direction] = cell
                mine.append(cell)
                print(line(cell), flush=True)
                write(out, runs, list(cells.values()))
                if chosen.table is not None:
                    add_to_table(chosen.table, result, command)
                jax.clear_caches()
    worst = max((cell["over_best_single"] or math.nan for cell in mine), default=math.nan)
    regrets = [cell["regret"] for cell in mine if cell["regret"] is not None]
    print(
        f"{len(mine)} calls; tuned at worst {worst:.3f} of the best single backend; most regret "
        f"{max(regrets, default=math.nan):.3f}; behind: {sum(map(behind, mine))}; written to {out}"
    )
    return 0


def write(out: Path, runs: list[Any], cells: list[Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")  # a run that is killed leaves the old record or the new one
    part.write_text(json.dumps({"benchmark": "attention_tuned", "runs": runs, "cells": cells}, indent=1) + "\n")
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main())
