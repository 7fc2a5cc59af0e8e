"""The norms on an accelerator: microseconds of device time beside a copy, XLA, PyTorch, Liger and QuACK.

Times are those of a call's kernels as CUPTI reports them, whoever started them, each call after as much memory was
written as the L2 cache cannot hold. Results are compared with the float32 oracle before anything is timed; a wrong one
is recorded as wrong. For our kernels the heuristic is measured and, with ``--sweep``, the candidates most like it. A
round is one session of the profiler in which all contenders take turns. ``python -m benchmarks.norms``
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record, usable_cores
from tilewright.kernels.norms.cases import LAYER_CASES, RMS_CASES, NormCase
from tilewright.kernels.norms.inputs import NormInputs, NormResults
from tilewright.kernels.norms.op import norm_reference
from tilewright.kernels.norms.triton.backend import TritonNorm
from tilewright.kernels.norms.xla import XlaNorm
from tilewright.kernels.triton import recorded_launches
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.tuning.timing import kernels
from tilewright.ops.types import Device
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device

OURS = "tilewright"
DIRECTIONS = ("forward", "residual", "backward", "residual_backward")
FLUSHED_BYTES = 256 << 20
CASES: dict[str, NormCase] = {
    prefix + name: dataclasses.replace(case, name=prefix + name)
    for prefix, cases in (("", RMS_CASES), ("layer_", LAYER_CASES))
    for name, case in cases.by_device["gpu"].items()
}

type Results = dict[str, jax.Array]
type Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A case in a direction, with its arrays: those of the cotangents beside the inputs."""

    case: NormCase
    direction: str
    inputs: NormInputs
    d_out: jax.Array
    d_total: jax.Array | None

    @classmethod
    def of(cls, case: NormCase, direction: str) -> "Work":
        """Drawn on the device."""
        case = dataclasses.replace(case, residual=direction.startswith("residual"))
        structs, tree = jax.tree.flatten((case.structs, case.structs.x, case.structs.residual))

        @jax.jit
        def draw(key: jax.Array) -> list[jax.Array]:
            keys = jax.random.split(key, len(structs))
            return [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, structs, strict=True)]

        return cls(case, direction, *jax.tree.unflatten(tree, draw(jax.random.key(0))))

    @property
    def is_backward(self) -> bool:
        return self.direction.endswith("backward")

    @property
    def bytes(self) -> int:
        """Read and written by one pass over the rows; weights and their gradients once."""
        tall = {"forward": 2, "residual": 4, "backward": 3, "residual_backward": 4}[self.direction]
        vectors = jax.tree.leaves((self.inputs.weight, self.inputs.bias))
        return tall * self.inputs.x.nbytes + (2 if self.is_backward else 1) * sum(x.nbytes for x in vectors)

    @property
    def normed(self) -> jax.Array:
        """What the backward pass reads of the rows: it stands for x + residual."""
        return self.inputs.x


def wanted(work: Work) -> Results:
    """The oracle's results in float32."""
    inputs = dataclasses.replace(work.inputs, residual=None) if work.is_backward else work.inputs

    def forward(inputs: NormInputs) -> tuple[jax.Array, jax.Array]:
        if inputs.residual is not None:  # what is normed is rounded
            total = (inputs.x.astype(jnp.float32) + inputs.residual.astype(jnp.float32)).astype(inputs.x.dtype)
            inputs = dataclasses.replace(inputs, x=total, residual=None)
        return norm_reference(inputs, jnp.float32)

    @jax.jit
    def run(inputs: NormInputs, d_out: jax.Array, d_total: jax.Array | None) -> Results:
        if not work.is_backward:
            out, total = forward(inputs)
            return {"out": out} | ({} if inputs.residual is None else {"total": total})
        wide: NormInputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
        _, pull_back = jax.vjp(forward, wide)
        also = jnp.zeros_like(wide.x) if d_total is None else d_total.astype(jnp.float32)
        (found,) = pull_back((d_out.astype(jnp.float32), also))
        return {name: x for name in ("x", "weight", "bias") if (x := getattr(found, name)) is not None}

    return run(inputs, work.d_out, work.d_total)


def plain(inputs: NormInputs) -> Any:
    """What a JAX user writes."""
    total = inputs.x if inputs.residual is None else inputs.x + inputs.residual
    x = total.astype(jnp.float32)
    if inputs.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + inputs.eps)
    out = x if inputs.weight is None else x * inputs.weight.astype(jnp.float32)
    if inputs.bias is not None:
        out = out + inputs.bias.astype(jnp.float32)
    return out.astype(total.dtype), total


def _named(found: Any, residual: bool) -> Results:
    return {"out": found[0], "total": found[1]} if residual else {"out": found[0]}


def _gradients(found: NormInputs) -> Results:
    return {name: x for name in ("x", "weight", "bias") if (x := getattr(found, name)) is not None}


def by_xla(work: Work) -> dict[str, Run]:
    """Forward; and backward from the inputs, which lets XLA fuse what it recomputes, and from JAX's own residuals."""
    residual = work.inputs.residual is not None
    if not work.is_backward:
        run = jax.jit(lambda inputs: _named(plain(inputs), residual))
        return {"xla": functools.partial(run, work.inputs)}
    inputs = dataclasses.replace(work.inputs, residual=None)
    cotangents = (work.d_out, jnp.zeros_like(work.d_out) if work.d_total is None else work.d_total)

    @jax.jit
    def recomputing(inputs: NormInputs, d_out: Any, d_total: Any) -> Results:
        _, pull_back = jax.vjp(lambda inputs: plain(inputs)[: 1 if d_total is None else 2], inputs)
        return _gradients(pull_back((d_out,) if d_total is None else (d_out, d_total))[0])

    _, pull_back = jax.jit(lambda inputs: jax.vjp(lambda x: plain(x)[: 2 if residual else 1], inputs))(inputs)
    kept = jax.jit(lambda pull_back, cotangents: _gradients(pull_back(cotangents)[0]))
    return {
        "xla": functools.partial(recomputing, inputs, work.d_out, work.d_total),
        "xla, residuals": functools.partial(kept, pull_back, cotangents if residual else cotangents[:1]),
    }


def ours(work: Work, backend: Any, params: Any) -> Run:
    """One of our backends with given params."""
    if not work.is_backward:

        def forward(inputs: NormInputs) -> Results:
            found = backend.forward(inputs, params)
            return _named((found.out, found.total), inputs.residual is not None)

        return functools.partial(jax.jit(forward), work.inputs)

    def backward(inputs: NormInputs, total: Any, d_out: Any, d_total: Any) -> Results:
        found = backend.backward(inputs, NormResults(d_out, total), NormResults(d_out, d_total), params)
        return {name: x for name, x in found.items() if name != "residual"}

    total = work.normed if work.inputs.residual is not None else None
    return functools.partial(jax.jit(backward), work.inputs, total, work.d_out, work.d_total)


def every_params(case: NormCase, direction: str, device: Device) -> list[Any]:
    """The heuristic's params, then all candidates."""
    case = dataclasses.replace(case, residual=direction.startswith("residual"))
    backend, problem = TritonNorm(), case.structs
    way: Any = "backward" if direction.endswith("backward") else "forward"
    made = [backend.heuristic(problem, device, way), *backend.candidates(problem, device, way)]
    return [params for params in made if not backend.config_reasons(problem, device, way, params)]


def compile_launches(function: Callable[..., Any], structs: Sequence[Any], device: Device) -> int:
    """Has Triton compile what a function launches into its cache on disk; in a process without a device."""
    from tilewright.kernels.triton.compiler import compiled

    with recorded_launches() as launches:
        jax.eval_shape(function, *structs)
    for each in launches:
        compiled(each, device.capability or (9, 0))
    return len(launches)


def compile_in_processes(compile_one: Callable[..., int], jobs: Sequence[Sequence[Any]]) -> None:
    """Calls a function for each tuple of arguments; it returns how many kernels it has compiled."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(max(usable_cores() - 1, 1), mp_context=context) as pool:
            print(f"compiled {sum(pool.map(compile_one, *zip(*jobs, strict=True)))} kernels", flush=True)
    finally:
        os.environ.pop("JAX_PLATFORMS") if before is None else os.environ.update(JAX_PLATFORMS=before)


def compile_ahead(case: NormCase, direction: str, device: Device, every: Sequence[Any]) -> int:
    """Compiles the kernels of a direction of a case."""
    case = dataclasses.replace(case, residual=direction.startswith("residual"))
    inputs, backend, count = case.structs, TritonNorm(), 0
    results = NormResults(inputs.x, inputs.residual)
    for params in every:
        if direction.endswith("backward"):
            count += compile_launches(lambda i, r: backend.backward(i, r, r, params), (inputs, results), device)  # noqa: B023
        else:
            count += compile_launches(lambda i: backend.forward(i, params), (inputs,), device)  # noqa: B023
    return count


def compile_all(chosen: Mapping[tuple[str, str], Sequence[Any]], device: Device) -> None:
    """The same for all cases, in processes."""
    jobs = [
        (CASES[name], direction, device, part)
        for (name, direction), every in chosen.items()
        for part in itertools.batched(every, 6)
    ]
    compile_in_processes(compile_ahead, jobs)


def by_torch(work: Work) -> dict[str, Run]:
    """PyTorch's own kernels and Liger's, where they are installed, on the same memory."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch = importlib.import_module("torch")
    inputs = work.inputs
    x, d_out = torch.from_dlpack(work.inputs.x), torch.from_dlpack(work.d_out)
    weight, columns, eps = torch.from_dlpack(inputs.weight), work.case.columns, work.case.eps
    bias = None if inputs.bias is None else torch.from_dlpack(inputs.bias)
    layer, residual = inputs.kind == "layer", inputs.residual is not None
    found: dict[str, Run] = {}

    def native() -> Run:
        if layer:
            call = lambda x, w, b: torch.nn.functional.layer_norm(x, (columns,), w, b, eps)  # noqa: E731
        else:
            call = lambda x, w, b: torch.nn.functional.rms_norm(x, (columns,), w, eps)  # noqa: E731
        if not work.is_backward:
            return lambda: {"out": call(x, weight, bias)}
        leaves = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        out = call(leaves["x"], leaves["weight"], leaves.get("bias"))
        return lambda: dict(
            zip(leaves, torch.autograd.grad(out, list(leaves.values()), d_out, retain_graph=True), strict=True)
        )

    if not residual:
        found["torch"] = native()
    if importlib.util.find_spec("liger_kernel"):
        liger = _liger_layer if layer else _liger_fused if residual else _liger
        if not (layer and residual):
            found["liger"] = liger(work, torch, x, weight, bias, d_out)
    if importlib.util.find_spec("quack") and not layer:
        found["quack"] = _quack(work, torch, x, weight, d_out)
    return found


def _liger(work: Work, torch: Any, x: Any, weight: Any, bias: Any, d_out: Any) -> Run:
    module = importlib.import_module("liger_kernel.ops.rms_norm")
    eps = work.case.eps

    def forward() -> Any:
        return module.rms_norm_forward(x, weight, eps, 0.0, "gemma", None)

    if not work.is_backward:
        return lambda: {"out": forward()[0]}
    _, _, rstd, block, warps, mode = forward()

    def backward() -> Any:  # in place, as its autograd function does by default: what it overwrites is a copy
        return module.rms_norm_backward(copy, x, weight, rstd, 0.0, mode, block, warps, True, None)

    copy = d_out.clone()
    return lambda: dict(zip(("x", "weight"), backward(), strict=True))


def _liger_fused(work: Work, torch: Any, x: Any, weight: Any, bias: Any, d_out: Any) -> Run:
    module = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
    residual, eps = torch.from_dlpack(work.inputs.residual), work.case.eps

    def forward() -> Any:
        return module.fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "gemma")

    if not work.is_backward:
        return lambda: dict(zip(("out", "total"), forward()[:2], strict=True))
    zero = torch.zeros_like(residual)
    _, _, rstd, block, warps, stages, mode = module.fused_add_rms_norm_forward(x, zero, weight, eps, 0.0, "gemma")
    copy, d_total = d_out.clone(), torch.from_dlpack(work.d_total)

    def backward() -> Any:
        found = module.fused_add_rms_norm_backward(
            copy, d_total, x, weight, rstd, 0.0, mode, block, warps, stages, True
        )
        return {"x": found[0], "weight": found[-1]}

    return backward


def _liger_layer(work: Work, torch: Any, x: Any, weight: Any, bias: Any, d_out: Any) -> Run:
    module = importlib.import_module("liger_kernel.ops.layer_norm")
    if not work.is_backward:
        return lambda: {"out": module.layer_norm_forward(x, weight, bias, work.case.eps)[0]}
    _, _, mean, rstd, _, _ = module.layer_norm_forward(x, weight, bias, work.case.eps)
    return lambda: dict(
        zip(("x", "weight", "bias"), module.layer_norm_backward(d_out, x, weight, bias, mean, rstd), strict=True)
    )


def _quack(work: Work, torch: Any, x: Any, weight: Any, d_out: Any) -> Run:
    module, eps = importlib.import_module("quack.rmsnorm"), work.case.eps
    residual = None if work.inputs.residual is None else torch.from_dlpack(work.inputs.residual)
    if not work.is_backward:

        def forward() -> Results:
            found = module.rmsnorm_fwd(x, weight, residual=residual, eps=eps)
            return {"out": found[0]} | ({} if residual is None else {"total": found[1]})

        return forward
    rstd = module.rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[-1]
    d_total = None if work.d_total is None else torch.from_dlpack(work.d_total)

    def backward() -> Results:
        found = module.rmsnorm_bwd(x, weight, d_out, rstd, dresidual_out=d_total)
        return {"x": found[0], "weight": found[1]}

    return backward


def by_copy(work: Work) -> Run:
    """A kernel that reads and writes as many bytes as x: the addend is unknown when it is compiled."""
    return functools.partial(jax.jit(lambda x, y: x + y), work.inputs.x, jnp.zeros((), work.inputs.x.dtype))


type Flush = Callable[[int], jax.Array]


class Turns:
    """Calls of functions, each after the L2 cache was overwritten; JAX's profiler takes it for a jit by two methods."""

    def __init__(self, runs: Iterable[Run], size: int, flush: Flush) -> None:
        self._runs, self._size, self._flush = list(runs), size, flush

    def __call__(self) -> None:
        for run in self._runs:
            jax.block_until_ready(self._flush(self._size))
            waited_for(run())

    def trace(self) -> None:
        raise NotImplementedError

    def lower(self) -> None:
        raise NotImplementedError


@functools.partial(jax.jit, static_argnums=0)
def flush_by_writing(size: int) -> jax.Array:
    """Leaves lines in the L2 cache that the next kernel's take the place of, and that are written to memory then."""
    return jnp.ones((size,), jnp.uint8)


def flush_by_reading(size: int) -> jax.Array:
    """Leaves lines that are as they are in memory: what a kernel meets that reads weights, one layer after another."""
    return _row_sums(_rows(size))


@functools.cache
def _rows(size: int) -> jax.Array:
    # XLA sums rows of this length in one kernel, longer ones in two.
    return jnp.zeros((size >> 12, 1024), jnp.float32)


@jax.jit
def _row_sums(rows: jax.Array) -> jax.Array:
    return rows.sum(axis=1)


def waited_for(found: Any) -> Any:
    """What a call returned, when it is there."""
    if any(not isinstance(x, jax.Array) for x in jax.tree.leaves(found)):
        importlib.import_module("torch").cuda.synchronize()
    return jax.block_until_ready(found)


@functools.cache
def _flushing(size: int, flush: Flush) -> str:
    """The name of the one kernel of a flush."""
    jax.block_until_ready(flush(size))  # the first call has kernels that make what it reads
    ((name, _),) = kernels(Turns([lambda: None], size, flush), ())[0]
    return name


type Sample = list[tuple[str, float]]
"""The kernels of a call and the microseconds of each."""


def sample(runs: Sequence[Run], size: int, flush: Flush = flush_by_writing) -> list[Sample]:
    """The kernels of one call of each function, in one session if the flushes between can be told from their kernels.

    Raises:
      RuntimeError: a call started no kernel, or CUPTI cannot be used.
    """
    calls: list[Sample] = []
    flushing = _flushing(size, flush)
    for name, time_ms in kernels(Turns(runs, size, flush), ())[0]:
        # The measured function may itself have kernels of that name; the flush comes before all of them.
        if name == flushing and (len(runs) > 1 or not calls):
            calls.append([])
        else:
            calls[-1].append((name, 1e3 * time_ms))
    if len(calls) == len(runs) and all(calls):
        return calls
    if len(runs) == 1:
        raise RuntimeError(f"{len(calls)} flushes and kernels cannot be those of one call: {calls}")
    return [each for run in runs for each in _alone(run, size, flush)]


def _alone(run: Run, size: int, flush: Flush) -> list[Sample]:
    try:
        return sample([run], size, flush)
    except Exception as error:  # the failure of one is a result; the others are still measured
        return [[(f"{type(error).__name__}: {error}"[:300], float("nan"))]]


def wall_sample(runs: Sequence[Run], size: int) -> list[Sample]:
    """The same by the host's clock, where there is no profiler: whether everything runs, not how fast."""
    found: list[Sample] = []
    for run in runs:
        start = time.perf_counter()
        waited_for(run())
        found.append([("wall", 1e6 * (time.perf_counter() - start))])
    return found


def as_jax(array: Any) -> jax.Array:
    return array if isinstance(array, jax.Array) else jnp.from_dlpack(array.detach())


def wrong(found: Results, want: Results) -> list[str]:
    """What disagrees with the oracle by more than rounding it costs."""
    said = []
    for name, exact in want.items():
        if name not in found:
            continue
        got = as_jax(found[name]).reshape(exact.shape)
        rounded = exact.astype(got.dtype).astype(jnp.float32)
        said += [f"{name}: {each}" for each in violations(got, exact, rounded)]
    return said


def measure_in_turn(
    runs: Mapping[str, Run], rounds: int, size: int, take: Callable[[Sequence[Run], int], list[Sample]]
) -> dict[str, dict[str, Any]]:
    """Medians, samples and the last call's kernels of every function; every second round goes backwards."""
    found: dict[str, dict[str, Any]] = {name: {"samples_us": []} for name in runs}
    for turn in range(rounds):
        names = list(runs)[:: 1 if turn % 2 == 0 else -1]
        for name, call in zip(names, take([runs[name] for name in names], size), strict=True):
            time_us = sum(time_us for _, time_us in call)
            if math.isnan(time_us):
                found[name]["error"] = call[0][0]
                continue
            found[name]["samples_us"].append(round(time_us, 2))
            found[name]["kernels"] = ", ".join(f"{kernel[:40]} {time_us:.2f}" for kernel, time_us in call)
    for each in found.values():
        if each["samples_us"]:
            each["median_us"] = statistics.median(each["samples_us"])
    return found


def checked(runs: Mapping[str, Run], want: Results) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """The calls that compile, run, and give what they must, compiled in threads; and what is said of the others."""
    said: dict[str, dict[str, Any]] = {}
    good: dict[str, Run] = {}

    def compiled(run: Any) -> Run:
        if not isinstance(run, functools.partial) or not hasattr(run.func, "lower"):
            return run
        return functools.partial(run.func.lower(*run.args).compile(), *run.args)

    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        pending = {name: pool.submit(compiled, run) for name, run in runs.items()}
    for name, each in pending.items():
        try:
            run = each.result()
            first = waited_for(run())
            bad = [] if name == "copy" else wrong(first, want)
            if name.startswith(OURS) and not bad:
                again = waited_for(run())
                bad = [
                    f"{key}: differs between two runs" for key in first if not bool((first[key] == again[key]).all())
                ]
        except Exception as error:
            said[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        if bad:
            said[name] = {"wrong": bad}
        else:
            good[name] = run
    return good, said


def run_cell(case: NormCase, direction: str, given: argparse.Namespace, every: Sequence[Any]) -> dict[str, Any]:
    """One record: every contender's time, or why it has none; after a sweep the two fastest candidates again."""
    work, take = Work.of(case, direction), wall_sample if given.wall else sample
    want = wanted(work)
    common: dict[str, Run] = {"copy": by_copy(work), **by_xla(work)}
    params: Any = BwdParams() if work.is_backward else FwdParams()
    common[f"{OURS} xla"] = ours(work, XlaNorm(), params)
    names: dict[str, Any] = {}
    if jax.default_backend() == "gpu":
        if not given.no_peers:
            common |= _or_said(work)
        names = {f"{OURS} {each}": each for each in every}
    triton = {name: ours(work, TritonNorm(), each) for name, each in names.items()}
    good, said = checked(common | triton, want)
    first = next(iter(names), "")
    if len(names) > 1:
        quick = measure_in_turn({n: r for n, r in good.items() if n in names}, 2, given.flush, take)
        said |= {name: {"sweep_us": each.get("median_us")} for name, each in quick.items()}
        kept = {first, *sorted(quick, key=lambda n: quick[n].get("median_us", math.inf))[:2]}
        good = {n: r for n, r in good.items() if n not in names or n in kept}
    found = measure_in_turn(good, given.rounds, given.flush, take)
    for name, each in found.items():
        said[name] = said.get(name, {}) | each
    return {"case": case.name, "direction": direction, "bytes": work.bytes, "heuristic": first, "contenders": said}


def _or_said(work: Work) -> dict[str, Run]:
    try:
        return by_torch(work)
    except Exception as error:  # of a peer that cannot be prepared the rest is still measured
        print(f"peers of {work.case.name} {work.direction}: {type(error).__name__}: {error}"[:300], flush=True)
        return {}


def line(cell: Mapping[str, Any]) -> str:
    """One line: the best of ours and its params, the heuristic's time, and the others'."""
    timed = {n: each["median_us"] for n, each in cell["contenders"].items() if "median_us" in each}
    mine = sorted((time_us, n) for n, time_us in timed.items() if n.startswith(f"{OURS} Norm"))
    others = [f"{n} {time_us:.1f}" for n, time_us in timed.items() if not n.startswith(f"{OURS} Norm") and n != "copy"]
    text = f"{cell['case']:>17} {cell['direction']:17} copy {timed.get('copy', float('nan')):7.1f}"
    if mine:
        best, name = mine[0]
        heuristic = timed.get(cell["heuristic"], float("nan"))
        short = name.partition("Params")[2]
        for word, letter in (("rows_per_program", "R"), ("block_columns", "C"), ("num_programs", "P"),
                             ("num_warps", "w"), ("num_stages", "s"), ("passes=", "")):  # fmt: skip
            short = short.replace(word, letter)
        text += f" ours {best:7.1f} ({cell['bytes'] / best / 1e6:.2f} TB/s {short}) heuristic {heuristic:.1f}"
    bad = [n for n, each in cell["contenders"].items() if "wrong" in each or "error" in each]
    first_bad = f" BAD {len(bad)}: {bad[0]} {cell['contenders'][bad[0]]}"[:220] if bad else ""
    return f"{text} | {', '.join(others)}{first_bad}"


def selected(names: Iterable[str], directions: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, direction) for direction in directions for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--sweep", type=int, default=1, help="candidates of ours to measure; 1 is the heuristic alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flush", type=int, default=FLUSHED_BYTES, help="bytes written before each call; not 0")
    parser.add_argument("--no-peers", action="store_true", help="neither PyTorch nor what runs in it")
    parser.add_argument("--wall", action="store_true", help="the host's clock: whether everything runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this many seconds")
    parser.add_argument("--name", default="norms", help="of the record")
    given = parser.parse_args(argv)
    end = time.monotonic() + given.seconds
    order = selected(given.cases.split(","), given.directions.split(","))
    device = current_device()
    chosen = {key: every_params(CASES[key[0]], key[1], device)[: given.sweep] for key in order}
    if jax.default_backend() == "gpu":
        start = time.monotonic()
        compile_all(chosen, device)
        print(f"compiling took {time.monotonic() - start:.0f} s", flush=True)
    cells: list[dict[str, Any]] = []
    for key in order:
        if time.monotonic() > end:
            print(f"{key}: not started, the time is over", flush=True)
            continue
        try:
            cells.append(run_cell(CASES[key[0]], key[1], given, chosen[key]))
            print(line(cells[-1]), flush=True)
        except Exception as error:  # one case that does not fit must not take the others along
            print(f"{key}: {type(error).__name__}: {error}"[:300], flush=True)
        gc.collect()
        record(given.name, {"flushed_bytes": given.flush, "rounds": given.rounds, "cells": cells})


if __name__ == "__main__":
    main()
