"""Attention on an accelerator beside its peers: forward and backward separately, in TFLOP/s of device time.

Everything is compiled first, in threads; then one call after the other runs with the device to itself. Results are
compared with the float32 oracle, on two heads at full length, before anything is timed; a wrong one is recorded as
wrong. Implementations take turns within a case. ``python -m benchmarks.attention``
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_peers import (
    DIRECTIONS,
    OURS,
    Arrays,
    Call,
    CannotServeError,
    Direction,
    Operands,
    Peer,
    Prepared,
    Program,
    peers,
)
from benchmarks.attention_report import PUBLISHED, plot, table, title
from benchmarks.common import RESULTS, device_name, environment, usable_cores
from tilewright.kernels.flash_attention.cases import HOPPER_CASES, AttentionCase
from tilewright.kernels.flash_attention.op import BACKWARD_FLOPS, FlashAttention
from tilewright.kernels.flash_attention.reference import attention_reference, reference_gradients
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.tuning.timing import kernels, sample_ms

LONGEST_SAMPLE_MS = 75.0
"""Slow calls are queued fewer times, so that one slow peer does not take the time of all."""

FEWEST_CALLS = 2

ORACLE_OPTIONS: dict[str, bool | int | str] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""The oracle runs four times: trying out tiles for its matrix products takes longer than cuBLAS with its defaults."""

_BASE = AttentionCase("", batch=4, q_length=4096, heads=16, head_dim=128, dtype="bfloat16", causal=True)


def _named(base: AttentionCase, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, AttentionCase]:
    return {name: dataclasses.replace(base, name=name, **fields) for name, fields in changes.items()}


OWN_CASES = _named(
    _BASE,
    {
        "window_16k": {"batch": 1, "q_length": 16384, "sliding_window": (1023, 0)},
        "soft_cap_4k": {"logits_soft_cap": 30.0},
        "packed_8k": {"batch": 1, "q_length": 8192, "packed": True},
        "bias_4k": {"batch": 1, "bias": "hqk"},
        "full_gqa_8k": {"batch": 2, "q_length": 8192, "heads": 32, "kv_heads": 8, "causal": False},
        "d96_4k": {"head_dim": 96},
        "d192_v128_4k": {"head_dim": 192, "value_dim": 128},
        "float16_4k": {"dtype": "float16"},
        "ragged_4000": {"q_length": 4000},
        "sinks_4k": {"batch": 1, "heads": 32, "kv_heads": 8, "sinks": 1},
        "dropout_4k": {"dropout_prob": 0.1},
    },
)
"""What attention is used for beside the standard shapes."""

CUDA_CASES = _named(
    _BASE,
    {
        "float32_4k_d64": {"heads": 32, "head_dim": 64, "dtype": "float32"},
        "float32_4k_d128": {"dtype": "float32"},
        "float32_full_2k_d128": {"q_length": 2048, "dtype": "float32", "causal": False},
        "float32_d512_4k": {"batch": 2, "heads": 8, "head_dim": 512, "dtype": "float32"},
        "float32_d512_full_2k": {
            "batch": 4,
            "q_length": 2048,
            "heads": 8,
            "head_dim": 512,
            "dtype": "float32",
            "causal": False,
        },
        "d320_4k": {"batch": 2, "heads": 8, "head_dim": 320},
        "d512_4k": {"batch": 2, "heads": 8, "head_dim": 512},
        "d512_full_2k": {"batch": 4, "q_length": 2048, "heads": 8, "head_dim": 512, "causal": False},
        "d72_4k": {"head_dim": 72},
    },
)
"""What CUDA C++ is for: dtypes and head dims that the kernels for Hopper do not reach."""

_SMALL = AttentionCase("", batch=2, q_length=96, heads=4, kv_heads=2, head_dim=16, causal=True)
SMOKE_CASES = _named(
    _SMALL,
    {
        "smoke_causal": {},
        "smoke_packed_window": {"batch": 1, "packed": True, "sliding_window": (17, 0)},
        "smoke_bias_sinks": {"batch": 1, "bias": "hqk", "sinks": 1, "kv_heads": None},
    },
)
"""Small enough for a CPU: whether everything runs, not how fast."""

GROUPS = {"hopper": HOPPER_CASES, "own": OWN_CASES, "cuda": CUDA_CASES, "smoke": SMOKE_CASES}

VERSIONS_OF = (
    "tilewright", "jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "tokamax", "ejkernel",
    "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "nvidia-cuda-nvcc", "nvidia-cublas", "flash-attn-4",
    "nvidia-cutlass-dsl", "quack-kernels",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """How a run measures: ``device_time`` "cupti" sums the kernels of a call, "wall" trusts only queued calls.

    Attributes:
      pause: seconds for which the device idles before each turn; a card that has reached its power limit runs the
        next implementation up to a tenth slower.
    """

    rounds: int
    calls: int
    device_time: str
    jobs: int
    pause: float = 0.0

    def __post_init__(self) -> None:
        if self.pause < 0:
            raise ValueError(f"{self.pause=} must not be negative")
        if self.rounds < 1 or self.calls < 1 or self.jobs < 1:
            raise ValueError(f"{self.rounds=}, {self.calls=} and {self.jobs=} must be positive")
        if self.device_time not in ("cupti", "wall"):
            raise ValueError(f"{self.device_time=} must be 'cupti' or 'wall'")


def forward_flops(operands: Operands) -> float:
    """FLOPs of the two matmuls over the visible scores; plain causal attention counts as exactly half of full."""
    case = operands.case
    batch, heads, q_length, kv_length = case.score_shape
    blocks = [(q_length, kv_length)]
    if "boundaries" in operands.extras:
        blocks = [(n, n) for n in np.diff(np.asarray(operands.extras["boundaries"])).tolist()]
    visible = sum(rows * columns for rows, columns in blocks) * (0.5 if case.causal else 1.0)
    if isinstance(case.sliding_window, tuple):
        left, right = (math.inf if side is None else side for side in case.sliding_window)
        right = 0 if case.causal else right
        visible = 0.0
        for rows, columns in blocks:
            row = np.arange(rows)
            visible += float((np.minimum(row + right, columns - 1) - np.maximum(row - left, 0) + 1).sum())
    return 2.0 * batch * heads * visible * (case.head_dim + (case.value_dim or case.head_dim))


class Oracle:
    """What the results must be, on the heads that share one key head, of one batch element: first and last."""

    def __init__(self, case: AttentionCase) -> None:
        kv_heads = case.kv_heads or case.heads
        places = [(0, 0)]
        # Dropout counts from the first head of the first element; the oracle takes its slice for the whole.
        if not case.dropout_prob and (case.batch, kv_heads) != (1, 1):
            places.append((case.batch - 1, kv_heads - 1))
        self.case, self.places, self.group = case, places, case.heads // kv_heads
        self.expected: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def part(self, name: str, array: jax.Array, place: Any) -> jax.Array:
        """What of an input, a result or a gradient belongs to the place; the place may be traced."""
        element, kv_head = place
        axes = {"softmax_aux": (None, 0), "bias": (0, 1)}.get(name, (0, 2))
        group = 1 if name in ("key", "value") else self.group
        for axis, start, size in zip(axes, (element, kv_head * group), (1, group), strict=True):
            if axis is not None and not (name == "bias" and array.shape[axis] == 1):
                array = jax.lax.dynamic_slice_in_dim(array, start, size, axis)
        return array

    def compile(self, shapes: Operands, directions: Sequence[Direction], exact: bool) -> Callable[..., Any]:
        """The program of one place, in float32 or as the inputs' dtype has it; as a peer's, it runs nothing."""
        dtype = "float32" if exact else self.case.dtype

        def results(floats: Arrays, extras: Arrays, cotangent: jax.Array, place: Any) -> Arrays:
            parts: dict[str, Any] = {name: self.part(name, array, place) for name, array in floats.items()}
            inputs = FlashAttention().prepare(**parts, **shapes.options(extras))
            found: dict[str, jax.Array] = {}
            # A GPU rounds the operands of float32 products by default, and so do the implementations.
            with jax.default_matmul_precision("highest" if exact else None):
                if "forward" in directions:
                    found["out"] = attention_reference(inputs, dtype)[0]
                if "backward" in directions:
                    d_out = self.part("cotangent", cotangent, place)
                    found |= reference_gradients(inputs, d_out, None, dtype)
            return found

        index = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = jax.jit(results).lower(shapes.floats, shapes.extras, shapes.cotangent, (index, index))
        return lowered.compile(compiler_options=ORACLE_OPTIONS)

    def compute(self, operands: Operands, exact: Callable[..., Any], low: Callable[..., Any]) -> None:
        """Results in float32 and in the inputs' dtype, on the host."""
        for place in self.places:
            index = tuple(jnp.asarray(i, jnp.int32) for i in place)
            args = (operands.floats, operands.extras, operands.cotangent, index)
            self.expected.append((jax.device_get(exact(*args)), jax.device_get(low(*args))))

    def violations(self, results: Arrays) -> list[str]:
        """How results break the numerics policy; empty if they agree."""
        said = []
        for name, array in results.items():
            if not bool(jnp.all(jnp.isfinite(array))):
                said.append(f"{name}: not finite everywhere")
        for place, (exact, low) in zip(self.places, self.expected, strict=True):
            for name in exact.keys() & results.keys():
                # A parameter's gradient is a sum over the batch; a place is one element of the batch.
                if name in ("bias", "softmax_aux") and self.case.batch > 1:
                    continue
                got = self.part(name, results[name], place).reshape(exact[name].shape)
                factor = self.case.tolerance_factor
                said += [f"{name} at {place}: {what}" for what in violations(got, exact[name], low[name], factor)]
        return said


type Pending[T] = concurrent.futures.Future[tuple[T, float]]
"""What a thread compiles, and its seconds; what could not be compiled raises where it is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compilation:
    """The programs of one case: what draws its arrays, the oracle's in float32 and in their dtype, and the peers'."""

    case: AttentionCase
    directions: Sequence[Direction]
    oracle: Oracle
    draw: Pending[Callable[[], Operands]]
    references: Mapping[bool, Pending[Callable[..., Any]]]
    programs: Mapping[Direction, Mapping[str, Pending[Program]]]


def compile_cases(
    cases: Iterable[AttentionCase], chosen: Sequence[Peer], directions: Sequence[Direction], jobs: int
) -> list[Compilation]:
    """Everything that the cases need; nothing compiles any more, and nothing has run, when it returns."""

    def timed[T](function: Callable[..., T], *args: Any) -> tuple[T, float]:
        start = time.perf_counter()
        return function(*args), time.perf_counter() - start

    found = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for case in cases:
            shapes, oracle = Operands.shapes(case), Oracle(case)
            draw = pool.submit(timed, shapes.compile)
            references = {
                exact: pool.submit(timed, oracle.compile, shapes, directions, exact) for exact in (True, False)
            }
            programs = {
                direction: {peer.name: pool.submit(timed, peer.compile, shapes, direction) for peer in chosen}
                for direction in directions
            }
            found.append(Compilation(case, directions, oracle, draw, references, programs))
    return found


def first_run(pending: Pending[Program], operands: Operands, oracle: Oracle) -> Prepared | dict[str, Any]:
    """The compiled call, if its results are right, or why it is not to be timed."""
    try:
        program, seconds = pending.result()
        prepared = program(operands)
        prepared.details["compile_s"] = seconds
        wrong = oracle.violations(prepared.results)
    except CannotServeError as error:
        return {"status": "cannot", "message": str(error)}
    except Exception as error:  # the failure of one peer is a result, whatever it is; the others are still measured
        return failure(error)
    return {"status": "wrong", "violations": wrong, **prepared.details} if wrong else prepared


def failure(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "message": f"{type(error).__name__}: {error}"[:2000]}


def wall_ms(call: Call, calls: int) -> float:
    """Milliseconds per call of ``calls`` queued calls, by the host's clock."""
    if call.framework == "jax":
        return sample_ms(call.function, call.args, calls)
    torch = importlib.import_module("torch")
    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) * 1e3 / calls


def device_ms(call: Call, calls: int) -> list[float]:
    """Milliseconds on the device: for jax the summed kernels of each call, for PyTorch the mean of a queue."""
    if call.framework == "jax":
        return [sum(time_ms for _, time_ms in each) for each in kernels(call.function, call.args, calls)]
    torch = importlib.import_module("torch")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) / calls]


def measure(named: Mapping[str, Call], method: Method) -> dict[str, dict[str, Any]]:
    """Raw samples of every call, taken in turn, every second round in reverse order; for one that fails, the reason.

    The device idles before each turn, in which a call is measured by both clocks, one after the other.
    """
    found: dict[str, dict[str, Any]] = {}
    running = dict(named)

    def step(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # as in first_run
            found[name] = failure(error)
            del running[name]

    def warm(name: str, call: Call) -> None:
        wall_ms(call, 1)
        once = wall_ms(call, 1)
        calls = max(min(FEWEST_CALLS, method.calls), min(method.calls, int(LONGEST_SAMPLE_MS / max(once, 1e-3))))
        found[name] = {"calls": calls, "device_ms": [], "wall_ms": []}

    def sample(name: str, call: Call) -> None:
        mine = found[name]
        time.sleep(method.pause)
        if method.device_time == "cupti" and "device_error" not in mine:
            try:
                mine["device_ms"].append(device_ms(call, mine["calls"]))
            except Exception as error:  # the profiler's own, or the wall clock fails, too; the record says which
                mine["device_error"] = failure(error)["message"]
        mine["wall_ms"].append(wall_ms(call, mine["calls"]))

    for name, call in named.items():
        step(name, functools.partial(warm, name, call))
    for turn in range(method.rounds):
        for name, call in list(running.items())[:: 1 if turn % 2 == 0 else -1]:
            step(name, functools.partial(sample, name, call))
    return found


def rates(flops: float, samples: dict[str, Any]) -> dict[str, Any]:
    """The samples with medians and TFLOP/s: by device time where every round has one. A failure as it is."""
    if "wall_ms" not in samples:
        return samples
    whole = len(samples["device_ms"]) == len(samples["wall_ms"]) and "device_error" not in samples
    device = [value for sample in samples["device_ms"] for value in sample] if whole else []
    wall = statistics.median(samples["wall_ms"])
    median = statistics.median(device) if device else wall
    return {
        "status": "timed",
        "clock": "device" if device else "wall",
        "median_ms": median,
        "tflops": flops / median / 1e9,
        "wall_tflops": flops / wall / 1e9,
        **samples,
    }


type Measurement = Callable[[Mapping[str, Call], Method], dict[str, dict[str, Any]]]
"""``measure``, or what calls it."""


def run_case(compiled: Compilation, method: Method, measurement: Measurement | None = None) -> list[Any]:
    """One record per direction."""
    taken = measurement or measure
    start = time.perf_counter()
    exact, low = (compiled.references[exact].result()[0] for exact in (True, False))
    operands, oracle, cells = compiled.draw.result()[0](), compiled.oracle, []
    oracle.compute(operands, exact, low)
    for direction in compiled.directions:
        pending = compiled.programs[direction]
        prepared = {name: first_run(pending[name], operands, oracle) for name in pending}
        calls = {name: found.call for name, found in prepared.items() if isinstance(found, Prepared)}
        details = {name: found.details for name, found in prepared.items() if isinstance(found, Prepared)}
        said = {name: found for name, found in prepared.items() if isinstance(found, dict)}
        del prepared  # and with it the results
        preparation = time.perf_counter() - start
        flops = forward_flops(operands) * (BACKWARD_FLOPS if direction == "backward" else 1.0)
        timed = {name: rates(flops, samples) | details[name] for name, samples in taken(calls, method).items()}
        cells.append(
            {
                "case": compiled.case.name,
                "direction": direction,
                "sizes": changed_fields(compiled.case),
                "flops": flops,
                "preparation_s": preparation,
                "measurement_s": time.perf_counter() - start - preparation,
                "implementations": {name: timed.get(name) or said[name] for name in pending},
            }
        )
        calls.clear()
        gc.collect()
        start = time.perf_counter()
    return cells


def changed_fields(case: AttentionCase) -> dict[str, Any]:
    """A case as JSON: the sizes, and the options it uses."""
    always = ("batch", "q_length", "heads", "head_dim", "dtype", "causal")
    return {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if field.name != "name" and (field.name in always or getattr(case, field.name) != field.default)
    }


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """The driver, the power limit and the current clocks."""
    query = "driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.max.mem,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{query}: {done.stdout.strip()}"


def yardstick(method: Method, size: int = 8192) -> dict[str, Any]:
    """A bfloat16 matrix product on the same card in the same run: what runs of two days have in common."""
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    call = Call(jax.jit(jnp.matmul), (matrix, matrix))
    return {"size": size, **rates(2.0 * size**3, measure({"": call}, method)[""])}


class Record:
    """The file of results, written anew after every case: what was measured survives what comes after."""

    def __init__(self, path: Path, run: Mapping[str, Any], *, keep: bool) -> None:
        self.path, self.runs, self.cells = path, [dict(run)], list[dict[str, Any]]()
        if keep and path.is_file():
            earlier = json.loads(path.read_text())
            self.runs, self.cells = [*earlier["runs"], dict(run)], earlier["cells"]

    def add(self, cells: Iterable[Mapping[str, Any]]) -> None:
        """Adds cells of this run; those of the same case and direction in an earlier run give way."""
        new = [{**cell, "run": len(self.runs) - 1} for cell in cells]
        replaced = {(cell["case"], cell["direction"]) for cell in new}
        self.cells = [cell for cell in self.cells if (cell["case"], cell["direction"]) not in replaced] + new
        self.write()

    def compiled(self, seconds: float) -> None:
        """Adds to the time that this run has spent on compilation."""
        self.runs[-1]["compilation_s"] = self.runs[-1].get("compilation_s", 0.0) + seconds

    def failed(self, case: str, error: Exception) -> None:
        """Notes that a case has no cells of this run, and why."""
        self.runs[-1].setdefault("failed", {})[case] = failure(error)["message"]
        self.write()

    def data(self) -> dict[str, Any]:
        return {"benchmark": "attention", "runs": self.runs, "published": PUBLISHED, "cells": self.cells}

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")  # a run that is killed leaves the old record or the new one
        part.write_text(json.dumps(self.data(), indent=1) + "\n")
        part.replace(self.path)


def chosen_cases(names: str) -> list[AttentionCase]:
    """Cases by name or by group, in the order asked for."""
    found: dict[str, AttentionCase] = {}
    every = {name: case for group in GROUPS.values() for name, case in group.items()}
    for name in names.split(","):
        if name not in GROUPS and name not in every:
            raise SystemExit(f"no case or group {name!r}; there are {', '.join([*GROUPS, *every])}")
        found |= GROUPS.get(name) or {name: every[name]}
    return list(found.values())


def chosen_peers(names: str, platform: str | None) -> tuple[list[Peer], list[str]]:
    """The peers named that are installed, and the names of those that are not."""
    every = peers(platform)
    unknown = [name for name in names.split(",") if name not in every]
    if unknown:
        raise SystemExit(f"no peer {', '.join(map(repr, unknown))}; there are {', '.join(every)}")
    here, absent = [], []
    for name in names.split(","):
        try:
            if every[name].distribution is not None:
                importlib.metadata.version(str(every[name].distribution))
            here.append(every[name])
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return here, absent


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    usual = [name for name in peers(None) if name != "xla" and not name.startswith(f"{OURS} ")]
    parser.add_argument("--cases", default="hopper,own", help="names, or groups: " + ", ".join(GROUPS))
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--peers", default=",".join(usual), help="of " + ", ".join(peers(None)))
    parser.add_argument("--platform", help="the platform of ours; the best by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=10, help="queued calls in a sample; slow ones are fewer")
    parser.add_argument("--device-time", choices=("cupti", "wall"), help="cupti on a GPU by default")
    parser.add_argument("--pause", type=float, default=0.05, help="idle seconds before each turn")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="compilations at once")
    parser.add_argument("--ahead", type=int, help="cases compiled before the first of them runs; all by default")
    parser.add_argument("--seconds", type=float, help="start no case after this many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the cells in --out that this run does not measure")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/attention.json by default")
    parser.add_argument("--plot", type=Path, help="the plot; beside the record by default")
    parser.add_argument("--only-plot", action="store_true", help="measure nothing, plot the record in --out")
    return parser.parse_args(argv)


def run_group(
    cases: Sequence[AttentionCase],
    chosen: Sequence[Peer],
    directions: Sequence[Direction],
    method: Method,
    record: Record,
    end: float,
) -> None:
    """Compiles the cases, then measures one after the other; starts nothing after ``end`` on the monotonic clock."""
    start = time.monotonic()
    if start >= end:
        print(f"{', '.join(case.name for case in cases)}: not started, the time is over", flush=True)
        return
    compiled = compile_cases(cases, chosen, directions, method.jobs)
    record.compiled(time.monotonic() - start)
    print(f"{len(compiled)} cases compiled in {time.monotonic() - start:.0f} s", flush=True)
    while compiled:
        compilation = compiled.pop(0)  # what is done with gives its memory back
        name = compilation.case.name
        if time.monotonic() >= end:
            print(f"{name}: not started, the time is over", flush=True)
            continue
        try:
            cells = run_case(compilation, method)
        except Exception as error:  # such as an oracle that does not fit beside the rest: the other cases do
            print(f"{name} failed: {failure(error)['message']}", flush=True)
            record.failed(name, error)
            continue
        record.add(cells)
        print("\n".join(table(cells).splitlines()[:-1]), flush=True)
        for cell in cells:
            for peer, found in cell["implementations"].items():
                said = "; ".join(found.get("violations", [])) or found.get("message")
                if found["status"] in ("wrong", "failed"):
                    print(f"  {peer} {cell['direction']} {found['status']}: {said}"[:600], flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    chosen = arguments(argv)
    # PyTorch and jax share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    out = chosen.out or RESULTS / device_name() / "attention.json"
    where = chosen.plot or out.with_suffix(".png")
    if chosen.only_plot:
        known = json.loads(out.read_text())
        plot(known["cells"], where, title(known["runs"][-1]), GROUPS)
        return
    cases = chosen_cases(chosen.cases)
    selected, absent = chosen_peers(chosen.peers, chosen.platform)
    asked = chosen.directions.split(",")
    if not set(asked) <= set(DIRECTIONS):
        raise SystemExit(f"no directions {chosen.directions!r}; there are {', '.join(DIRECTIONS)}")
    directions = [direction for direction in DIRECTIONS if direction in asked]
    gpu = jax.default_backend() == "gpu"
    device_time = chosen.device_time or ("cupti" if gpu else "wall")
    method = Method(chosen.rounds, chosen.calls, device_time, chosen.jobs, chosen.pause)
    run: dict[str, Any] = {
        "environment": environment(),
        "versions": versions(),
        "driver": driver(),
        "method": dataclasses.asdict(method),
        "absent": absent,
        "yardstick": yardstick(method) if gpu else None,
    }
    record = Record(out, run, keep=chosen.keep)
    end = math.inf if chosen.seconds is None else start + chosen.seconds
    for group in itertools.batched(cases, chosen.ahead or len(cases)):
        run_group(group, selected, directions, method, record, end)
    print(table(record.cells))
    yard = run["yardstick"]
    if yard:
        print(f"bf16 8192³ matrix product: {yard['tflops']:.0f} TFLOP/s" if "tflops" in yard else yard["message"])
    print(f"written to {out}{f'; not installed: {absent}' if absent else ''}", flush=True)
    try:
        plot(record.cells, where, title(run), GROUPS)
    except ImportError as error:  # an accelerator's machine may lack it
        print(f"no plot: {error}; --only-plot makes one elsewhere")


if __name__ == "__main__":
    main()
