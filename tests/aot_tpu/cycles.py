"""Cycles of our TPU kernels by libtpu's simulator, as they were recorded: ``python -m tests.aot_tpu.cycles --write``.

Every backend for TPUs is simulated with its heuristic config for calls of few steps. A record holds for one version of
libtpu, whose scheduler decides what a kernel takes.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tilewright
from tests.aot_tpu.compiler import TPUS, report
from tilewright.kernels import OPS, kernel
from tilewright.kernels.op.choice import Platform
from tilewright.ops import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.tuning.simulated import Simulated, estimated, simulated
from tilewright.ops.utils.known_devices import find_device

FILE = Path(__file__).with_name("cycles.json")
TOLERANCE = 0.03

_ATTENTION = {"batch": 1, "heads": 2, "kv_heads": 2, "q_length": 4096, "kv_length": 4096, "causal": True}
CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "flash_attention": {
        "causal 4k, d 128": _ATTENTION | {"head_dim": 128},
        "causal 2k, d 256": _ATTENTION | {"head_dim": 256, "q_length": 2048, "kv_length": 2048},
    },
    # The simulator follows the steps of no array, such as those of a cache's pages, and for minutes and 9 GB those of
    # XLA's between kernels of the loss: of these ops there are programs of one kernel.
    "decode_attention": {},
    "page_attention": {},
    "ragged_decode_attention": {},
    "ragged_page_attention": {},
    "unified_attention": {},
    "chunked_prefill_paged_decode": {},
    "mla_decode": {},
    "mla_ragged_page_attention": {},
    "linear_cross_entropy": {},
}
"""Fields of cases by op and name, in bfloat16; of other ops with a backend for TPUs the small call is simulated."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel on one chip, with constants for what the simulator knows nothing of.

    Attributes:
      make: as `report` takes it.
      options: arguments of ``make``.
    """

    name: str
    tpu: str
    make: str
    flops: float
    options: dict[str, Any]

    @functools.cached_property
    def found(self) -> "Found":
        """The cycles."""
        compiled = report(self.tpu, f"{__package__}.{self.make}", simulate=True, **self.options)
        return Found(estimated(None, compiled, self.tpu, self.flops, 0), self.flops)


def programs() -> Iterator[Program]:
    """Every kernel for TPUs, alone."""
    for tpu in TPUS:
        for direction, head_dim, causal in (
            ("forward", 128, False),
            ("forward", 128, True),
            ("forward", 256, False),
            ("backward", 128, False),
            ("backward", 128, True),
        ):
            options: dict[str, Any] = {"tpu": tpu, "direction": direction, "number": 0, "length": 4096}
            options |= {"head_dim": head_dim, "value_dim": head_dim, **({"causal": True} if causal else {})}
            flops = 4 * 4096**2 * head_dim * (2.5 if direction == "backward" else 1) / (2 if causal else 1)
            name = f"attention, {'causal ' if causal else ''}4k, d {head_dim} {direction}"
            yield Program(name, tpu, "attention_calls:attention", flops, options)
        yield Program(
            "decoding, 4 sequences of 2k, without copies", tpu, "serving:decoding", 4 * 4 * 2048 * 32 * 128, {}
        )
        yield Program("prefilling, 128 tokens of 2k", tpu, "serving:prefilling", 4 * 128 * 2048 * 32 * 128, {})
        for make in ("statistics", "gradients"):
            sizes = {"tokens": 1024 * find_device(tpu).device.cores, "d": 4096, "vocab": 4096}  # a tile of each core
            flops = 2 * math.prod(sizes.values())
            yield Program(f"loss, {make}", tpu, f"losses:{make}", flops, {"tpu": tpu, **sizes})


@dataclasses.dataclass(frozen=True)
class Budget:
    """One direction of a call by one backend, on one chip."""

    op: str
    call: str
    backend: str
    direction: str
    tpu: str

    @property
    def name(self) -> str:
        return f"{self.op}, {self.call}, {self.backend} {self.direction}"

    def _invocation(self) -> Invocation[Any, Any]:
        case = dataclasses.replace(kernel(self.op).cases.small, dtype="bfloat16", **calls_of(self.op)[self.call])
        inv, _ = prepared(kernel(self.op), *case.abstract_arguments(), concrete=False)
        return dataclasses.replace(inv, direction=self.direction, device=find_device(self.tpu).device)

    @functools.cached_property
    def found(self) -> "Found | None":
        """The cycles; ``None`` if the backend does not serve the call."""
        op, inv = kernel(self.op), self._invocation()
        with tilewright.target_device(self.tpu):
            choice = next((each for each in op._by_preference(inv) if each.backend == self.backend), None)
        if choice is None:
            return None
        cost = op.cost(inv)
        return Found(simulated(inv, choice, cost.flops, cost.bytes), cost.flops)


@dataclasses.dataclass(frozen=True)
class Found:
    """The simulation of a call."""

    simulated: Simulated
    flops: float

    def share(self, tpu: str) -> float:
        """The part of the matrix units' peak that the call's own FLOPs are, in its estimated time."""
        seconds = self.simulated.seconds
        return 0.0 if seconds is None else self.flops / seconds / find_device(tpu).chip.flops

    def as_json(self, tpu: str) -> dict[str, Any]:
        each = self.simulated
        if each.seconds is None:
            return {"cycles": None, "why": each.why_not.partition(" %")[0][:120], "peak_bytes": each.report.peak_bytes}
        return {
            "cycles": each.report.kernel_cycles,
            "share": round(self.share(tpu), 3),
            "peak_bytes": each.report.peak_bytes,
            "bundles": each.report.bundles,
            "spills": each.report.spills,
        }


def calls_of(op: str) -> dict[str, dict[str, Any]]:
    """The fields of an op's calls, by their names."""
    return CALLS.get(op, {"small": {}})


def budgets() -> Iterator[Budget | Program]:
    """Every direction of every call by every backend for TPUs, and their kernels alone."""
    yield from programs()
    for op in OPS:
        directions = ("forward", "backward") if kernel(op).differentiable else ("forward",)
        for backend in kernel(op).backends.usable:
            if backend.name == "tpu" and backend.platform is Platform.PALLAS:
                for call in calls_of(op):
                    for direction in directions:
                        for tpu in TPUS:
                            yield Budget(op, call, backend.name, direction, tpu)


def recorded() -> dict[str, Any]:
    """The record: of a libtpu, by chip and call."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def libtpu() -> str:
    """The version of libtpu that is installed."""
    return importlib.metadata.version("libtpu")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("--only", default="", help="the calls with this in their names; others keep their record")
    given = parser.parse_args(arguments)
    before = recorded()
    if given.only and given.write and before["libtpu"] != libtpu():
        parser.error(f"the record is of libtpu {before['libtpu']}, this is {libtpu()}: record every call")
    record: dict[str, Any] = {"libtpu": libtpu(), **{tpu: dict(before[tpu]) if given.only else {} for tpu in TPUS}}
    for budget in budgets():
        if given.only in budget.name and (found := budget.found) is not None:
            if found.simulated.report.error:
                raise SystemExit(f"{budget.tpu}, {budget.name}: {found.simulated.report.error}")
            record[budget.tpu][budget.name] = row = found.as_json(budget.tpu)
            print(f"{budget.tpu:8} {budget.name}: {row}", flush=True)
    if given.write:
        FILE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
