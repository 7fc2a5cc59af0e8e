"""``linear_cross_entropy`` on a GPU: device time and memory beside the logits in memory, tokamax and PyTorch's kernels.

Every backend of ours is measured with its first choice, with gradients from the forward pass and with recomputed ones.
Losses and gradients are compared with those of the XLA backend before anything is timed. Times are those of a call's
kernels as CUPTI reports them, each call after as much memory was written as the L2 cache cannot hold; contenders take
turns. Memory is what a program needs beside its operands and results; for PyTorch, the peak while it runs. "matmul" is
cuBLAS on 8192³, which makes figures of different cards comparable. ``python -m benchmarks.linear_cross_entropy``
"""

import argparse
import concurrent.futures
import functools
import gc
import importlib
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record, usable_cores
from benchmarks.grouped_matmul import difference, one_sample, versions
from benchmarks.norms import FLUSHED_BYTES, as_jax, waited_for
from tilewright.kernels.linear_cross_entropy.cases import CASES as OP_CASES
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase, dense
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_cross_entropy
from tilewright.ops.utils.device import current_device

KINDS = ("forward", "both")
REFERENCE = "tilewright xla, recomputed"
MAX_DIFFERENCE = 0.01
"""Relative to the norm of a right gradient: that of the logits is rounded to bfloat16."""

CASES: dict[str, LinearCrossEntropyCase] = {
    **OP_CASES.by_device["gpu"],
    "small": LinearCrossEntropyCase("small", dtype="bfloat16", tokens=64, d=64, vocab=512),
}

type Run = Callable[[], Any]


def structs_of(case: LinearCrossEntropyCase) -> tuple[Any, Any, Any]:
    shape = (case.vocab, case.d) if case.vocab_first else (case.d, case.vocab)
    x, weight = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((case.tokens, case.d), shape))
    return x, weight, jax.ShapeDtypeStruct((case.tokens,), jnp.int32)


def drawn(case: LinearCrossEntropyCase) -> tuple[jax.Array, ...]:
    """x, weight and labels on the device, for logits of about 1."""
    x, weight, labels = structs_of(case)

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c = jax.random.split(key, 3)
        matrix = jax.random.normal(b, weight.shape, jnp.bfloat16) / case.d**0.5
        classes = jax.random.randint(c, labels.shape, 0, case.vocab)
        return jax.random.normal(a, x.shape, jnp.bfloat16), matrix.astype(jnp.bfloat16), classes

    return draw(jax.random.key(0))


def forms(case: LinearCrossEntropyCase) -> tuple[dict[str, Any], dict[str, str]]:
    """Configs of our backends by name, and of those that decline the reasons."""
    inputs = LossInputs(*structs_of(case), vocab_first=case.vocab_first, keeps_gradients=True)
    device = current_device()
    found: dict[str, Any] = {}
    declined: dict[str, str] = {}
    for each in LinearCrossEntropy().backends:
        name, backend = f"tilewright {each.name}", each.backend
        if backend is None:
            declined[name] = each.error
            continue
        if reasons := backend.not_supported_reasons(inputs, device, "forward"):
            declined[name] = "; ".join(reasons)
            continue
        forward = Choice(backend.name, backend.heuristic(inputs, device, "forward"))
        for params in backend.candidates(inputs, device, "backward"):
            form = f"{name}, {'recomputed' if params.recompute else 'kept'}"
            found.setdefault(form, PerDirection(forward, Choice(backend.name, params)))
    return found, declined


def of_jax(case: LinearCrossEntropyCase, peers: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Functions of x, weight and labels by name, and reasons why others are not there."""
    found, declined = forms(case)
    functions: dict[str, Callable[..., jax.Array]] = {
        name: functools.partial(linear_cross_entropy, vocab_first=case.vocab_first, cfg=cfg)
        for name, cfg in found.items()
    }
    if peers:
        plain = dense(LinearCrossEntropyCase(""))
        assert callable(plain)
        functions["logits in memory"] = functools.partial(plain, vocab_first=case.vocab_first, reduction="mean")
        if importlib.util.find_spec("tokamax") is None:
            declined["tokamax"] = "not installed"
        for implementation in ("xla", "chunked_xla") if "tokamax" not in declined else ():

            def tokamax(x: Any, weight: Any, labels: Any, implementation: str = implementation) -> Any:
                loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
                matrix = weight.T if case.vocab_first else weight
                return loss(x, labels, matrix, reduction="mean", implementation=implementation)

            functions[f"tokamax {implementation}"] = tokamax
    return functions, declined


def compiled(function: Callable[..., Any], structs: Sequence[Any]) -> Any:
    return jax.jit(function).lower(*structs).compile()


def compiled_all(names: Sequence[str], peers: bool) -> dict[str, tuple[dict[tuple[str, str], Any], dict[str, str]]]:
    """Programs of every case by contender and kind, all compiled before anything runs."""
    made: dict[str, tuple[dict[tuple[str, str], Any], dict[str, str]]] = {}
    wanted: dict[tuple[str, str, str], Callable[..., Any]] = {}
    for case in names:
        functions, declined = of_jax(CASES[case], peers)
        made[case] = {}, declined
        for name, function in functions.items():
            wanted |= {
                (case, name, kind): function if kind == "forward" else jax.value_and_grad(function, (0, 1))
                for kind in KINDS
            }
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        pending = {key: pool.submit(compiled, each, structs_of(CASES[key[0]])) for key, each in wanted.items()}
    for (case, name, kind), each in pending.items():
        try:
            if error := each.exception():
                # XLA tries algorithms on arrays of the program's size: those of several may not fit at the same time.
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise error
                made[case][0][name, kind] = compiled(wanted[case, name, kind], structs_of(CASES[case]))
            else:
                made[case][0][name, kind] = each.result()
        except Exception as error:  # the failure of one is a result; the others are still measured
            made[case][1][f"{name}, {kind}"] = f"{type(error).__name__}: {error}"[:300]
    return made


def by_torch(case: LinearCrossEntropyCase, arrays: Sequence[jax.Array]) -> dict[tuple[str, str], Run]:
    """Kernels for PyTorch that are installed, on copies of the arrays: their matrix is ``[vocab, d]``."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch = importlib.import_module("torch")
    x, weight, labels = (torch.from_dlpack(each).clone() for each in arrays)
    weight = weight if case.vocab_first else weight.t().contiguous()
    x, weight, labels = x.requires_grad_(), weight.requires_grad_(), labels.long()
    losses: dict[str, Run] = {}
    if importlib.util.find_spec("cut_cross_entropy"):
        cut = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        losses["cut-cross-entropy"] = lambda: cut(x, weight, labels)
        losses["cut-cross-entropy, all gradients"] = lambda: cut(x, weight, labels, filter_eps=None)
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        apply = liger.LigerFusedLinearCrossEntropyFunction.apply
        losses["Liger"] = lambda: apply(x, weight, labels)[0]

    def forward(loss: Run) -> Any:
        with torch.no_grad():
            return loss().detach()

    def both(loss: Run) -> Any:
        x.grad = weight.grad = None
        found = loss()
        found.backward()
        of_weight = weight.grad if case.vocab_first else weight.grad.t()
        return found.detach(), (x.grad, of_weight)

    # Liger computes gradients in its forward pass, whether they are used or not.
    return {
        (name, kind): functools.partial(forward if kind == "forward" else both, loss)
        for name, loss in losses.items()
        for kind in KINDS
    }


def torch_bytes(run: Run) -> int:
    """Bytes that a call of PyTorch allocates at most."""
    torch = importlib.import_module("torch")
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def differences(got: Any, want: Any) -> list[float]:
    """The errors of a loss, or of a loss and the gradients of x and weight."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [round(float(difference(as_jax(a), b)), 6) for a, b in pairs]


def run_cell(
    name: str, kind: str, arrays: Sequence[jax.Array], programs: Mapping[tuple[str, str], Any], given: Any
) -> dict[str, Any]:
    """The contenders' times and memory, or what is wrong with them."""
    case = CASES[name]
    runs: dict[str, Run] = {}
    said: dict[str, dict[str, Any]] = {}
    for (contender, of), program in programs.items():
        if of == kind:
            runs[contender] = functools.partial(program, *arrays)
            said[contender] = {"temporary_bytes": program.memory_analysis().temp_size_in_bytes}
    torches = {} if given.no_peers else by_torch(case, arrays)
    runs |= {contender: run for (contender, of), run in torches.items() if of == kind}
    want = waited_for(runs[REFERENCE]())
    for contender in list(runs):
        entry = said.setdefault(contender, {})
        try:
            if (contender, kind) in torches:
                entry["temporary_bytes"] = torch_bytes(runs[contender])
            entry["differences"] = differences(waited_for(runs[contender]()), want)
            if not max(entry["differences"]) <= MAX_DIFFERENCE:  # NaN is wrong, too
                entry["wrong"] = True
        except Exception as error:  # the failure of one is a result; the others are still measured
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
            del runs[contender]
    del want
    for turn in range(given.rounds):
        for contender in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            try:
                sample = round(one_sample(runs[contender], given.flush, given.wall), 4)
                said[contender].setdefault("samples_ms", []).append(sample)
            except Exception as error:
                said[contender]["error"] = f"{type(error).__name__}: {error}"[:300]
    # Recomputed logits do not count: a faster form has the same FLOPs in less time.
    flops = (2.0 if kind == "forward" else 6.0) * case.tokens * case.d * case.vocab
    for entry in said.values():
        if entry.get("samples_ms"):
            entry["median_ms"] = statistics.median(entry["samples_ms"])
            entry["tflops"] = round(flops / entry["median_ms"] / 1e9, 1)
    sizes = {field: getattr(case, field) for field in ("tokens", "d", "vocab", "vocab_first")}
    return {"case": name, "sizes": sizes, "kind": kind, "contenders": said}


def matmul_tflops(given: Any) -> float:
    """cuBLAS's rate on 8192³ in bfloat16."""
    size = 64 if given.wall else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    program = jax.jit(jnp.matmul).lower(x, x).compile()
    samples = [one_sample(functools.partial(program, x, x), given.flush, given.wall) for _ in range(5)]
    return round(2.0 * size**3 / statistics.median(samples) / 1e9, 1)


def line(cell: Mapping[str, Any]) -> str:
    def of(name: str, entry: Mapping[str, Any]) -> str:
        memory, mark = entry.get("temporary_bytes", 0) / 1e9, " (wrong)" if entry.get("wrong") else ""
        return f"\n  {name:36} {entry.get('median_ms', math.nan):9.3f} ms {memory:7.2f} GB{mark}"

    ordered = sorted(cell["contenders"].items(), key=lambda each: each[1].get("median_ms", math.inf))
    return f"{cell['case']} {cell['kind']}" + "".join(of(*each) for each in ordered)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(list(CASES)[:-1]), help="of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this many seconds")
    parser.add_argument("--name", default="linear_cross_entropy", help="of the record")
    given = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some of the memory
    start = time.monotonic()
    names = given.cases.split(",")
    made = compiled_all(names, not given.no_peers)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    cells: list[dict[str, Any]] = []
    shared = {"flushed_bytes": given.flush, "rounds": given.rounds, "versions": versions()}
    shared["matmul_tflops"] = matmul_tflops(given)
    for name in names:
        arrays = drawn(CASES[name])
        for kind in KINDS:
            if time.monotonic() - start > given.seconds:
                print(f"{name} {kind}: not started, the time is over", flush=True)
                continue
            programs, declined = made[name]
            try:
                cells.append(run_cell(name, kind, arrays, programs, given) | {"declined": declined})
                print(line(cells[-1]), flush=True)
            except Exception as error:  # one case that does not fit must not take the others along
                print(f"{name} {kind}: {type(error).__name__}: {error}"[:300], flush=True)
            gc.collect()
            record(given.name, shared | {"cells": cells})
        del arrays


if __name__ == "__main__":
    main()
