"""Grouped matmuls on a GPU: device time beside ``jax.lax.ragged_dot``, tokamax, PyTorch, and a dense matmul.

Every backend of ours that serves a case is measured with its first choice; those that decline are recorded with their
reasons. "dense" is cuBLAS on one matrix, of as many operations: what no grouped matmul that is bound by arithmetic
exceeds by much. Results are compared with those of the XLA backend before anything is timed. Times are those of a
call's kernels as CUPTI reports them, each call after as much memory was written as the L2 cache cannot hold, and
contenders take turns. ``python -m benchmarks.grouped_matmul``
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import record, usable_cores
from benchmarks.norms import FLUSHED_BYTES, as_jax, sample, waited_for, wall_sample
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.matmul.xla.backend import XlaGroupedMatmul
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

KINDS = ("forward", "d_lhs", "d_rhs")
REFERENCE = "tilewright xla"
MAX_DIFFERENCE = 0.01
"""Relative to the norm of a right result: two roundings to bfloat16 differ by 0.003."""

type Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Rows, k and n in bfloat16, and how rows are divided among groups: "even", "half", "zipf" or "eight"."""

    rows: int
    k: int
    n: int
    groups: int
    shares: str = "even"

    def group_sizes(self) -> np.ndarray[Any, Any]:
        random = np.random.default_rng(0)
        weights = np.ones(self.groups)
        if self.shares == "half":  # of all rows in one group
            weights[self.groups // 2] = self.groups - 1
        elif self.shares == "zipf":
            weights = random.permutation(1 / np.arange(1, self.groups + 1))
        elif self.shares == "eight":  # only so many groups have rows
            weights = np.zeros(self.groups)
            weights[random.choice(self.groups, 8, replace=False)] = 1
        return random.multinomial(self.rows, weights / weights.sum()).astype(np.int32)


CASES = {
    "8x8k": Sizes(8192, 4096, 14336, 8),
    "64x16k": Sizes(16384, 7168, 2048, 64),
    "256x16k": Sizes(16384, 7168, 2048, 256),
    "decode_8_of_256": Sizes(64, 7168, 2048, 256, "eight"),
    "decode_8": Sizes(64, 4096, 14336, 8),
    "8x8k_half": Sizes(8192, 4096, 14336, 8, "half"),
    "64x16k_zipf": Sizes(16384, 7168, 2048, 64, "zipf"),
    "small": Sizes(64, 32, 48, 4),
}


def drawn(sizes: Sizes) -> tuple[jax.Array, ...]:
    """lhs, rhs, group sizes and the cotangent, on the device."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    a, b, c = jax.random.split(jax.random.key(0), 3)
    counts = sizes.group_sizes()
    lhs, rhs = draw(a, (sizes.rows, sizes.k)), draw(b, (sizes.groups, sizes.k, sizes.n))
    return lhs, rhs, jnp.asarray(counts), draw(c, (sizes.rows, sizes.n))


def of_backend(backend: Any, params: Any, kind: str) -> Callable[..., jax.Array]:
    """A backend of ours as a function of the arrays."""

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, d_out: jax.Array) -> jax.Array:
        inputs = MatmulInputs(lhs, rhs, "bfloat16", group_sizes=sizes)
        if kind == "forward":
            return backend.forward(inputs, params).out
        inputs = inputs.replace(wanted=frozenset({kind[2:]}))
        return backend.backward(inputs, None, d_out, params)[kind[2:]]

    return run


def of_function(function: Callable[..., jax.Array], kind: str) -> Callable[..., jax.Array]:
    """A function of lhs, rhs and sizes, or one of its gradients by ``jax.vjp``."""
    if kind == "forward":
        return lambda lhs, rhs, sizes, d_out: function(lhs, rhs, sizes)
    which = 0 if kind == "d_lhs" else 1

    def gradient(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, d_out: jax.Array) -> jax.Array:
        return jax.vjp(lambda lhs, rhs: function(lhs, rhs, sizes), lhs, rhs)[1](d_out)[which]

    return gradient


def dense(kind: str) -> Callable[..., jax.Array]:
    """As many operations in one matmul."""

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, d_out: jax.Array) -> jax.Array:
        if kind == "forward":
            return lhs @ rhs[0]
        return d_out @ rhs[0].T if kind == "d_lhs" else lhs.T @ d_out

    return run


def of_jax(case: Sizes, kind: str, structs: Sequence[Any], peers: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Functions to compile, by name; and of what declines the reasons."""
    device, declined = current_device(), {}
    way: Direction = "forward" if kind == "forward" else "backward"
    lhs, rhs, sizes, _ = structs
    inputs = MatmulInputs(lhs, rhs, "bfloat16", group_sizes=sizes)
    found: dict[str, Any] = {"dense": dense(kind)}
    for each in GroupedMatmul().backends:
        name, backend = f"tilewright {each.name}", each.backend
        if backend is None:
            declined[name] = each.error
            continue
        if reasons := backend.not_supported_reasons(inputs, device, way):
            declined[name] = "; ".join(reasons)
            continue
        found[name] = of_backend(backend, backend.heuristic(inputs, device, way), kind)
    if not peers:
        return found, declined
    found["jax.lax.ragged_dot"] = of_function(jax.lax.ragged_dot, kind)
    if importlib.util.find_spec("tokamax") is None:
        declined["tokamax"] = "not installed"
        return found, declined
    for implementation in ("mosaic", "triton"):

        def tokamax(lhs: Any, rhs: Any, sizes: Any, implementation: str = implementation) -> Any:
            return importlib.import_module("tokamax").ragged_dot(lhs, rhs, sizes, implementation=implementation)

        found[f"tokamax {implementation}"] = of_function(tokamax, kind)
    return found, declined


def by_torch(kind: str, arrays: Sequence[jax.Array]) -> Run:
    """``torch._grouped_mm``, on the same memory."""
    torch = importlib.import_module("torch")
    lhs, rhs, sizes, d_out = (torch.from_dlpack(x) for x in arrays)
    ends = torch.cumsum(sizes, 0).to(torch.int32)
    if kind == "forward":
        return lambda: torch._grouped_mm(lhs, rhs, offs=ends)
    if kind == "d_lhs":
        return lambda: torch._grouped_mm(d_out, rhs.transpose(1, 2), offs=ends)
    return lambda: torch._grouped_mm(lhs.t(), d_out, offs=ends)


@jax.jit
def difference(got: jax.Array, want: jax.Array) -> jax.Array:
    """The norm of what differs, as a part of the wanted one."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())


def compiled_all(names: Sequence[str], peers: bool) -> dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]]:
    """Everything of JAX compiled before anything runs: programs, or the reason why there is none."""
    functions = {}
    for name in names:
        case = CASES[name]
        shapes = ((case.rows, case.k), (case.groups, case.k, case.n), (case.groups,), (case.rows, case.n))
        dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16)
        structs = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
        for kind in KINDS:
            functions[name, kind] = structs, *of_jax(case, kind, structs, peers)
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        pending = {
            (key, name): pool.submit(lambda f, structs: jax.jit(f).lower(*structs).compile(), function, structs)
            for key, (structs, found, _) in functions.items()
            for name, function in found.items()
        }
    made: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]] = {
        key: ({}, dict(declined)) for key, (_, _, declined) in functions.items()
    }
    for (key, name), each in pending.items():
        if error := each.exception():
            made[key][1][name] = f"{type(error).__name__}: {error}"[:300]
        else:
            made[key][0][name] = each.result()
    return made


def one_sample(run: Run, flush: int, wall: bool) -> float:
    """Milliseconds of a call's kernels."""
    (call,) = wall_sample([run], flush) if wall else sample([run], flush)
    return sum(time_us for _, time_us in call) / 1e3


def run_cell(
    name: str, kind: str, arrays: Sequence[jax.Array], programs: Mapping[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """The contenders' times, or what is wrong with them."""
    runs: dict[str, Run] = {each: functools.partial(program, *arrays) for each, program in programs.items()}
    if not given.no_peers and importlib.util.find_spec("torch"):
        runs["torch._grouped_mm"] = by_torch(kind, arrays)
    said: dict[str, dict[str, Any]] = {}
    want = runs[REFERENCE]()
    for each in list(runs):
        try:
            said[each] = {"samples_ms": []}
            got = as_jax(waited_for(runs[each]()))
            if each == "dense":
                continue
            said[each]["difference"] = float(difference(got.reshape(want.shape), want))
            if not said[each]["difference"] <= MAX_DIFFERENCE:  # NaN is wrong, too
                said[each]["wrong"] = True
                del runs[each]
        except Exception as error:  # the failure of one is a result; the others are still measured
            said[each]["error"] = f"{type(error).__name__}: {error}"[:300]
            del runs[each]
    del want, got
    for turn in range(given.rounds):
        for each in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            try:
                said[each]["samples_ms"].append(round(one_sample(runs[each], given.flush, given.wall), 5))
            except Exception as error:
                said[each]["error"] = f"{type(error).__name__}: {error}"[:300]
    flops = 2.0 * CASES[name].rows * CASES[name].k * CASES[name].n
    for found in said.values():
        if found["samples_ms"]:
            found["median_ms"] = statistics.median(found["samples_ms"])
            found["tflops"] = round(flops / found["median_ms"] / 1e9, 1)
    return {"case": name, "sizes": dataclasses.asdict(CASES[name]), "kind": kind, "contenders": said}


def line(cell: Mapping[str, Any]) -> str:
    timed = sorted((each.get("median_ms", math.inf), name) for name, each in cell["contenders"].items())
    return f"{cell['case']:16} {cell['kind']:8} " + ", ".join(f"{name} {ms:.3f}" for ms, name in timed)


def versions() -> dict[str, str | None]:
    """Versions of the packages that are measured beside JAX."""
    found: dict[str, str | None] = {}
    for name in ("torch", "tokamax", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(list(CASES)[:-1]), help="of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--no-peers", action="store_true", help="ours and the dense matmul alone")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this many seconds")
    parser.add_argument("--name", default="grouped_matmul", help="of the record")
    given = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some of the memory
    start = time.monotonic()
    assert f"tilewright {XlaGroupedMatmul.platform}" == REFERENCE
    names = given.cases.split(",")
    made = compiled_all(names, not given.no_peers)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    cells: list[dict[str, Any]] = []
    for name in names:
        if time.monotonic() - start > given.seconds:
            print(f"{name}: not started, the time is over", flush=True)
            continue
        arrays = drawn(CASES[name])
        for kind in KINDS:
            if time.monotonic() - start > given.seconds:
                continue
            programs, declined = made[name, kind]
            try:
                cells.append(run_cell(name, kind, arrays, programs, given) | {"declined": declined})
                print(line(cells[-1]), flush=True)
            except Exception as error:  # one case that does not fit must not take the others along
                print(f"{name} {kind}: {type(error).__name__}: {error}"[:300], flush=True)
            gc.collect()
            shared = {"flushed_bytes": given.flush, "rounds": given.rounds, "versions": versions()}
            record(given.name, shared | {"cells": cells})
        del arrays


if __name__ == "__main__":
    main()
