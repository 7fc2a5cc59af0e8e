"""What mixed batches draw from a Hopper card while they run again and again: watts, clocks, and what holds these down.

Beside them what does their FLOPs and reads their bytes and nothing else, and a matrix product. nvidia-smi is asked
every 20 ms meanwhile. These are not the times of `benchmarks.serving`, between whose calls the card rests.
``python -m benchmarks.power``.
"""

import argparse
import collections
import functools
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import driver, versions
from benchmarks.attention_peers import Call
from benchmarks.common import record
from benchmarks.serving import CELLS, Work, ours, yardsticks

QUERY = ("power.draw.instant", "clocks.sm", "temperature.gpu", "clocks_event_reasons.active")

POWER_CAP = 4
"""The bit of the reasons that says that the driver holds the clocks down because of the card's power limit."""

SETTLES_S = 0.4
"""After which the power's control has settled."""


class Smi:
    """nvidia-smi beside what runs: samples with the host's time of each."""

    def __init__(self) -> None:
        self.samples = list[tuple[float, list[str]]]()

    def __enter__(self) -> Self:
        query = ["nvidia-smi", "--query-gpu=" + ",".join(QUERY), "--format=csv,noheader,nounits", "-lms", "20"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.samples.append((time.monotonic(), line.strip().split(", ")))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._thread.join()
        self._process.wait()

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Medians, and how often the power limit held the clocks down."""
        found = [values for at, values in self.samples if start <= at <= end and len(values) == len(QUERY)]
        if not found:
            return {"samples": 0}
        medians = {name: statistics.median(float(each[i]) for each in found) for i, name in enumerate(QUERY[:3])}
        reasons = collections.Counter(each[3] for each in found)
        capped = sum(count for reason, count in reasons.items() if int(reason, 16) & POWER_CAP)
        return {"samples": len(found), **medians, "reasons": reasons, "power_capped": capped / len(found)}


def calls_of(work: Work) -> dict[str, Call]:
    """A mixed batch, its parts, kernels that do only its FLOPs or only its bytes, and a matmul."""
    query, key, value, table, lengths, cum = work.positional
    alone = np.diff(np.asarray(cum)) == 1
    call = jax.jit(functools.partial(ours(work, "cuda"), **work.keywords))

    def of(sequences: np.ndarray | bool) -> Call:
        return Call(call, (query, key, value, table, jnp.where(sequences, lengths, 0), cum))

    matrix = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return {
        "tilewright cuda": of(True),
        "its chunks": of(~alone),
        "its decoded tokens": of(alone),
        **{"only " + name: call for name, (call, _) in yardsticks(work).items()},
        "product of 8192": Call(jax.jit(jnp.matmul), (matrix, matrix)),
    }


def loop(call: Call, seconds: float, queue: int = 64) -> tuple[float, float, int]:
    """When a loop has settled, when it ended, and how many calls it made in between; two ``queue`` are under way."""
    jax.block_until_ready(call.function(*call.args))
    start, settled, calls, earlier = time.monotonic(), 0.0, 0, None
    while True:
        results = [call.function(*call.args) for _ in range(queue)][-1]
        if earlier is not None:
            jax.block_until_ready(earlier)
        now, earlier = time.monotonic(), results
        if settled:
            calls += queue
        elif now - start >= SETTLES_S:
            settled = now
        if now - start >= seconds + SETTLES_S:
            return settled, now, calls


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="mixed_64_page64,mixed_64")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each loop, after it has settled")
    given = parser.parse_args(argv)
    spans = list[tuple[str, str, float, float, int]]()
    with Smi() as smi:
        for case in given.cases.split(","):
            for name, call in calls_of(Work.of(CELLS[case])).items():
                spans.append((case, name, *loop(call, given.seconds)))
                time.sleep(SETTLES_S)
    cells = list[dict[str, Any]]()
    for case, name, start, end, calls in spans:
        found = smi.between(start, end)
        us = (end - start) / calls * 1e6
        cells.append({"case": case, "name": name, "calls": calls, "wall_us": us, **found})
        watts, clock = found.get("power.draw.instant", float("nan")), found.get("clocks.sm", float("nan"))
        capped = found.get("power_capped", float("nan"))
        print(f"{case:18} {name:24} {us:8.1f} us {watts:6.1f} W {clock:6.0f} MHz, capped {capped:.0%} of the time")
    record("power", {"query": QUERY, "versions": versions(), "driver": driver(), "cells": cells})


if __name__ == "__main__":
    main()
