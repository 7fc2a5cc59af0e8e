"""Sampling on an accelerator: microseconds of device time beside sorting, JAX's own, PyTorch and FlashInfer.

Times are those of a call's kernels as CUPTI reports them, whoever started them, each call after as much memory was
written as the L2 cache cannot hold. Before, our tokens are compared with those of the oracle. ``all`` has no limits;
``flat`` is top_p of logits of standard deviation 1, whose kept set is most of the vocabulary. For our kernels the
heuristic is measured and, with ``--sweep``, every candidate. ``matmul`` beside ``linear_sample`` is the matmul of the
logits alone. ``python -m benchmarks.sampling``
"""

import argparse
import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import record
from benchmarks.norms import FLUSHED_BYTES, OURS, Run, measure_in_turn, sample, waited_for, wall_sample
from tilewright.kernels import kernel
from tilewright.kernels.sampling.cases import LinearSampleCase, SampleCase, categorical, logits_in_memory
from tilewright.ops.utils.device import current_device

LIMITS: dict[str, dict[str, Any]] = {
    "all": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k_top_p": {"top_k": 50, "top_p": 0.9},
    "flat": {"top_p": 0.9, "scale": 1.0},
    "log_probs": {"top_k": 50, "top_p": 0.9, "return_log_probs": True},
    "bfloat16": {"top_k": 50, "top_p": 0.9, "dtype": "bfloat16"},
}
SAMPLES = {
    f"{name}-{rows}x{vocab}": SampleCase(name, rows=rows, vocab=vocab, temperature=0.8, **{"scale": 4.0, **fields})
    for rows in (1, 64, 512)
    for vocab in (32000, 131072)
    for name, fields in LIMITS.items()
}
LINEAR = {
    f"linear-{rows}x{d}x{vocab}": LinearSampleCase("", rows=rows, d=d, vocab=vocab, dtype="bfloat16", temperature=0.8)
    for rows in (1, 64, 512)
    for d, vocab in ((4096, 32000), (4096, 128256))
}
CASES: dict[str, SampleCase | LinearSampleCase] = SAMPLES | LINEAR


def drawn(case: SampleCase | LinearSampleCase) -> tuple[Any, ...]:
    """The arrays of a case, drawn on the device."""
    structs = case.abstract_arguments()[0]

    scales = (case.scale,) if isinstance(case, SampleCase) else (1.0, case.scale / case.d**0.5)

    @jax.jit
    def draw(key: jax.Array) -> Any:
        *of_numbers, of_words = jax.random.split(key, len(structs))
        numbers = zip(of_numbers, structs, scales, strict=False)
        words = jax.random.bits(of_words, structs[-1].shape, jnp.uint32)
        return *((scale * jax.random.normal(k, x.shape)).astype(x.dtype) for k, x, scale in numbers), words

    found: tuple[Any, ...] = draw(jax.random.key(0))
    return found


def ours(op: str, inputs: Any, sweep: bool) -> dict[str, Run]:
    """Our backends that serve a call, with the heuristic's params or with all candidates."""
    found: dict[str, Run] = {}
    device = current_device()
    for backend in kernel(op).backends.usable:
        if backend.not_supported_reasons(inputs.structs, device, "forward"):
            continue
        every = list(backend.candidates(inputs.structs, device, "forward"))
        for i, params in enumerate(every[: None if sweep else 1]):
            run = jax.jit(functools.partial(_forward, backend, params))
            found[f"{OURS} {backend.name}" + (f" {params}" if i else "")] = functools.partial(run, inputs)
    return found


def _forward(backend: Any, params: Any, inputs: Any) -> Any:
    return [x for x in backend.forward(inputs, params) if x is not None]


def sorting(case: SampleCase) -> Any:
    """What a JAX user writes: limits by a sort and cumulative sums, and ``jax.random.categorical``."""

    def draw(logits: Any, key: Any) -> Any:
        logits = logits.astype(jnp.float32) / case.temperature
        descending = -jax.lax.sort(-logits)
        threshold = descending[:, -1:]
        if case.top_k is not None:
            threshold = descending[:, case.top_k - 1 : case.top_k]
        if case.top_p is not None:
            probabilities = jax.nn.softmax(jnp.where(descending >= threshold, descending, -jnp.inf))
            count = (jnp.cumsum(probabilities, -1) < case.top_p).sum(-1, keepdims=True)
            found = jnp.take_along_axis(descending, jnp.minimum(count, case.vocab - 1), -1)
            threshold = jnp.maximum(threshold, found)
        kept = jnp.where(logits >= threshold, logits, -jnp.inf)
        return jax.random.categorical(jax.random.wrap_key_data(key[0]), kept)

    return draw


def peers(case: SampleCase | LinearSampleCase, arrays: tuple[Any, ...]) -> dict[str, Run]:
    """Other ways to do a case; those of PyTorch on the same memory, where it is installed."""
    if isinstance(case, LinearSampleCase):
        x, weight, key = arrays
        matmul = jax.jit(lambda x, weight: jnp.matmul(x, weight, preferred_element_type=jnp.float32))
        found: dict[str, Run] = {"matmul": functools.partial(matmul, x, weight)}
        narrow = jax.jit(jnp.matmul)
        found["matmul, bfloat16"] = functools.partial(narrow, x, weight)
        memory: Any = logits_in_memory(case)
        options = case.abstract_arguments()[1]
        run = jax.jit(lambda x, weight, key: memory(x, weight, key, **options))
        return found | {"logits in memory": functools.partial(run, x, weight, key)}
    logits, key = arrays
    found = {"maximum": functools.partial(jax.jit(lambda x: x.max(-1)), logits)}
    if callable(draw := categorical(case)):
        run = jax.jit(lambda x, key: draw(x, key, temperature=case.temperature))
        found["jax.random.categorical"] = functools.partial(run, logits, key)
    if case.top_k is not None or case.top_p is not None:
        found["sort"] = functools.partial(jax.jit(sorting(case)), logits, key)
    return found | (by_torch(case, logits) if jax.default_backend() == "gpu" else {})


def by_torch(case: SampleCase, logits: jax.Array) -> dict[str, Run]:
    """PyTorch's and FlashInfer's samplers, where they are installed; softmax and temperature included."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch = importlib.import_module("torch")
    x = torch.from_dlpack(logits)
    top_k, top_p = case.top_k or 0, 1.0 if case.top_p is None else case.top_p

    def native() -> Any:
        scaled = x.float() / case.temperature
        if top_k or top_p < 1.0:
            scaled, index = scaled.sort(-1, descending=True)
            if top_k:
                scaled[:, top_k:] = float("-inf")
            if top_p < 1.0:
                probabilities = scaled.softmax(-1)
                scaled = scaled.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, float("-inf"))
            return index.gather(-1, torch.multinomial(scaled.softmax(-1), 1))
        return torch.multinomial(scaled.softmax(-1), 1)

    found: dict[str, Run] = {"torch": native}
    if importlib.util.find_spec("flashinfer"):
        module = importlib.import_module("flashinfer.sampling")

        def flashinfer() -> Any:
            scaled = x.float() / case.temperature
            if top_k:
                return module.top_k_top_p_sampling_from_logits(scaled, top_k, top_p)
            probabilities = scaled.softmax(-1)
            if top_p < 1.0:
                return module.top_p_sampling_from_probs(probabilities, top_p)
            return module.sampling_from_probs(probabilities)

        found["flashinfer"] = flashinfer
    return found


def checked(runs: Mapping[str, Run], want: Any) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """The calls that run, ours only if nearly all of their tokens are the oracle's."""
    good: dict[str, Run] = {}
    said: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        try:
            found = jax.tree.leaves(waited_for(run()))
        except Exception as error:  # the failure of one is a result; the others are still measured
            said[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        same = float((np.asarray(found[0])[: len(want)] == want).mean()) if name.startswith(OURS) else 1.0
        if same < 0.97:
            said[name] = {"wrong": f"{same:.3f} of the tokens are those of the oracle"}
        else:
            good[name] = run
    return good, said


def run_cell(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One record: every contender's time, or why it has none."""
    case, arrays = CASES[name], drawn(CASES[name])
    op = "sample" if isinstance(case, SampleCase) else "linear_sample"
    (inputs,), _ = kernel(op).bind(arrays, case.abstract_arguments()[1])
    runs = ours(op, inputs, given.sweep)
    # Large sorts of the oracle take long: its first rows tell as much.
    few: Any = min(case.rows, 64)
    part = inputs.replace(
        **{n: x[:few] for n, x in inputs.arrays.items() if x is not None and n not in ("weight", "bias")}
    )
    want = np.asarray(jax.tree.leaves(jax.jit(kernel(op).reference)(part))[0])
    good, said = checked(runs | ({} if given.no_peers else peers(case, arrays)), want)
    take = wall_sample if given.wall else sample
    found = measure_in_turn(good, given.rounds, given.flush, take)
    return {"case": name, "bytes": sum(x.nbytes for x in arrays), "contenders": said | found}


def line(cell: Mapping[str, Any]) -> str:
    """The times of a cell, and what is wrong."""
    timed = sorted((each["median_us"], n) for n, each in cell["contenders"].items() if "median_us" in each)
    bad = [f"{n}: {each}" for n, each in cell["contenders"].items() if "wrong" in each or "error" in each]
    text = ", ".join(f"{n} {time_us:.1f}" for time_us, n in timed)
    return f"{cell['case']:>24} | {text}" + (f" BAD {bad[0]}"[:300] if bad else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--sweep", action="store_true", help="every candidate of ours, not the heuristic alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--name", default="sampling", help="of the record")
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
