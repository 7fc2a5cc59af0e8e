"""What ``tilewright tune`` does once its arguments are read."""

import math
import os
from pathlib import Path
from typing import cast, get_args

import typer

from tilewright.cli.options import CallOptions
from tilewright.cli.output import INTERRUPTED, complain, stderr, stdout
from tilewright.cli.progress import TuningProgress, result_table
from tilewright.cli.targets import named_calls
from tilewright.ops import AutotuningResult, Tuner, default_executor, tune
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.execution.tuning import Isolation


def tuner_of(isolation: str, timeout_s: float) -> Tuner:
    """How to measure.

    Raises:
      typer.BadParameter: an option is out of its range.
    """
    if isolation not in get_args(Isolation):
        raise typer.BadParameter(f"{isolation!r} is none of {', '.join(get_args(Isolation))}", param_hint="--isolation")
    if not 0 < timeout_s < math.inf:
        raise typer.BadParameter(f"{timeout_s} is not a positive number of seconds", param_hint="--timeout")
    return Tuner(isolation=cast(Isolation, isolation), timeout_s=timeout_s)


def tune_and_report(
    target: str, options: CallOptions, tuner: Tuner, *, budget_s: float | None, again: bool, json_file: Path | None
) -> int:
    """Tunes, prints the table, and returns the exit code."""
    # The processes that measure need the device's memory; JAX reads this once, when it first looks for a device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(json_file.parent)!r}", param_hint="--json")
    calls = named_calls(target, options)
    total = AutotuningResult()
    interrupted = False
    with TuningProgress(stderr()) as progress:
        for call in calls:
            try:
                result = tune(
                    call.function,
                    *call.args,
                    tuner=tuner,
                    budget_s=budget_s,
                    reuse=not again,
                    on_event=progress.on_event,
                )
            except KeyboardInterrupt:  # while the program was lowered: nothing of this call was measured yet
                interrupted = True
                break
            total |= result
            interrupted = result.interrupted
            if interrupted:
                break
    if json_file is not None and total.entries:
        json_file.write_text(total.to_json() + "\n")
    return _report(target, total, interrupted)


def _report(target: str, result: AutotuningResult, interrupted: bool) -> int:
    if result.entries:
        stdout().print(result_table(result))
    elif not interrupted:
        complain(f"{target} calls no kernel of tilewright; there is nothing to tune")
    measured = sum(1 for call in result if call.step == "measured")
    place = _cache_path()
    if measured and place:
        typer.echo(f"{measured} of {len(result)} measured now and kept in {place}")
    elif result.entries:
        typer.echo(f"all {len(result)} known, nothing measured" + (f" ({place})" if place else ""))
    if interrupted:
        complain(f"interrupted; the {measured} calls measured so far are kept")
        return INTERRUPTED
    return 0


def _cache_path() -> Path | None:
    chooser = default_executor().chooser
    if isinstance(chooser, ConfigSelectorChain) and chooser.persistent is not None:
        return chooser.persistent.path
    return None
