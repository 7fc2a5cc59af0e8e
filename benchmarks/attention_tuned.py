"""Attention as it is tuned beside its default and beside the best of every single backend, in milliseconds.

Each call is tuned as ``tilewright.tune`` would, from nothing; the default is what runs where nothing was measured and
no table ships. Then the winner, the default and the fastest of each backend are compiled anew and measured in turn,
with the device to themselves. ``python -m benchmarks.attention_tuned``; with ``--table`` the winners become a tuned
table as they ship in ``tilewright/tables``.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.attention import DIRECTIONS, chosen_cases, driver, versions
from benchmarks.attention_peers import Operands
from benchmarks.common import RESULTS, device_name, environment
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.ops import Autotuner, ConfigCache, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.config.tables import add_to_table
from tilewright.ops.config.tuner import Search
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.bench import Bench, CandidateError, local_bench
from tilewright.ops.types import Direction

MAX_BEHIND = 0.02
"""A tuned call that is slower than its default or than a single backend by more is a defect of the tuner."""

NOT_STARTED = ("dropped", "left out")

NEAR = 1.5
"""An implementation whose fastest is this many times slower than the winner is not measured again."""


def invocation(case: AttentionCase, direction: Direction) -> Invocation[Any, Any]:
    """The call of a case, without its arrays."""
    from tilewright.ops.kernel.prepared import prepared

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
            found.setdefault(each.config.backend, each)
    return found


def compare(inv: Invocation[Any, Any], chosen: dict[str, Candidate], chain: ConfigSelectorChain, rounds: int) -> Any:
    """Fresh samples of every contender, in turn, every second round backwards; a message in place of what failed."""
    configs = list(dict.fromkeys(candidate.config for candidate in chosen.values()))
    bench: Bench = local_bench(inv, chain, configs, verify=False)
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
    return any(ratio is not None and not ratio <= 1 + MAX_BEHIND for ratio in ratios)


def line(cell: Any) -> str:
    implementations = [name for name in cell["samples_ms"] if name not in ("tuned", "default")]
    medians = {
        name: statistics.median(samples)
        for name in implementations
        if isinstance(samples := cell["samples_ms"][name], list)
    }
    others = "  ".join(f"{name} {ms:.4g}" for name, ms in medians.items())
    default = "failed" if cell["default_ms"] is None else f"{cell['default_ms']:.4g}"
    dropped = sum(each["check"] in NOT_STARTED for each in cell["candidates"])
    failed = sum(bool(each["error"]) for each in cell["candidates"] if each["check"] not in NOT_STARTED)
    mark = " BEHIND" if behind(cell) else ""
    return (
        f"{cell['case']:22} {cell['direction']:8} tuned {cell['tuned_ms']:.4g}  default {default}  [{others}]  "
        f"{len(cell['candidates'])} candidates, {failed} failed, {dropped} dropped, {cell['tuning_s']:.1f} s{mark}  "
        f"{cell['tuned_config']}"
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """The directions of one case for one process.

    Attributes:
      deadline: on the system's monotonic clock; no direction is started after it.
    """

    case: AttentionCase
    directions: tuple[Direction, ...]
    budget_s: float | None
    rounds: int
    search: Search
    deadline: float


def carry_out(task: Task) -> list[tuple[Any, AutotuningResult]]:
    """A cell and what was found for each direction, or why there is none."""
    case, done = task.case, []
    with tempfile.TemporaryDirectory() as empty:
        chain = ConfigSelectorChain(ConfigCache(), tables=Path(empty))
        try:
            for direction in task.directions:
                if time.monotonic() > task.deadline:
                    print(f"{case.name} {direction}: not started, the time is over", flush=True)
                    continue
                inv = invocation(case, direction)
                begun = time.monotonic()
                result = Autotuner(Tuner(search=task.search), chooser=chain, budget_s=task.budget_s).tune(inv)
                took_s, (call,) = time.monotonic() - begun, result
                cell = cell_of(inv, case, call, took_s, compare(inv, contenders(call), chain, task.rounds))
                print(line(cell), flush=True)
                done.append((cell, AutotuningResult.from_json(result.to_json())))  # its exceptions may not travel
        except Exception as error:  # the other cases are still measured
            said = str(error.exceptions[0]) if isinstance(error, ExceptionGroup) else f"{type(error).__name__}: {error}"
            print(f"{case.name} failed: {said}"[:600], flush=True)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="hopper,own,cuda")
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--budget", type=float, help="seconds for the tuning of one direction of a case")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--search", choices=get_args(Search), default="halving")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once; they measure in turn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no call after this many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the cells in --out that this run does not measure")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/attention_tuned.json by default")
    parser.add_argument("--table", type=Path, help="add the winners to this tuned table")
    chosen = parser.parse_args(argv)
    directions = [direction for direction in DIRECTIONS if direction in chosen.directions.split(",")]
    deadline = time.monotonic() + chosen.seconds
    # Several processes share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    out = chosen.out or RESULTS / device_name() / "attention_tuned.json"
    before = json.loads(out.read_text()) if chosen.keep and out.is_file() else {"runs": [], "cells": []}
    given = [Path(word).name if "/" in word else word for word in (sys.argv[1:] if argv is None else argv)]
    command = " ".join(["python", "-m", "benchmarks.attention_tuned", *given])  # whoever ran it, wherever
    run = {"command": command, "environment": environment(), "versions": versions(), "driver": driver()}
    cells = {(cell["case"], cell["direction"]): cell for cell in before["cells"]}
    runs, mine = [*before["runs"], run], []
    tasks = [
        Task(case, tuple(directions), chosen.budget, chosen.rounds, chosen.search, deadline)
        for case in chosen_cases(chosen.cases)
    ]
    spawning = multiprocessing.get_context("spawn")  # and one process for each case: it gives all memory back
    with concurrent.futures.ProcessPoolExecutor(chosen.jobs, spawning, max_tasks_per_child=1) as pool:
        for future in concurrent.futures.as_completed([pool.submit(carry_out, task) for task in tasks]):
            try:
                found = future.result()
            except concurrent.futures.process.BrokenProcessPool as error:  # what was measured is kept
                print(f"a process died: {error}", flush=True)
                break
            for cell, result in found:
                cells[cell["case"], cell["direction"]] = cell
                mine.append(cell)
                if chosen.table is not None:
                    add_to_table(chosen.table, result, command)
            write(out, runs, list(cells.values()))
    ratios = [cell["over_best_single"] for cell in mine if cell["over_best_single"] is not None]
    regrets = [cell["regret"] for cell in mine if cell["regret"] is not None]
    print(
        f"{len(mine)} calls; tuned at worst {max(ratios, default=math.nan):.3f} of the best single backend; "
        f"most regret {max(regrets, default=math.nan):.3f}; behind: {sum(map(behind, mine))}; written to {out}"
    )
    return 0


def write(out: Path, runs: list[Any], cells: list[Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")  # a run that is killed leaves the old record or the new one
    part.write_text(json.dumps({"benchmark": "attention_tuned", "runs": runs, "cells": cells}, indent=1) + "\n")
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main())
