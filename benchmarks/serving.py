"""Attention over a cache on an accelerator: bytes per second, beside what a device copy reaches in the same run.

Beside ours, where they are installed: ejkernel's Triton kernels, and cuDNN on dense caches; for packed queries on
Hopper also a kernel that computes as many FLOPs and reads as many bytes and does nothing else. Results are compared
with the float32 oracle before anything is timed; a wrong one is recorded as wrong. Implementations take turns within a
case. ``python -m benchmarks.serving``; ``--sweep`` measures every candidate of our backends on a GPU instead.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import Method, driver, failure, measure, rates, versions
from benchmarks.attention_peers import Call
from benchmarks.common import record, usable_cores
from benchmarks.products_and_bytes import data_for, products_and_bytes
from tilewright.errors import UnsupportedError
from tilewright.kernels import kernel
from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.paged_attention.cases import ServingCase
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase
from tilewright.kernels.paged_attention.ops.page_attention import PageCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.reference import token_reference
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.utils.device import current_device

_DECODE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "ragged": False}
_LATENT: dict[str, Any] = {"heads": 128, "head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "ragged": False}
_BATCH_64: dict[str, Any] = {"sequences": 64, "kv_length": 8192, **_DECODE}
_MIXED: dict[str, Any] = {**_DECODE, "ragged": True, "q_lengths": (*(1,) * 7, 512)}
_FRESH: dict[str, Any] = {"sequences": 8, "kv_length": 2048, **_DECODE, "q_lengths": (2048,)}
_SMALL: dict[str, Any] = {"sequences": 3, "kv_length": 100, "heads": 4, "kv_heads": 2, "head_dim": 16}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A call to measure.

    Attributes:
      goal: a share of the copy's bandwidth, or None.
      lengths: those of the sequences instead of the case's.
    """

    op: str
    case: ServingCase
    goal: float | None = None
    lengths: tuple[int, ...] | None = None

    def arguments(self) -> Arguments:
        positional, keywords = self.case.arguments()
        if self.lengths is not None:  # of ops whose arguments are the query, pages, the table and lengths
            positional = (*positional[:-1], jnp.asarray(self.lengths, jnp.int32))
        return positional, keywords


def latents_of_lengths(lengths: Sequence[int], **fields: Any) -> Cell:
    case = MlaCase("", sequences=len(lengths), kv_length=max(lengths), page_size=64, **_LATENT | fields)
    return Cell("mla_decode", case, lengths=tuple(lengths))


def normal_lengths(mean: int) -> list[int]:
    """Lengths of 128 sequences, distributed as in FlashMLA's tests: with a standard deviation of half the mean."""
    drawn = np.random.default_rng(0).normal(mean, mean / 2, 128)
    return np.maximum(drawn.astype(int), 1).tolist()


CELLS: dict[str, Cell] = {
    "64x8192_page16": Cell("page_attention", PageCase("", **_BATCH_64), 1.0),
    "64x8192_page64": Cell("page_attention", PageCase("", **_BATCH_64, page_size=64), 1.0),
    "64x8192_page1": Cell("page_attention", PageCase("", **_BATCH_64, page_size=1)),
    "64x8192_page256": Cell("page_attention", PageCase("", **_BATCH_64, page_size=256)),
    "8x32768": Cell("page_attention", PageCase("", sequences=8, kv_length=32768, **_DECODE), 0.95),
    "1x131072": Cell("page_attention", PageCase("", sequences=1, kv_length=131072, **_DECODE), 0.9),
    "256x1024": Cell("page_attention", PageCase("", sequences=256, kv_length=1024, **_DECODE), 0.97),
    "64x8192_int8": Cell("page_attention", PageCase("", **_BATCH_64, kv_dtype="int8", scale="token")),
    "64x8192_int8_page64": Cell(
        "page_attention", PageCase("", **_BATCH_64, kv_dtype="int8", scale="token", page_size=64)
    ),
    "64x8192_int8_head": Cell("page_attention", PageCase("", **_BATCH_64, kv_dtype="int8", scale="head")),
    "64x8192_int8_head_page64": Cell(
        "page_attention", PageCase("", **_BATCH_64, kv_dtype="int8", scale="head", page_size=64)
    ),
    "64x8192_fp8": Cell("page_attention", PageCase("", **_BATCH_64, kv_dtype="float8_e4m3fn", scale="head")),
    "64x8192_fp8_page64": Cell(
        "page_attention", PageCase("", **_BATCH_64, kv_dtype="float8_e4m3fn", scale="head", page_size=64)
    ),
    "mla_64x8192": Cell("mla_decode", MlaCase("", sequences=64, kv_length=8192, page_size=64, **_LATENT)),
    "mla_64x8192_16_heads": Cell(
        "mla_decode", MlaCase("", sequences=64, kv_length=8192, page_size=64, **_LATENT | {"heads": 16})
    ),
    "16x8192_d256": Cell(
        "page_attention",
        PageCase("", sequences=16, kv_length=8192, **_DECODE | {"heads": 16, "head_dim": 256}),
        0.95,
    ),
    "8x700": Cell("page_attention", PageCase("", sequences=8, kv_length=700, **_DECODE)),
    "1x2000": Cell("page_attention", PageCase("", sequences=1, kv_length=2000, **_DECODE)),
    "128x500": Cell("page_attention", PageCase("", sequences=128, kv_length=500, **_DECODE)),
    "mla_mixed_64": Cell(
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", sequences=64, kv_length=8192, page_size=64, **_LATENT | {"q_lengths": (1,) * 7 + (512,)}),
    ),
    "mla_chunk_2048_over_8k": Cell(
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", sequences=1, kv_length=8192, page_size=64, **_LATENT | {"q_lengths": (2048,)}),
    ),
    **{f"mla_128x{mean}": latents_of_lengths(normal_lengths(mean)) for mean in (1022, 2142, 8128)},
    "mla_128x2142_16_heads": latents_of_lengths(normal_lengths(2142), heads=16),
    "mla_17_rows": latents_of_lengths(np.linspace(1000, 30000, 17).astype(int).tolist()),
    "mixed_64": Cell("ragged_page_attention", RaggedPageCase("", sequences=64, kv_length=8192, **_MIXED)),
    "mixed_64_page64": Cell(
        "ragged_page_attention", RaggedPageCase("", sequences=64, kv_length=8192, page_size=64, **_MIXED)
    ),
    "fresh_8x2048": Cell("ragged_page_attention", RaggedPageCase("", **_FRESH)),
    "fresh_8x2048_page64": Cell("ragged_page_attention", RaggedPageCase("", **_FRESH, page_size=64)),
    "fresh_8x2048_28_heads": Cell("ragged_page_attention", RaggedPageCase("", **_FRESH | {"heads": 28, "kv_heads": 4})),
    "fresh_8x2048_d64": Cell("ragged_page_attention", RaggedPageCase("", **_FRESH | {"head_dim": 64})),
    "drafts_64x16": Cell("ragged_page_attention", RaggedPageCase("", **_BATCH_64, q_lengths=(16,), tree=True)),
    "drafts_64x16_causal": Cell("ragged_page_attention", RaggedPageCase("", **_BATCH_64, q_lengths=(16,))),
    "drafts_64x64": Cell("ragged_page_attention", RaggedPageCase("", **_BATCH_64, q_lengths=(64,), tree=True)),
    "chunks_8x512_over_8k": Cell(
        "ragged_page_attention", RaggedPageCase("", **_FRESH | {"kv_length": 8192, "q_lengths": (512,)})
    ),
}
SMOKE: dict[str, Cell] = {
    "smoke_decode": Cell("page_attention", PageCase("", **_SMALL)),
    "smoke_mixed": Cell("ragged_page_attention", RaggedPageCase("", **_SMALL, q_lengths=(1, 9))),
    "smoke_drafts": Cell("ragged_page_attention", RaggedPageCase("", **_SMALL, q_lengths=(9,), tree=True)),
    "smoke_lengths": Cell("mla_decode", MlaCase("", **_SMALL | {"kv_heads": 1, "value_dim": 8}), lengths=(1, 100, 37)),
    "smoke_latent": Cell("mla_decode", MlaCase("", **_SMALL | {"kv_heads": 1, "value_dim": 8})),
    "smoke_latent_mixed": Cell(
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **_SMALL | {"kv_heads": 1, "value_dim": 8}, q_lengths=(1, 9)),
    ),
}
"""Small enough for a CPU: whether everything runs, not how fast."""

COPY_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True)
class Work:
    """A case's arrays, and what its values make a call read, write and compute at least."""

    cell: Cell
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    inputs: PagedInputs
    bytes: float
    flops: float

    @classmethod
    def of(cls, cell: Cell) -> "Work":
        positional, keywords = cell.arguments()
        op = kernel(cell.op)
        inputs = op.completed(op.prepare(*positional, **keywords))
        return cls(cell, positional, keywords, inputs, *least_work(inputs))


def least_work(inputs: PagedInputs) -> tuple[float, float]:
    """Bytes, each key and value that is seen counted once, and FLOPs of the scores that are seen."""
    lengths = np.asarray(inputs.kv_lengths).astype(np.int64)
    counts = np.full(lengths.shape, inputs.q_length or 0)
    if inputs.cum_q_lens is not None:
        counts = np.diff(np.asarray(inputs.cum_q_lens))
    # Causal or trees, without a window, as all cells are.
    among_new = (counts * (counts + 1) // 2).sum()
    if inputs.tree_mask is not None:
        among_new = np.bitwise_count(np.asarray(inputs.tree_mask)).astype(np.int64).sum()
    scores = (counts * (lengths - counts)).sum() + among_new
    rows = inputs.tokens * inputs.heads * (inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize
    read = lengths[counts > 0].sum() * inputs.kv_bytes
    return float(read + rows), 2.0 * float(scores) * inputs.heads * (inputs.head_dim + inputs.value_dim)


def ours(work: Work, platform: str) -> Callable[..., Any]:
    op = kernel(work.cell.op)
    return lambda *args, **kwargs: op(*args, **kwargs, platform=platform)


def candidate(work: Work, backend: str, params: Any) -> Callable[..., Any]:
    op = kernel(work.cell.op)
    return lambda *args, **kwargs: op(*args, **kwargs, cfg=Choice(backend, params))


_IMPORTING = threading.Lock()
"""Its modules import each other, which several threads at a time must not begin."""


def _ejkernel(name: str) -> Any:
    with _IMPORTING:
        return importlib.import_module(f"ejkernel.kernels._triton.{name}._interface")


def ejkernel_pages(work: Work) -> Call:
    """Its page attention, which wants the heads before the rows of a page."""
    module = _ejkernel("page_attention")
    query, key, value, table, lengths = work.positional
    moved = tuple(jnp.asarray(jnp.swapaxes(pages, 1, 2)) for pages in (key, value))

    def call(query: Any, key: Any, value: Any, lengths: Any, table: Any) -> Any:
        return module.page_attention(
            query, key, value, lengths, table, work.inputs.softmax_scale, table.shape[1] * key.shape[2]
        )

    return Call(jax.jit(call), (query, *moved, lengths, table))


def ejkernel_unified(work: Work) -> Call:
    module = _ejkernel("unified_attention")
    inputs = work.inputs
    cum = inputs.cum_q_lens
    if cum is None:
        cum = jnp.arange(inputs.sequences + 1, dtype=jnp.int32)

    def call(*arrays: Any) -> Any:
        return module.unified_attention(*arrays, softmax_scale=inputs.softmax_scale)

    return Call(jax.jit(call), (inputs.query, inputs.key, inputs.value, inputs.kv_lengths, inputs.page_table, cum))


def cudnn_dense(work: Work) -> Call:
    """JAX's call of cuDNN on the same tokens side by side: what no table costs."""
    inputs = work.inputs

    def dense(pages: jax.Array) -> jax.Array:
        return pages[inputs.page_table].reshape(inputs.sequences, -1, *pages.shape[2:])

    key, value = (jax.jit(dense)(pages) for pages in (inputs.key, inputs.value))

    def call(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        out = jax.nn.dot_product_attention(
            query[:, None], key, value, key_value_seq_lengths=lengths,
            query_seq_lengths=jnp.ones_like(lengths), implementation="cudnn",
        )  # fmt: skip
        return out[:, 0]

    return Call(jax.jit(call), (inputs.query, key, value, inputs.kv_lengths))


def contenders(work: Work, names: Sequence[str]) -> dict[str, Callable[[], Call]]:
    """How to make the call of every implementation that has a place for the case."""
    found: dict[str, Callable[[], Call]] = {}
    # Pallas serves only latents and packed queries, CUDA C++ only the latter.
    packed = work.inputs.cum_q_lens is not None and work.inputs.value is not None
    in_pallas = packed or work.inputs.value is None
    for platform in (*(("cuda",) if packed else ()), *(("pallas",) if in_pallas else ()), "triton", "xla"):
        call = functools.partial(ours(work, platform), **work.keywords)
        found[f"tilewright {platform}"] = lambda call=call: Call(jax.jit(call), work.positional)  # type: ignore[misc]
    plain = work.cell.case.kv_dtype is None and work.inputs.value is not None and work.inputs.tree_mask is None
    if plain and importlib.util.find_spec("ejkernel"):
        if work.cell.op == "page_attention":
            found["ejkernel page_attention"] = lambda: ejkernel_pages(work)
        found["ejkernel unified_attention"] = lambda: ejkernel_unified(work)
    if plain and work.cell.op == "page_attention":
        found["cudnn, dense"] = lambda: cudnn_dense(work)
    return {name: make for name, make in found.items() if not names or name in names}


def yardsticks(work: Work) -> dict[str, tuple[Call, float]]:
    """What does the FLOPs of packed queries, reads their bytes, or does both, and nothing else; with its FLOPs."""
    if work.inputs.cum_q_lens is None:
        return {}
    try:
        data = data_for(work.bytes, jax.random.key(0))
    except UnsupportedError:
        return {}
    found = {}
    for name, flops, size in (
        ("products and bytes", work.flops, work.bytes), ("products", work.flops, 0.0), ("bytes", 0.0, work.bytes)
    ):  # fmt: skip
        function = jax.jit(functools.partial(products_and_bytes, flops=flops, size=size))
        found[name] = compiled(lambda function=function: Call(function, (data,))), flops  # type: ignore[misc]
    return found


def compiled(make: Callable[[], Call]) -> Call:
    """The call with its program compiled, which any thread may do: no program runs meanwhile."""
    call = make()
    return dataclasses.replace(call, function=call.function.lower(*call.args).compile())  # type: ignore[attr-defined]


class Oracle:
    """What the first and the last tokens must give."""

    def __init__(self, inputs: PagedInputs) -> None:
        tokens = inputs.query.shape[0]
        self.places = sorted({0, tokens // 2, tokens - 1})
        self.exact, self.low = (self._results(inputs, dtype) for dtype in ("float32", inputs.query.dtype.name))

    def _results(self, inputs: PagedInputs, dtype: str) -> jax.Array:
        @jax.jit
        def some(inputs: PagedInputs) -> jax.Array:
            with jax.default_matmul_precision("highest" if dtype == "float32" else None):
                one = lambda token: token_reference(inputs, jnp.dtype(dtype), token)[0]  # noqa: E731
                return jax.lax.map(one, jnp.asarray(self.places))

        return some(inputs)

    def violations(self, out: Any) -> list[str]:
        said = [] if bool(jnp.isfinite(out).all()) else ["not finite everywhere"]
        heads = self.exact.shape[1:]
        got = jnp.asarray(out).reshape(-1, *heads)[jnp.asarray(self.places)]
        return said + violations(got, self.exact, self.low)


def copy_bandwidth(method: Method, size: int) -> dict[str, Any]:
    """Bytes per second, read and written, of the fastest copy on the device: by the driver, or by a kernel of XLA's."""
    source = jnp.zeros(size // 2, jnp.bfloat16)
    # The addend is unknown when it is compiled, so that it stays a copy by a kernel.
    by_kernel = Call(jax.jit(lambda x, y: x + y), (source, jnp.zeros((), jnp.bfloat16)))
    # No kernel: CUPTI's timer does not see it. Many in a row, for the host's clock has to.
    by_driver = Call(jax.jit(jnp.copy), (source,))
    found = {
        "kernel": rates(0.0, measure({"": by_kernel}, method)[""]),
        "driver": rates(0.0, measure({"": by_driver}, dataclasses.replace(method, device_time="wall", calls=40))[""]),
    }
    speeds = {name: 2 * size / timed["median_ms"] * 1e3 for name, timed in found.items()}
    return {"bytes": 2 * size, "by": found, "bytes_per_s": max(speeds.values()), "bytes_per_s_by": speeds}


def run_cell(name: str, cell: Cell, method: Method, copy: float, names: Sequence[str], sweep: bool) -> dict[str, Any]:
    """One record: every implementation's rates, or why it has none."""
    work = Work.of(cell)
    oracle, calls, said = Oracle(work.inputs), {}, dict[str, Any]()
    makers = sweep_of(work) if sweep else contenders(work, names)
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        pending = {contender: pool.submit(compiled, make) for contender, make in makers.items()}
    for contender, compilation in pending.items():
        try:
            start = time.perf_counter()
            call = compilation.result()
            wrong = oracle.violations(call.function(*call.args))
            said[contender] = {"first_run_s": time.perf_counter() - start}
            if wrong:
                said[contender] |= {"status": "wrong", "violations": wrong}
            else:
                calls[contender] = call
        except Exception as error:  # the failure of one is a result, whatever it is; the others are still measured
            said[contender] = failure(error)
    limits = {} if sweep else yardsticks(work)
    samples = measure(calls | {name: call for name, (call, _) in limits.items()}, method)
    for contender in calls:
        found = rates(work.flops, samples[contender])
        if "median_ms" in found:
            found["bytes_per_s"] = work.bytes / found["median_ms"] * 1e3
            found["of_copy"] = found["bytes_per_s"] / copy
        said[contender] |= found
    return {
        "case": name,
        "op": cell.op,
        "sizes": {f.name: getattr(cell.case, f.name) for f in dataclasses.fields(cell.case)},
        "lengths": cell.lengths,
        "bytes": work.bytes,
        "flops": work.flops,
        "goal": cell.goal,
        "implementations": said,
        "yardsticks": {name: rates(flops, samples[name]) for name, (_, flops) in limits.items()},
    }


def sweep_of(work: Work) -> dict[str, Callable[[], Call]]:
    """Every candidate of the backends on a GPU that serve the case, each one's heuristic first."""
    from tilewright.kernels.paged_attention.cuda.packed import CudaPackedAttention
    from tilewright.kernels.paged_attention.hopper.latent_backend import PallasGpuPagedAttention
    from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention
    from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention

    device, inputs = current_device(), work.inputs
    backends = (TritonPagedAttention(), PallasGpuPagedAttention(), PallasGpuPackedAttention(), CudaPackedAttention())
    every = {
        (backend.name, params): None
        for backend in backends
        if not backend.not_supported_reasons(inputs, device, "forward")
        for params in (backend.heuristic(inputs, device, "forward"), *backend.candidates(inputs, device, "forward"))
    }
    return {
        str(params): lambda backend=backend, params=params: Call(  # type: ignore[misc]
            jax.jit(functools.partial(candidate(work, backend, params), **work.keywords)), work.positional
        )
        for backend, params in every
    }


def lines(cell: Mapping[str, Any], most: int) -> list[str]:
    """What a cell says, the fastest first."""
    found = sorted(cell["implementations"].items(), key=lambda item: item[1].get("median_ms", float("inf")))
    said = []
    for name, each in found[:most]:
        if "median_ms" not in each:
            why = each.get("message") or each.get("violations") or each
            said.append(f"{cell['case']:22} {name:28} {str(why)[:150]}")
            continue
        goal = "" if cell["goal"] is None else f" (goal {cell['goal']:.2f})"
        said.append(
            f"{cell['case']:22} {name:28} {each['median_ms'] * 1e3:9.1f} us {each['bytes_per_s'] / 1e12:6.3f} TB/s "
            f"{each['of_copy']:5.2f} of a copy{goal} {each['tflops']:6.1f} TFLOP/s"
        )
    for name, each in cell["yardsticks"].items():
        said.append(f"{cell['case']:22} only {name:23} {each.get('median_ms', float('nan')) * 1e3:9.1f} us")
    return said


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    every = CELLS | SMOKE
    parser.add_argument("--cases", default=",".join(CELLS), help="of " + ", ".join(every))
    parser.add_argument("--peers", default="", help="names, separated by commas; all by default")
    parser.add_argument("--sweep", action="store_true", help="measure every candidate of the Triton backend")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--device-time", choices=("cupti", "wall"), help="cupti on a GPU by default")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this many seconds")
    parser.add_argument("--name", help="of the record; serving, or with --sweep serving_sweep, by default")
    given = parser.parse_args(argv)
    clock = given.device_time or ("cupti" if jax.default_backend() == "gpu" else "wall")
    method = Method(given.rounds, given.calls, clock, jobs=1)
    copy = copy_bandwidth(method, given.copy_bytes)
    speeds = ", ".join(f"by the {by} {rate / 1e12:.3f}" for by, rate in copy["bytes_per_s_by"].items())
    print(f"copy, TB/s: {speeds}", flush=True)
    end, cells = time.monotonic() + given.seconds, list[dict[str, Any]]()
    names = [name for name in given.peers.split(",") if name]
    for name in given.cases.split(","):
        if time.monotonic() > end:
            print(f"{name}: not started, the time is over", flush=True)
            continue
        try:
            cells.append(run_cell(name, every[name], method, copy["bytes_per_s"], names, given.sweep))
            print("\n".join(lines(cells[-1], 8)), flush=True)
        except Exception as error:  # one case that does not fit must not take the others along
            cells.append({"case": name, "goal": None, "implementations": {}, **failure(error)})
            print(f"{name}: {cells[-1]['message'][:300]}", flush=True)
        gc.collect()
        data = {"method": dataclasses.asdict(method), "versions": versions(), "driver": driver(), "copy": copy}
        record(given.name or ("serving_sweep" if given.sweep else "serving"), {**data, "cells": cells})


if __name__ == "__main__":
    main()
