"""Attention at the shapes of published models, beside its peers: how much of it is as fast as the best of them.

Ours is what a fresh machine chooses: no tuning, an empty cache, no builds. Each problem has a process of its own, which
compiles beside the others at low priority, and then measures while no other process holds the device lock; all
contenders of a problem take turns in one process. Results are compared with the float32 oracle before anything is
timed, as in ``benchmarks.attention``. XLA tries its tiles on the device when it compiles, which may disturb the
measurement of another process: medians are compared, and by the device's clock.

``python -m benchmarks.attention_zoo --jobs 12 --group dev --budget 540``; with ``--keep --missing`` the next call
measures what the first had no time for. ``--report`` measures nothing.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from benchmarks.attention import (
    Method,
    Record,
    chosen_peers,
    compile_cases,
    driver,
    failure,
    measure,
    run_case,
    versions,
    yardstick,
)
from benchmarks.attention_peers import (
    DIRECTIONS,
    EVERYTHING,
    OURS,
    Arrays,
    Call,
    CannotServeError,
    Direction,
    JaxPeer,
    Operands,
    Peer,
    ours_with,
)
from benchmarks.attention_tuned import invocation
from benchmarks.attention_zoo_cases import GROUPS, ZooProblem
from benchmarks.attention_zoo_report import FA4, TUNED, markdown, row_of, text
from benchmarks.common import RESULTS, device_name, environment, recorded
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.ops import Autotuner, ConfigCache, ConfigSelectorChain, Tuner
from tilewright.ops.lowering.labels import is_call_label, parse_label
from tilewright.ops.tuning.device_lock import device_lock_on
from tilewright.ops.utils.device import current_device

PEERS = (OURS, "cudnn", "tokamax", "xla", FA4, f"{OURS} pallas", f"{OURS} cudnn")
"""Those measured by default: ours, the peers, and our own backends one by one, for the regret."""

MAX_LOGIT_BYTES = 2 << 30
"""XLA, which stores the logits of a call, is not asked for calls with more: it would be last. While it compiles it
tries tiles on whole arrays, and a process keeps the memory that this took until it ends.
"""

OVERHEAD_S = 2.5
"""Seconds of a cell beside its samples: arrays, the oracle, first runs and comparisons."""

FIRST_COMPILE_S = 30.0
"""What compiling a problem is taken to need until one has been compiled."""

GRACE_S = 8.0
"""A process that is still busy so long after the budget is ended, so that the report is printed in time."""

DIGITS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A problem for one process.

    Attributes:
      seconds: for the samples of a cell, spread over all contenders.
      tuning_s: for the tuning of a direction; None for no tuning.
      deadline: on the system's monotonic clock; no measurement starts that would outlast it.
      cache: the folder of the caches.
    """

    problem: ZooProblem
    directions: tuple[Direction, ...]
    peers: tuple[str, ...]
    method: Method
    seconds: float
    tuning_s: float | None
    deadline: float
    cache: str

    @property
    def measuring_s(self) -> float:
        return len(self.directions) * (self.seconds + OVERHEAD_S)

    @property
    def all_tuning_s(self) -> float:
        return len(self.directions) * self.tuning_s if self.tuning_s is not None and self.problem.tuned else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a task: its cells, or why there are none."""

    cells: tuple[dict[str, Any], ...] = ()
    compile_s: float | None = None
    message: str = ""


def small_logits(peer: JaxPeer) -> JaxPeer:
    """The peer without the calls whose logits are too large to be stored."""

    def attention(operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
        size = 4 * math.prod(operands.case.score_shape)
        if size > MAX_LOGIT_BYTES:
            raise CannotServeError(f"the logits have {size / 1e9:.1f} GB")
        return peer.attention(operands, floats, extras)

    return dataclasses.replace(peer, attention=attention)


def contenders(names: Sequence[str]) -> list[Peer]:
    """The peers named that are installed."""
    found, _ = chosen_peers(",".join(names), None)
    return [small_logits(peer) if isinstance(peer, JaxPeer) and peer.name == "xla" else peer for peer in found]


def tuned_peer(task: Task) -> tuple[JaxPeer, dict[str, Any]]:
    """Ours with the winners of a tuning from nothing, and what the tuning of each direction took."""
    said: dict[str, Any] = {}
    winners: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as empty:
        chain = ConfigSelectorChain(ConfigCache(), tables=Path(empty))
        for direction in task.directions:
            start = time.monotonic()
            try:
                tuner = Autotuner(Tuner(search="halving"), chooser=chain, budget_s=task.tuning_s)
                (call,) = tuner.tune(invocation(task.problem.case, direction))
                winners[direction] = call.winner.config
                said[direction] = {"config": str(call.winner.config), "complete": call.complete}
            except Exception as error:  # its peers are still measured
                said[direction] = failure(error)
            said[direction]["seconds"] = round(time.monotonic() - start, 1)
    cfg = PerDirection(winners.get("forward"), winners.get("backward"))
    return JaxPeer(TUNED, functools.partial(ours_with, cfg), EVERYTHING), said


def measure_within(seconds: float, named: Mapping[str, Call], method: Method) -> dict[str, dict[str, Any]]:
    """``measure`` with as many rounds as there is time for: two at least, ``method.rounds`` at most."""
    first = dataclasses.replace(method, rounds=min(2, method.rounds))
    start = time.perf_counter()
    found = measure(named, first)
    took = time.perf_counter() - start
    rounds = min(method.rounds - first.rounds, int((seconds - took) / (took / first.rounds)))
    if rounds < 1:
        return found
    running = {name: call for name, call in named.items() if "wall_ms" in found[name]}
    for name, more in measure(running, dataclasses.replace(method, rounds=rounds)).items():
        if "wall_ms" not in more:
            found[name] = more
            continue
        both = {clock: [*found[name][clock], *more[clock]] for clock in ("device_ms", "wall_ms")}
        found[name] = {**found[name], **more, **both}
    return found


def served_by(labels: Sequence[str], direction: Direction) -> dict[str, str]:
    """Our backend in a lowered program, its config, and the step of the selection that chose it."""
    for label in filter(is_call_label, labels):
        call = parse_label(label)
        if call.direction == direction and isinstance(call.config, Choice):
            return {"backend": call.config.backend, "config": str(call.config), "step": call.step}
    return {}


def compact(found: Mapping[str, Any], direction: Direction) -> dict[str, Any]:
    """What the record keeps of an implementation: a median per round, and a backend in place of labels."""
    kept = {**found, **served_by(found.get("labels", ()), direction)}
    kept.pop("labels", None)
    if "wall_ms" in kept:
        kept["device_ms"] = [_rounded(statistics.median(each)) for each in kept["device_ms"]]
        kept["wall_ms"] = [_rounded(each) for each in kept["wall_ms"]]
    for name in ("median_ms", "tflops", "wall_tflops", "compile_s"):
        if name in kept:
            kept[name] = _rounded(kept[name])
    for name in ("message", "device_error"):
        if name in kept:
            kept[name] = kept[name][:600]
    return kept


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _lower_priority() -> None:
    """Lets the threads that measure come first; on Linux a thread has its own priority, and its threads inherit it."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def carry_out(task: Task) -> Outcome:
    """Compiles a problem, then measures it while no other process does."""
    problem = task.problem
    tuning: dict[str, Any] = {}
    chosen = contenders(task.peers)
    if task.tuning_s is not None and problem.tuned:
        peer, tuning = tuned_peer(task)
        chosen.append(peer)
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1, initializer=_lower_priority) as pool:
        (compiled,) = pool.submit(compile_cases, [problem.case], chosen, task.directions, task.method.jobs).result()
    compile_s = time.monotonic() - start
    with device_lock_on(current_device()).exclusive():
        if time.monotonic() + task.measuring_s > task.deadline:
            return Outcome(message="compiled, but the time is over", compile_s=compile_s)
        cells = run_case(compiled, task.method, functools.partial(measure_within, task.seconds))
    about = {
        "model": problem.model,
        "family": problem.family,
        "source": problem.source,
        "held_out": problem.held_out,
        "ragged": problem.is_ragged,
    }
    for cell in cells:
        direction = cell["direction"]
        found = {name: compact(each, direction) for name, each in cell["implementations"].items()}
        cell |= {**about, "implementations": found}
        if direction in tuning:
            cell["tuning"] = tuning[direction]
    return Outcome(tuple(cells), compile_s)


def _work(task: Task, answer: Connection) -> None:
    """The process of a task."""
    os.environ["TILEWRIGHT_CACHE_DIR"] = task.cache
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the card
    try:
        outcome = carry_out(task)
    except Exception as error:  # such as an oracle that does not fit beside the rest
        outcome = Outcome(message=failure(error)["message"])
    answer.send(outcome)


_STARTING = threading.Lock()


def in_process(task: Task) -> Outcome:
    """The outcome of a task in a process of its own, which is ended with it and so gives back all memory."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, sender))  # no daemon: a tuning may start processes
    with _STARTING:
        process.start()
    sender.close()
    try:
        if not receiver.poll(max(0.0, task.deadline + GRACE_S - time.monotonic())):
            return Outcome(message="ended with the time")
        outcome: Outcome = receiver.recv()
        return outcome
    except EOFError:
        process.join(5)
        return Outcome(message=f"its process died with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


class Launcher:
    """Starts the process of a task if there is time enough to compile and to measure it."""

    def __init__(self) -> None:
        self.compile_s: list[float] = []

    def __call__(self, task: Task) -> Outcome:
        compile_s = statistics.median(self.compile_s) if self.compile_s else FIRST_COMPILE_S
        if time.monotonic() + task.all_tuning_s + compile_s + task.measuring_s > task.deadline:
            return Outcome(message="not started, the time is over")
        try:
            outcome = in_process(task)
        except OSError as error:  # no memory for one more process: the others go on
            return Outcome(message=failure(error)["message"])
        if outcome.compile_s is not None:
            self.compile_s.append(outcome.compile_s)
        return outcome


class ZooRecord(Record):
    """The record of the zoo."""

    def data(self) -> dict[str, Any]:
        return {"benchmark": "attention_zoo", "runs": self.runs, "cells": self.cells}


def chosen_problems(cases: str | None, group: str) -> list[ZooProblem]:
    """Problems by name, or else of a group."""
    if cases is None:
        return list(GROUPS[group].values())
    every = {name: problem for members in GROUPS.values() for name, problem in members.items()}
    unknown = [name for name in cases.split(",") if name not in every]
    if unknown:
        raise SystemExit(f"no problem {', '.join(map(repr, unknown))}; there are {', '.join(every)}")
    return [every[name] for name in cases.split(",")]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names; all of the group by default")
    parser.add_argument("--group", choices=GROUPS, default="all")
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--peers", default=",".join(PEERS), help="as benchmarks.attention has them")
    parser.add_argument(
        "--tuned", action="store_true", help="tune the problems that are for that, and measure the winner"
    )
    parser.add_argument("--tuning-seconds", type=float, default=20.0, help="for the tuning of a direction")
    parser.add_argument("--seconds-per-cell", type=float, default=1.5, help="for the samples of all contenders")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--calls", type=int, default=10, help="queued calls in a sample; slow ones are fewer")
    parser.add_argument("--pause", type=float, default=0.01, help="idle seconds before each turn")
    parser.add_argument("--device-time", choices=("cupti", "wall"), help="cupti on a GPU by default")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once; one of them measures")
    parser.add_argument("--threads", type=int, default=3, help="compilations at once in a process")
    parser.add_argument("--budget", type=float, default=86400.0, help="seconds; nothing starts that would outlast it")
    parser.add_argument("--cache", help="folder of lowered and built kernels; an empty one by default")
    parser.add_argument("--keep", action="store_true", help="keep the cells in --out that this run does not measure")
    parser.add_argument("--missing", action="store_true", help="only problems without a cell in --out; implies --keep")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/attention_zoo.json by default")
    parser.add_argument("--markdown", type=Path, help="write the report as Markdown to this file")
    parser.add_argument("--report", action="store_true", help="measure nothing, report on the record in --out")
    return parser.parse_args(argv)


def tasks_of(chosen: argparse.Namespace, record: Record, method: Method, deadline: float, cache: str) -> list[Task]:
    directions = tuple(direction for direction in DIRECTIONS if direction in chosen.directions.split(","))
    done = {cell["case"] for cell in record.cells} if chosen.missing else set()
    return [
        Task(
            problem,
            directions,
            tuple(chosen.peers.split(",")),
            method,
            chosen.seconds_per_cell,
            chosen.tuning_seconds if chosen.tuned else None,
            deadline,
            cache,
        )
        for problem in chosen_problems(chosen.cases, chosen.group)
        if problem.name not in done
    ]


def note(problem: ZooProblem, outcome: Outcome, record: Record) -> None:
    """Adds what came of a problem to the record, and prints it."""
    if outcome.message:
        print(f"{problem.name}: {outcome.message}"[:600], flush=True)
        record.runs[-1].setdefault("without cells", {})[problem.name] = outcome.message[:600]
        record.write()
        return
    record.add(outcome.cells)
    for cell in outcome.cells:
        row = row_of(cell)
        ours = row.status if row.ours_ms is None else f"{row.ours_ms:.4g} ms by {row.backend or '?'}"
        ratio = "" if row.ratio is None else f"  {row.ratio:.3f} of {row.peer} {row.peer_ms:.4g}"
        print(f"{row.case:28} {row.direction:8} {ours}{ratio}  compiled in {outcome.compile_s:.0f} s", flush=True)
        for name, found in cell["implementations"].items():
            if found["status"] in ("wrong", "failed"):
                said = "; ".join(found.get("violations", [])) or found.get("message")
                print(f"  {name} {row.direction} {found['status']}: {said}"[:300], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    chosen = arguments(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    out = chosen.out or RESULTS / device_name() / "attention_zoo.json"
    if not chosen.report:
        run(chosen, out, start + chosen.budget)
    found = recorded(out)
    print(text(found))
    if chosen.markdown is not None:
        chosen.markdown.write_text(markdown(found))
    return 0


def run(chosen: argparse.Namespace, out: Path, deadline: float) -> None:
    """Measures the problems chosen; writes the record after each."""
    if not set(chosen.directions.split(",")) <= set(DIRECTIONS):
        raise SystemExit(f"no directions {chosen.directions!r}; there are {', '.join(DIRECTIONS)}")
    gpu = jax.default_backend() == "gpu"
    device_time = chosen.device_time or ("cupti" if gpu else "wall")
    method = Method(chosen.rounds, chosen.calls, device_time, chosen.threads, chosen.pause)
    _, absent = chosen_peers(chosen.peers, None)
    description: dict[str, Any] = {
        "environment": environment(),
        "versions": versions(),
        "driver": driver(),
        "method": dataclasses.asdict(method) | {"seconds_per_cell": chosen.seconds_per_cell, "processes": chosen.jobs},
        "absent": absent,
        "yardstick": yardstick(method) if gpu else None,
    }
    record = ZooRecord(out, description, keep=chosen.keep or chosen.missing)
    record.write()
    with tempfile.TemporaryDirectory() as empty, concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        launch = Launcher()
        tasks = tasks_of(chosen, record, method, deadline, chosen.cache or empty)
        pending = {pool.submit(launch, task): task.problem for task in tasks}
        for future in concurrent.futures.as_completed(pending):
            note(pending[future], future.result(), record)
    print(f"{len(record.cells)} cells in {out}{f'; not installed: {absent}' if absent else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
