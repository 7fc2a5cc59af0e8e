"""Matmuls with weights in four and eight bits: microseconds of device time beside bfloat16 and XLA.

Times are taken as ``benchmarks.norms`` does: the kernels of a call as CUPTI reports them, all contenders in turn; but
each call comes after as much memory was read, and not written, as the L2 cache cannot hold. Results are compared with
those in float32 before anything is timed. "bfloat16" is the same matmul with a weight in bfloat16; ``of_bytes`` is the
share of a copy's bandwidth with which weight, rows and result are moved. ``--sweep`` measures candidates beside the
heuristic's.
``python -m benchmarks.weight_only_matmul``
"""

import argparse
import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record
from benchmarks.norms import (
    FLUSHED_BYTES,
    OURS,
    Run,
    checked,
    compile_in_processes,
    compile_launches,
    flush_by_reading,
    measure_in_turn,
    sample,
    wall_sample,
)
from tilewright.kernels import kernel
from tilewright.kernels.weight_only.cases import CASES, WeightOnlyCase
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.kernels.weight_only.triton.backend import TritonWeightOnly
from tilewright.kernels.weight_only.xla import XlaWeightOnly
from tilewright.ops.types import Device
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.known_devices import find_device


def structs_of(case: WeightOnlyCase) -> WeightOnlyInputs:
    args, kwargs = case.abstract_arguments()
    found: WeightOnlyInputs = kernel("weight_only_matmul").prepare(*args, **kwargs).structs
    return found


def tried(case: WeightOnlyCase, device: Device, sweep: int) -> list[Any]:
    """The heuristic's params and the candidates most like it."""
    return list(TritonWeightOnly().candidates(structs_of(case), device, "forward"))[:sweep]


def forward(backend: Any, params: Any) -> Any:
    return lambda inputs: {"out": backend.forward(inputs, params)}


def compile_ahead(name: str, device: Device, params: Any) -> int:
    structs = structs_of(CASES.by_device["gpu"][name])
    return compile_launches(forward(TritonWeightOnly(), params), (structs,), device)


def compile_all(names: Sequence[str], device: Device, sweep: int) -> None:
    jobs = [(name, device, params) for name in names for params in tried(CASES.by_device["gpu"][name], device, sweep)]
    compile_in_processes(compile_ahead, jobs)


def run_cell(case: WeightOnlyCase, given: argparse.Namespace) -> dict[str, Any]:
    inputs: Any = kernel("weight_only_matmul").sampled(structs_of(case), jax.random.key(0))
    inputs = jax.tree.map(jnp.asarray, inputs)
    want = jax.jit(forward(XlaWeightOnly(), FwdParams()))(
        inputs.replace(x=inputs.x.astype(jnp.float32), out_dtype="float32")
    )
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves(inputs)) + want["out"].size * inputs.x.dtype.itemsize
    weight = inputs.matrix(inputs.x.dtype)
    runs: dict[str, Run] = {
        "copy": functools.partial(jax.jit(lambda x: x + jnp.uint8(1)), inputs.codes),
        "bfloat16": functools.partial(jax.jit(lambda x, w: {"out": x @ w.T}), inputs.x, weight),
        f"{OURS} xla": functools.partial(jax.jit(forward(XlaWeightOnly(), FwdParams())), inputs),
    }
    if jax.default_backend() == "gpu":
        for params in tried(case, current_device(), given.sweep):
            runs[f"{OURS} {params}"] = functools.partial(jax.jit(forward(TritonWeightOnly(), params)), inputs)
    good, said = checked(runs, want)
    by_device = functools.partial(sample, flush=flush_by_reading)
    for name, times in measure_in_turn(
        good, given.rounds, given.flush, wall_sample if given.wall else by_device
    ).items():
        said[name] = said.get(name, {}) | times
    copy, of_bfloat16 = (said[name].get("median_us") for name in ("copy", "bfloat16"))
    for each in said.values():
        if copy and of_bfloat16 and "median_us" in each:
            each["of_bytes"] = round(moved / (2 * inputs.codes.nbytes) * copy / each["median_us"], 3)
            each["of_bfloat16"] = round(of_bfloat16 / each["median_us"], 3)
    return {"case": case.name, "bytes": moved, "contenders": said}


def line(found: dict[str, Any]) -> str:
    parts = []
    for name, each in found["contenders"].items():
        ratios = f"bytes {each.get('of_bytes', '')}, bfloat16 {each.get('of_bfloat16', '')}"
        kernels = each.get("kernels", "")[:110]
        time_us = f"{each['median_us']:.1f} µs {ratios} {kernels}" if "median_us" in each else str(each)[:200]
        parts.append(f"{name.replace('TritonWeightOnlyParams', '')}: {time_us}")
    return f"{found['case']:>16} " + "\n    ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = CASES.by_device["gpu"]
    parser.add_argument("--cases", default=",".join(gpu), help="of " + ", ".join(gpu))
    parser.add_argument("--sweep", type=int, default=1, help="candidates of ours to measure; 1 is the heuristic alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes read before each call; not 0")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--compile", metavar="DEVICE", help="only compile for a device, such as 'NVIDIA H200', ahead")
    parser.add_argument("--name", default="weight_only_matmul", help="of the record")
    given = parser.parse_args(argv)
    names, cells = given.cases.split(","), list[dict[str, Any]]()
    if given.compile:
        compile_all(names, find_device(given.compile).device, given.sweep)
        return
    for name in names:
        try:
            cells.append(run_cell(gpu[name], given))
            print(line(cells[-1]), flush=True)
        except Exception as error:  # one case that does not fit must not take the others along
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
        gc.collect()
        record(given.name, {"flushed_bytes": given.flush, "rounds": given.rounds, "cells": cells})


if __name__ == "__main__":
    main()
