"""What ``tilewright bench`` does once its arguments are read."""

import dataclasses
import functools
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import typer

from tilewright import __version__
from tilewright.cli.options import CallOptions
from tilewright.cli.output import milliseconds, stderr, stdout, table
from tilewright.cli.peers import PEERS
from tilewright.cli.targets import find_op, flat_call, op_cases, op_function, user_mistakes
from tilewright.errors import UnsupportedError
from tilewright.kernels import kernel
from tilewright.ops.execution.executor import prepared
from tilewright.ops.execution.timing import Timing, time_interleaved
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import toolchain_fingerprint

WARMUP = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One implementation's times on one case.

    Attributes:
      stage: "forward" or "forward+backward".
      timing: ``None`` if it cannot do the case; ``remark`` says why.
      flops: of the case's matrix products, both directions if both were run.
    """

    case: str
    stage: str
    implementation: str
    timing: Timing | None
    flops: float
    remark: str = ""

    @property
    def time_ms(self) -> float | None:
        return None if self.timing is None else self.timing.median_ms


def bench_and_report(target: str, options: CallOptions, *, iters: int, json_file: Path | None) -> None:
    """Measures, prints the table, writes the file."""
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(json_file.parent)!r}", param_hint="--json")
    op = find_op(target)
    found: list[Measurement] = []
    cases = op_cases(target, options)
    with stderr().status("") as status:
        for case in cases:
            for backward in (False, True) if options.backward and op.gradients else (False,):
                status.update(f"{target} {case.name}" + (" with gradients" if backward else ""))
                found += measure(target, case, backward=backward, iters=iters)
    stdout().print(measurements_table(target, found))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(target, found), indent=1) + "\n")
        typer.echo(f"written to {json_file}")


def measure(target: str, case: Any, *, backward: bool, iters: int) -> list[Measurement]:
    """Times every backend that can serve a case, and the peers, in turn."""
    with user_mistakes(case.name):
        positional, keywords = case.arguments()
    flops, platforms = costs_and_platforms(target, positional, keywords, backward)
    contenders: dict[str, tuple[Callable[..., Any], dict[str, Any]] | str] = {
        f"tilewright {name}": (op_function(target), {**keywords, "platform": name}) for name in platforms
    }
    for name, peer in PEERS.get(target, {}).items():
        answer = peer(case)
        contenders[name] = answer if isinstance(answer, str) else (answer[0], _renamed(keywords, answer[1], case))
    runnable = {
        name: _bound(function, positional, given, backward)
        for name, (function, given) in ((n, c) for n, c in contenders.items() if not isinstance(c, str))
    }
    timings = dict(
        zip(runnable, time_interleaved(list(runnable.values()), (), warmup=WARMUP, iters=iters), strict=True)
    )
    stage = "forward+backward" if backward else "forward"
    return [
        Measurement(case.name, stage, name, timings.get(name), flops, contender if isinstance(contender, str) else "")
        for name, contender in contenders.items()
    ]


def costs_and_platforms(
    target: str, positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> tuple[float, list[str]]:
    """FLOPs of a case, and the platforms that can serve all of it."""
    op = kernel(target)
    with user_mistakes():
        inv, _ = prepared(op, positional, keywords, concrete=False)
    stages = [inv, inv.backward()] if backward else [inv]
    problem = op.problem(*inv.abstract_args, **inv.abstract_kwargs)
    reasons = [op.reasons(stage) for stage in stages]
    able = [name for name in reasons[0] if not any(each[name] for each in reasons)]
    if not able:
        raise UnsupportedError(target, reasons[-1])
    flops = sum(op.cost(problem, stage.direction).flops for stage in stages)
    return flops, list(dict.fromkeys(name.partition(":")[0] for name in able))


def _renamed(keywords: dict[str, Any], names: dict[str, str], case: Any) -> dict[str, Any]:
    renamed = {names.get(name, name): value for name, value in keywords.items()}
    if isinstance(
        case.sliding_window, int
    ):  # ours looks back only, when causal; an int of JAX's always looks both ways
        renamed["local_window_size"] = (case.sliding_window, 0 if case.causal else case.sliding_window)
    return renamed


def _bound(
    function: Callable[..., Any], positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> Callable[[], Any]:
    call, args = flat_call(function, positional, keywords, backward)
    compiled = jax.jit(call).lower(*args).compile()
    return functools.partial(compiled, *args)


def measurements_table(target: str, found: list[Measurement]) -> Any:
    """One row for each measurement; ratios are to the peer's time on the same case."""
    peers = tuple(PEERS.get(target, {}))
    made = table(
        f"{target} on {current_device().name}",
        "case", "stage", "implementation", "time", "± ms", "of JAX's", "GFLOP/s", "remark",
        right=("time", "± ms", "of JAX's", "GFLOP/s"),
    )  # fmt: skip
    by_peer = {(m.case, m.stage): m.time_ms for m in found if m.implementation in peers}
    for m in found:
        peer_ms = by_peer.get((m.case, m.stage))
        made.add_row(
            m.case,
            m.stage,
            m.implementation,
            milliseconds(m.time_ms),
            f"{m.timing.noise_ms:.2g}" if m.timing else "",
            f"{m.time_ms / peer_ms:.2f}×" if m.time_ms and peer_ms and m.implementation not in peers else "",
            f"{m.flops / m.time_ms / 1e6:.0f}" if m.time_ms else "",
            m.remark,
        )
    return made


def as_json(target: str, found: list[Measurement]) -> dict[str, Any]:
    """Everything that was measured, with the environment."""
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
            }
            for m in found
        ],
    }
