"""The causal convolution on an accelerator: microseconds of device time beside a copy, XLA and JAX's own convolution.

Times are taken as ``benchmarks.norms`` takes them: the kernels of a call as CUPTI reports them, each call after as much
memory was written as the L2 cache cannot hold, all contenders in turn. Results are compared with those in float32
before anything is timed. For the Triton kernels the heuristic is measured and, with ``--sweep``, the candidates most
like it. ``of_copy`` is the share of a copy's bandwidth that the bytes of a call are moved with.
``python -m benchmarks.causal_conv1d``
"""

import argparse
import dataclasses
import functools
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record
from benchmarks.norms import FLUSHED_BYTES, OURS, Run, checked, measure_in_turn, sample, wall_sample
from tilewright.kernels import kernel
from tilewright.kernels.causal_conv1d.cases import CASES, STEP_CASES, ConvCase, ConvStepCase
from tilewright.kernels.causal_conv1d.inputs import ConvInputs, ConvResults, StepInputs
from tilewright.kernels.causal_conv1d.triton.backend import TritonConv, TritonConvStep
from tilewright.kernels.causal_conv1d.xla import XlaConv, XlaConvStep
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device

DIRECTIONS = ("forward", "backward")
PLAIN = (FwdParams(), BwdParams())


def structs_of(case: ConvCase) -> ConvInputs:
    args, kwargs = case.abstract_arguments()
    found: ConvInputs = kernel("causal_conv1d").prepare(*args, **kwargs).structs
    return found


def draw(case: ConvCase) -> tuple[ConvInputs, ConvResults]:
    """The inputs of a case and cotangents; tokens are drawn on the device."""
    inputs: Any = kernel("causal_conv1d").sampled(structs_of(case), jax.random.key(0))
    normal = functools.partial(jax.random.normal, jax.random.key(1))
    state = normal(inputs.state.shape, inputs.state.dtype) if inputs.return_state else None
    return inputs, ConvResults(normal(inputs.x.shape, inputs.x.dtype), state)


def results(backend: Any, params: tuple[Any, Any], direction: str) -> Any:
    """A backend's results or gradients, by name."""

    def run(inputs: ConvInputs, cotangents: ConvResults) -> dict[str, jax.Array]:
        if direction == "forward":
            return {"out": backend.forward(inputs, params[0]).out}
        none: Any = ConvResults(None, None)  # type: ignore[arg-type]
        found: dict[str, jax.Array] = backend.backward(inputs, none, cotangents, params[1])
        return found

    return run


def plain(inputs: ConvInputs) -> jax.Array:
    """What a JAX user writes: shifted products, in float32."""
    length, width = inputs.x.shape[1], inputs.width
    padded = jnp.pad(inputs.x, ((0, 0), (width - 1, 0), (0, 0))).astype(jnp.float32)
    total: Any = sum(inputs.weight[:, j].astype(jnp.float32) * padded[:, j : j + length] for j in range(width))
    if inputs.bias is not None:
        total = total + inputs.bias.astype(jnp.float32)
    return (total if inputs.activation is None else jax.nn.silu(total)).astype(inputs.x.dtype)


def by_user(function: Any, direction: str) -> Any:
    """The same of a function of the inputs that JAX differentiates, recomputing what it needs."""

    def run(inputs: ConvInputs, cotangents: ConvResults) -> dict[str, jax.Array]:
        if direction == "forward":
            return {"out": function(inputs)}
        names = list(inputs.gradients)
        floating = {name: getattr(inputs, name) for name in names}
        _, pull_back = jax.vjp(lambda given: function(inputs.replace(**given)), floating)
        found: dict[str, jax.Array] = pull_back(cotangents.out)[0]
        return found

    return run


def contenders(case: ConvCase, direction: Any, sweep: int) -> dict[str, Any]:
    """Functions of inputs and cotangents by name; the first of ours in Triton is the heuristic's."""
    found: dict[str, Any] = {f"{OURS} xla": results(XlaConv(), PLAIN, direction)}
    if case.packing is None and not (case.initial_state or case.return_state):
        found["xla"] = by_user(plain, direction)
        peer: Any = CASES.peers["lax.conv"](case)
        found["lax.conv"] = by_user(lambda inputs: peer(inputs.x, inputs.weight, inputs.bias), direction)
    if jax.default_backend() == "gpu":
        backend, device = TritonConv(), current_device()
        structs = structs_of(case)
        for params in list(backend.candidates(structs, device, direction))[:sweep]:
            found[f"{OURS} {params}"] = results(backend, (params, params), direction)
    return found


def bytes_of(inputs: ConvInputs, direction: str) -> int:
    """Tokens that a pass must read and write."""
    return (2 if direction == "forward" else 3) * int(inputs.x.nbytes)


def run_cell(case: ConvCase, direction: str, given: argparse.Namespace) -> dict[str, Any]:
    inputs, cotangents = draw(case)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), cotangents)
    want = jax.jit(results(XlaConv(), PLAIN, direction))(exact, wide)
    runs: dict[str, Run] = {
        "copy": functools.partial(jax.jit(lambda x, y: x + y), inputs.x, jnp.zeros((), inputs.x.dtype))
    }
    runs |= {
        name: functools.partial(jax.jit(function), inputs, cotangents)
        for name, function in contenders(case, direction, given.sweep).items()
    }
    good, said = checked(runs, want)
    del want, exact, wide
    return cell(f"{case.name} {direction}", bytes_of(inputs, direction), 2 * inputs.x.nbytes, good, said, given)


def run_step(case: ConvStepCase, given: argparse.Namespace) -> dict[str, Any]:
    """A step whose pool is donated; states go to other slots than they come from, so that all steps are alike."""
    args, kwargs = dataclasses.replace(case, moves=True).arguments()
    inputs = kernel("causal_conv1d_step").prepare(*args, **kwargs)
    moved = 2 * inputs.x.nbytes + 2 * inputs.conv_pool[: case.batch].nbytes
    tried: dict[str, Any] = {f"{OURS} xla": (XlaConvStep(), FwdParams())}
    if jax.default_backend() == "gpu":
        listed = TritonConvStep().candidates(inputs.structs, current_device(), "forward")
        tried |= {f"{OURS} {params}": (TritonConvStep(), params) for params in list(listed)[: given.sweep]}
    want = {"y": XlaConvStep().forward(inputs, FwdParams())[0].astype(jnp.float32)}
    runs: dict[str, Run] = {"copy": functools.partial(jax.jit(lambda x, y: x + y), inputs.conv_pool, jnp.bfloat16(0))}
    for name, (backend, params) in tried.items():
        runs[name] = Stepping(backend, params, inputs)
    good, said = checked(runs, want)
    return cell(f"step {case.name}", moved, 2 * inputs.conv_pool.nbytes, good, said, given)


class Stepping:
    """A step that donates the pool of the one before."""

    def __init__(self, backend: Any, params: Any, inputs: StepInputs) -> None:
        self._step = jax.jit(lambda rest, pool: backend.forward(rest.replace(conv_pool=pool), params), donate_argnums=1)
        self._rest, self._pool = inputs.replace(conv_pool=inputs.conv_pool[:0]), inputs.conv_pool + 0

    def __call__(self) -> dict[str, jax.Array]:
        y, self._pool = self._step(self._rest, self._pool)
        return {"y": y}


def cell(
    name: str, moved: int, copied: int, good: dict[str, Run], said: dict[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    found = measure_in_turn(good, given.rounds, given.flush, wall_sample if given.wall else sample)
    for each, times in found.items():
        said[each] = said.get(each, {}) | times
    copy = found.get("copy", {}).get("median_us")
    for each in said.values():
        if copy and "median_us" in each:
            each["of_copy"] = round(moved / copied * copy / each["median_us"], 3)
    return {"case": name, "bytes": moved, "contenders": said}


def line(found: Mapping[str, Any]) -> str:
    parts = []
    for name, each in found["contenders"].items():
        time_us = f"{each['median_us']:.1f} µs" if "median_us" in each else str(each)[:160]
        parts.append(f"{name}: {time_us} {each.get('of_copy', '')}")
    return f"{found['case']:>28} " + "\n    ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu, steps = CASES.by_device["gpu"], STEP_CASES.by_device["gpu"]
    parser.add_argument("--cases", default=",".join((*gpu, *steps)), help="of " + ", ".join((*gpu, *steps)))
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--sweep", type=int, default=1, help="candidates of ours to measure; 1 is the heuristic alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--name", default="causal_conv1d", help="of the record")
    given = parser.parse_args(argv)
    cells: list[dict[str, Any]] = []
    for name in given.cases.split(","):
        for direction in given.directions.split(",") if name in gpu else ("step",):
            try:
                cells.append(run_step(steps[name], given) if name in steps else run_cell(gpu[name], direction, given))
                print(line(cells[-1]), flush=True)
            except Exception as error:  # one case that does not fit must not take the others along
                print(f"{name} {direction}: {type(error).__name__}: {error}"[:300], flush=True)
            gc.collect()
            record(given.name, {"flushed_bytes": given.flush, "rounds": given.rounds, "cells": cells})


if __name__ == "__main__":
    main()
