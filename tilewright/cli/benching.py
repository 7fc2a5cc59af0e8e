"""The work of ``tilewright bench``, after its arguments are read."""

import dataclasses
import functools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import typer
from rich.text import Text

from tilewright import __version__
from tilewright.cli.device import here
from tilewright.cli.files import check_new_file, writing
from tilewright.cli.mistakes import first_line, user_code, user_mistakes
from tilewright.cli.options import CallOptions
from tilewright.cli.output import Failure, Interrupted, counted, stderr, stdout
from tilewright.cli.targets import NamedCall, find_op, flat_call, is_function, named_calls, op_cases
from tilewright.errors import TilewrightError, UnsupportedError
from tilewright.kernels import function, kernel
from tilewright.kernels.op.cases import Peer
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops.kernel.arrays import random_array, split
from tilewright.ops.kernel.candidates import Timing
from tilewright.ops.kernel.prepared import prepare, prepared
from tilewright.ops.tuning.progress import is_interactive
from tilewright.ops.tuning.timing import time_interleaved
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.text import milliseconds, table

WARMUP = 2

OURS = "tilewright "
"""The first word of the name of each backend."""

PLAIN = "plain jax.numpy"
"""The name of the formula that stands for an op's peers where it has none that can run a case."""

FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, TilewrightError)
"""Exceptions of compiling or running one implementation after which the others are still measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One implementation's times on one case.

    Attributes:
      stage: "forward" or "forward+backward".
      timing: ``None`` if it cannot run the case, or failed; ``remark`` has the reason.
      flops: FLOPs of the case's matmuls, of both directions if both ran; ``None`` if unknown.
      failed: True if it should have run and did not.
    """

    case: str
    stage: str
    implementation: str
    timing: Timing | None
    flops: float | None
    remark: str = ""
    failed: bool = False

    @property
    def time_ms(self) -> float | None:
        return None if self.timing is None else self.timing.median_ms


def bench_and_report(target: str, options: CallOptions, *, iters: int, json_file: Path | None) -> None:
    """Measures, prints the table, writes the file.

    Raises:
      Failure: an implementation failed that should have run; raised after everything else was measured and shown.
      Interrupted: by Ctrl-C, after the measurements so far were shown and written.
    """
    check_new_file(json_file, "--json")
    here()
    found: list[Measurement] = []
    interrupted = False
    try:
        with stderr().status("") as status:
            if not is_interactive(sys.stderr):
                status.stop()
            for description, measured in _measurements(target, options, iters):
                status.update(Text(description))
                found += measured()
    except KeyboardInterrupt:
        interrupted = True
    if found:
        stdout().print(measurements_table(target, found))
    if json_file is not None and found:
        with writing(json_file, "--json"):
            json_file.write_text(json.dumps(as_json(target, found), indent=1) + "\n")
        typer.echo(f"written to {json_file}")
    if interrupted:
        written = f" and written to {json_file}" if json_file is not None and found else ""
        shown = f"the {counted(len(found), 'measurement')} so far {'is' if len(found) == 1 else 'are'} shown{written}"
        raise Interrupted(f"interrupted; {shown if found else 'nothing was measured to its end'}")
    failed = [m for m in found if m.failed]
    if failed:
        raise Failure(f"{failed[0].implementation} failed on {failed[0].case}: {failed[0].remark}")


def _measurements(
    target: str, options: CallOptions, iters: int
) -> Iterator[tuple[str, Callable[[], list[Measurement]]]]:
    """The measurements to make, each as a description and a function."""
    if is_function(target):
        for call in named_calls(target, options):
            yield call.name, functools.partial(measure_function, call, iters=iters)
        return
    op = find_op(target)
    for case in op_cases(target, options):
        for backward in (False, True) if options.backward and op.differentiable else (False,):
            description = f"{target} {case.name}" + (" with gradients" if backward else "")
            yield description, functools.partial(measure, target, case, backward=backward, iters=iters)


def measure_function(call: NamedCall, *, iters: int) -> list[Measurement]:
    """Times a user's function, compiled as a whole, on its own arrays or on random ones of their shapes."""
    keys = iter(jax.random.split(jax.random.key(0), max(1, len(jax.tree.leaves(call.args)))))
    args = jax.tree.map(lambda leaf: random_array(next(keys), leaf), call.args)
    with user_code(call.name):
        arrays, structure = split(args)  # everything else stays constant
        compiled = jax.jit(lambda *arrays: call.function(*structure.join(arrays))).lower(*arrays).compile()
        (timing,) = time_interleaved([functools.partial(compiled, *arrays)], (), warmup=WARMUP, iters=iters)
    return [Measurement(_shapes(args), "forward", call.name, timing, None)]


def _shapes(args: tuple[Any, ...]) -> str:
    """Describes the arrays in the form that ``--shapes`` takes."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array | np.ndarray)]
    return " ".join(f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in arrays) or "no arrays"


def measure(target: str, case: Any, *, backward: bool, iters: int) -> list[Measurement]:
    """Times every backend that can serve a case, and its peers, interleaved."""
    with user_mistakes(case.name):
        positional, keywords = case.arguments()
    op = kernel(target)
    flops, backends = costs_and_backends(target, positional, keywords, backward)
    contenders: dict[str, Callable[..., Any] | str] = {
        f"{OURS}{name}": functools.partial(function(target), platform=word) for name, word in backends.items()
    }
    peers = {name: peer(case) for name, peer in op.cases.peers.items()}
    if all(isinstance(peer, str) for peer in peers.values()):
        peers[PLAIN] = plain_formula(op, positional, keywords)
    contenders |= peers
    remarks = {name: contender for name, contender in contenders.items() if isinstance(contender, str)}
    runnable: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for name, contender in contenders.items():
        if not isinstance(contender, str):
            try:
                runnable[name] = _bound(contender, positional, keywords, backward)
            except FAILURES as error:
                failures[name] = f"{type(error).__name__}: {first_line(error)}"
    timings = dict(
        zip(runnable, time_interleaved(list(runnable.values()), (), warmup=WARMUP, iters=iters), strict=True)
    )
    stage = "forward+backward" if backward else "forward"
    return [
        Measurement(
            case.name,
            stage,
            name,
            timings.get(name),
            flops,
            failures.get(name, remarks.get(name, "")),
            name in failures,
        )
        for name in contenders
    ]


def plain_formula(op: Portfolio[Any, Any], positional: tuple[Any, ...], keywords: dict[str, Any]) -> Peer | str:
    """An op's formula in plain ``jax.numpy``, in the arrays' dtypes; or the reason why that cannot run a call."""
    inv, _ = prepared(op, positional, keywords, concrete=False)
    if op.oracle_parts(inv):
        return "its scores, which it has in memory, would take gigabytes"

    def plain(*args: Any, **kwargs: Any) -> Any:
        given, named = prepare(op, args, kwargs)
        return op.reference(*given, **named)

    return plain


def costs_and_backends(
    target: str, positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> tuple[float, dict[str, str]]:
    """FLOPs of a case, and the backends that can serve all of its stages: by name the words for ``platform``."""
    op = kernel(target)
    with user_mistakes():
        inv, _ = prepared(op, positional, keywords, concrete=False)
    stages = [inv, inv.backward()] if backward else [inv]
    reasons = [op.reasons(stage) for stage in stages]
    supported = [name for name in reasons[0] if not any(each[name] for each in reasons)]
    if not supported:
        raise UnsupportedError(target, reasons[-1])
    flops = sum(op.cost(stage).flops for stage in stages)
    # A name alone may be that of a platform, which has other backends too.
    return flops, {each.name: each.word for each in op.backends if each.name in supported}


def _bound(
    function: Callable[..., Any], positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> Callable[[], Any]:
    call, args = flat_call(function, positional, keywords, backward)
    compiled = functools.partial(jax.jit(call).lower(*args).compile(), *args)
    jax.block_until_ready(compiled())  # errors at run time are caught with those of compilation
    return compiled


def measurements_table(target: str, found: list[Measurement]) -> Any:
    """A table with a row per measurement; speedups are over the first peer that ran the same case."""
    title, figures = f"{target} on {current_device().name}", ("time", "± ms", "speedup", "GFLOP/s")
    if is_function(target):
        rows = table(f"{title} (time: lower is better)", "arrays", "time", "± ms", right=figures)
        for m in found:
            rows.add_row(m.case, milliseconds(m.time_ms), f"{m.timing.noise_ms:.2g}" if m.timing else "")
        return rows
    rows = table(title, "case", "stage", "implementation", *figures, "remark", right=figures)
    rows.caption = "time: lower is better; speedup over the baseline and GFLOP/s: higher is better"
    rows.caption_justify = "left"
    baselines: dict[tuple[str, str], Measurement] = {}
    for m in found:
        if m.time_ms and not m.implementation.startswith(OURS):
            baselines.setdefault((m.case, m.stage), m)
    for m in found:
        baseline = baselines.get((m.case, m.stage))
        ratio = f"{baseline.time_ms / m.time_ms:.2f}×" if baseline and baseline.time_ms and m.time_ms else ""
        rows.add_row(
            m.case,
            m.stage,
            m.implementation,
            milliseconds(m.time_ms),
            f"{m.timing.noise_ms:.2g}" if m.timing else "",
            "baseline" if m is baseline else ratio,
            f"{m.flops / m.time_ms / 1e6:.0f}" if m.time_ms and m.flops else "",
            m.remark,
        )
    return rows


def as_json(target: str, found: list[Measurement]) -> dict[str, Any]:
    """All measurements as JSON data, with the environment."""
    device = current_device()
    return {
        "op": target,
        "environment": {
            "tilewright": __version__,
            "python": platform.python_version(),
            "device": device.name,
            "fingerprint": device.fingerprint,
            "toolchain": toolchain_fingerprint(),
        },
        "measurements": [
            {
                "case": m.case,
                "stage": m.stage,
                "implementation": m.implementation,
                "median_ms": m.time_ms,
                "samples_ms": list(m.timing.samples_ms) if m.timing else [],
                "flops": m.flops,
                "remark": m.remark,
                "failed": m.failed,
            }
            for m in found
        ],
    }
