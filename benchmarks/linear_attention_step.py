"""Decoding steps of linear attention on an accelerator: microseconds of device time beside a copy of the same states.

Times are those of a call's kernels as CUPTI reports them, each call after as much memory was written as the L2 cache
cannot hold; the pool is donated, and each call gets that of the call before. Before, results are compared with those of
the oracle. ``share`` is the time of a copy of the rows' states, by an elementwise kernel, over that of a step. For our
kernels the heuristic is measured and, with ``--sweep``, every candidate. ``python -m benchmarks.linear_attention_step``
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import record
from benchmarks.norms import FLUSHED_BYTES, OURS, Run, measure_in_turn, sample, waited_for, wall_sample
from tilewright.kernels import kernel
from tilewright.kernels.linear_attention.step_cases import CASES as STEP_CASES
from tilewright.kernels.linear_attention.step_cases import StepCase
from tilewright.ops.utils.device import current_device

CASES: dict[str, StepCase] = dict(STEP_CASES.by_device["gpu"])
COPY = "copy"


class Pool:
    """A pool that programs take and give back."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array


def drawn(case: StepCase) -> Any:
    """Random inputs of a case."""
    op = kernel("linear_attention_step")
    args, options = case.abstract_arguments()
    return op.sampled(op.prepare(*args, **options), jax.random.key(0))


def ours(inputs: Any, pool: Pool, sweep: bool) -> dict[str, Run]:
    """Our backends that serve a call, with the heuristic's params or with all candidates."""
    found: dict[str, Run] = {}
    device, others = current_device(), {n: x for n, x in inputs.arrays.items() if n != "state_pool"}
    for backend in kernel("linear_attention_step").backends.usable:
        if backend.not_supported_reasons(inputs.structs, device, "forward"):
            continue
        every = list(backend.candidates(inputs.structs, device, "forward"))
        for i, params in enumerate(every[: None if sweep else 1]):
            step = functools.partial(_step, backend, params, inputs.structs)
            run = functools.partial(_run, jax.jit(step, donate_argnums=0), pool, others)
            found[f"{OURS} {backend.name}" + (f" {params}" if i else "")] = run
    return found


def _step(backend: Any, params: Any, inputs: Any, pool: Any, others: Any) -> Any:
    return backend.forward(inputs.replace(state_pool=pool, **others), params)


def _run(step: Any, pool: Pool, others: Any) -> Any:
    out, pool.array = step(pool.array, others)
    return out


def copy_of(inputs: Any) -> Run:
    """An elementwise kernel that reads and writes as many states as the rows have."""
    pool = inputs.state_pool
    states = jnp.zeros((inputs.batch, *pool.shape[1:]), pool.dtype)
    return functools.partial(jax.jit(lambda x: -x), states)


def checked(inputs: Any, runs: Mapping[str, Run], pool: Pool) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """The calls that run, ours only if both results are those of the oracle."""
    op = kernel("linear_attention_step")
    want = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.jit(op.reference)(inputs.replace(has_tokens=True)))
    good: dict[str, Run] = {}
    said: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        pool.array = inputs.state_pool + 0
        try:
            got = [np.asarray(each, np.float32) for each in (waited_for(run()), pool.array)]
        except Exception as error:  # the failure of one is a result; the others are still measured
            said[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True)]
        if name.startswith(OURS) and not max(errors) < 0.01:
            said[name] = {"wrong": f"errors of {errors} of the largest number"}
        else:
            good[name] = run
    return good, said


def run_cell(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One record: every contender's time, or why it has none."""
    inputs = drawn(CASES[name])
    pool = Pool(inputs.state_pool + 0)
    good, said = checked(inputs, ours(inputs, pool, given.sweep), pool)
    found = measure_in_turn(
        good | {COPY: copy_of(inputs)}, given.rounds, given.flush, wall_sample if given.wall else sample
    )
    moved = 2 * inputs.batch * inputs.state_pool.nbytes // max(inputs.slots, 1)
    return {"case": name, "bytes": moved, "contenders": said | found}


def line(cell: Mapping[str, Any]) -> str:
    """The times of a cell with their share of a copy, and what is wrong."""
    contenders = cell["contenders"]
    timed = sorted((each["median_us"], n) for n, each in contenders.items() if "median_us" in each)
    copy = next((time_us for time_us, n in timed if n == COPY), float("nan"))
    bad = [f"{n}: {each}" for n, each in contenders.items() if "wrong" in each or "error" in each]
    text = ", ".join(f"{n} {time_us:.1f} (share {copy / time_us:.2f})" for time_us, n in timed)
    return f"{cell['case']:>10} | {text}" + (f" BAD {bad[0]}"[:300] if bad else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--sweep", action="store_true", help="every candidate of ours, not the heuristic alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--name", default="linear_attention_step", help="of the record")
    given = parser.parse_args(argv)
    cells: list[dict[str, Any]] = []
    for name in given.cases.split(","):
        try:
            cells.append(run_cell(name, given))
            print(line(cells[-1]), flush=True)
        except Exception as error:  # one case that does not fit must not take the others along
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
        record(given.name, {"flushed_bytes": given.flush, "rounds": given.rounds, "cells": cells})


if __name__ == "__main__":
    main()
