"""``quantize`` on a GPU: microseconds of device time beside a copy of the same bytes and XLA, bit for bit.

Times are taken as ``benchmarks.norms`` takes them. A copy reads and writes x; ``of_copy`` is the share of its bandwidth
with which a call moves the bytes that it must: x once (twice where scales cover rows or all of it), and the codes of
each orientation. Codes and scales are compared with NumPy's before anything is timed. ``--sweep`` measures that many
candidates. ``python -m benchmarks.quantize``
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import record
from benchmarks.norms import FLUSHED_BYTES, OURS, Run, compile_launches, measure_in_turn, sample, wall_sample
from tilewright.kernels import kernel
from tilewright.kernels.quantize.cases import CASES, QuantizeCase
from tilewright.kernels.quantize.inputs import QuantizeInputs
from tilewright.kernels.quantize.quantized import Quantized, blocks, by_axis
from tilewright.kernels.quantize.triton.backend import TritonQuantize, tiling
from tilewright.kernels.quantize.xla import XlaQuantize
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.target import traced_as


def in_numpy(x: np.ndarray, inputs: QuantizeInputs) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of finite float32 numbers that are not subnormal, without powers of two."""
    codes = inputs.codes
    scales = np.abs(x)
    for axis, each in enumerate(by_axis(inputs.covered, x.shape)):
        size = x.shape[axis] if each is None else each
        if size > 1:
            edges = range(0, x.shape[axis], size)
            scales = np.maximum.reduceat(scales, edges, axis)
    scales = np.where(scales == 0, np.float32(1), scales * np.float32(1 / codes.largest)).astype(np.float32)
    inverse = np.float32(1) / scales
    for axis, each in enumerate(by_axis(inputs.covered, x.shape)):
        size = x.shape[axis] if each is None else each
        assert inverse.shape[axis] == blocks(x.shape[axis], size)
        inverse = np.repeat(inverse, size, axis).take(range(x.shape[axis]), axis)
    y = np.clip(x * inverse, -codes.largest, codes.largest)
    return (y if codes.is_floating else np.rint(y)).astype(codes.dtype), scales


def differences(found: Any, x: np.ndarray, inputs: QuantizeInputs) -> str:
    """Codes and scales that are not NumPy's."""
    results = found if isinstance(found, tuple) else (found,)
    said = []
    for each, array in zip(results, (x, x.swapaxes(-1, -2)), strict=False):
        assert isinstance(each, Quantized)
        codes, scales = in_numpy(array, inputs)
        wrong = int((np.asarray(each.values).view(np.uint8) != codes.view(np.uint8)).sum())
        said.append(f"{wrong} codes, {int((np.asarray(each.scales) != scales).sum())} scales differ")
    return "; ".join(each for each in said if each != "0 codes, 0 scales differ")


def compile_ahead(case: QuantizeCase, name: str, sweep: int) -> None:
    """Compiles the kernels of a case for a device that need not be here, into Triton's cache."""
    device, backend = find_device(name).device, TritonQuantize()
    args, kwargs = case.abstract_arguments()
    structs = kernel("quantize").prepare(*args, **kwargs).structs
    for params in list(backend.candidates(structs, device, "forward"))[:sweep]:
        with traced_as(name):
            compile_launches(functools.partial(backend.forward, params=params), (structs,), device)


def bytes_of(inputs: QuantizeInputs) -> int:
    size, elements = inputs.x.dtype.itemsize, int(np.prod(inputs.x.shape))
    return elements * (size * (2 if tiling(inputs).given else 1) + (2 if inputs.transposed else 1))


def run_cell(case: QuantizeCase, given: argparse.Namespace) -> dict[str, Any]:
    args, kwargs = case.abstract_arguments()
    structs = kernel("quantize").prepare(*args, **kwargs).structs
    inputs = structs.replace(x=jax.random.normal(jax.random.key(0), structs.x.shape, structs.x.dtype))
    x = np.asarray(inputs.x.astype(jnp.float32))
    runs: dict[str, Run] = {
        "copy": functools.partial(jax.jit(lambda x, y: x + y), inputs.x, jnp.zeros((), inputs.x.dtype)),
        f"{OURS} xla": functools.partial(jax.jit(lambda i: XlaQuantize().forward(i, FwdParams())), inputs),
    }
    if jax.default_backend() == "gpu":
        backend = TritonQuantize()
        listed = list(backend.candidates(structs, current_device(), "forward"))[: given.sweep]
        for params in listed:
            call = jax.jit(lambda i, params=params: backend.forward(i, params))
            runs[f"{OURS} {params.block_rows}x{params.block_columns} {params.num_warps}w {params.part_rows}"] = (
                functools.partial(call, inputs)
            )
    said: dict[str, dict[str, Any]] = {name: {} for name in runs}
    for name, run in runs.items():
        found = jax.block_until_ready(run())
        if name != "copy" and (wrong := differences(found, x, structs)):
            said[name]["error"] = wrong
    times = measure_in_turn(runs, given.rounds, given.flush, wall_sample if given.wall else sample)
    copy = times["copy"].get("median_us")
    for name, each in times.items():
        said[name] |= each
        if copy and "median_us" in each:
            moved = 2 * inputs.x.nbytes if name == "copy" else bytes_of(structs)
            said[name]["of_copy"] = round(moved / (2 * inputs.x.nbytes) * copy / each["median_us"], 3)
    return {"case": case.name, "bytes": bytes_of(structs), "contenders": said}


def line(found: Mapping[str, Any]) -> str:
    parts = []
    for name, each in found["contenders"].items():
        parts.append(
            f"{name}: {each.get('median_us', float('nan')):.1f} {each.get('of_copy', '')} {each.get('error', '')}"
        )
    return f"{found['case']:>10} " + " | ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = CASES.by_device["gpu"]
    parser.add_argument("--cases", default=",".join(gpu), help="of " + ", ".join(gpu))
    parser.add_argument("--rows", type=int, help="in place of those of the cases")
    parser.add_argument("--sweep", type=int, default=1, help="candidates of ours to measure; 1 is the heuristic alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--name", default="quantize", help="of the record")
    parser.add_argument("--ahead", help="only compile for the device of this name, which need not be here")
    given = parser.parse_args(argv)
    if given.ahead:
        for name in given.cases.split(","):
            compile_ahead(gpu[name], given.ahead, given.sweep)
        return
    cells: list[dict[str, Any]] = []
    for name in given.cases.split(","):
        case = gpu[name] if given.rows is None else dataclasses.replace(gpu[name], rows=given.rows)
        try:
            cells.append(run_cell(case, given))
            print(line(cells[-1]), flush=True)
        except Exception as error:  # one case that does not fit must not take the others along
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
        record(given.name, {"flushed_bytes": given.flush, "rounds": given.rounds, "cells": cells})


if __name__ == "__main__":
    main()
