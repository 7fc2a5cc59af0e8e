"""What ``tilewright tune`` does once its arguments are read."""

import math
import os
from pathlib import Path
from typing import cast, get_args

import typer

from tilewright.cli.options import CallOptions
from tilewright.cli.output import INTERRUPTED, complain, stderr, stdout
from tilewright.cli.progress import TuningProgress, result_table
from tilewright.cli.targets import named_calls, user_mistakes
from tilewright.ops import AutotuningResult, Lock, Tuner, default_executor, device_fingerprint, tune, use_lock
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.execution.tuning import Isolation
from tilewright.ops.utils.fingerprint import toolchain_fingerprint


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
    target: str,
    options: CallOptions,
    tuner: Tuner,
    *,
    budget_s: float | None,
    again: bool,
    json_file: Path | None,
    lock_file: Path | None = None,
) -> int:
    """Tunes, prints the table, and returns the exit code."""
    # The processes that measure need the device's memory; JAX reads this once, when it first looks for a device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for file, option in ((json_file, "--json"), (lock_file, "--lock")):
        if file is not None and not file.parent.is_dir():
            raise typer.BadParameter(f"there is no directory {str(file.parent)!r}", param_hint=option)
    # What is measured must not depend on a lock, nor fail where one that the environment names is still to be made.
    with use_lock(None):
        if lock_file is not None:
            _check_lock(lock_file)  # refused now rather than after the tuning
        result, interrupted = _tune_all(target, options, tuner, budget_s=budget_s, again=again)
        if json_file is not None and result.entries:
            json_file.write_text(result.to_json() + "\n")
        code = _report(target, result, interrupted)
        if lock_file is not None and result.entries:
            _lock(lock_file, result)
    return code


def _tune_all(
    target: str, options: CallOptions, tuner: Tuner, *, budget_s: float | None, again: bool
) -> tuple[AutotuningResult, bool]:
    """What was found, and whether an interrupt ended it."""
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
    return total, interrupted


def _check_lock(file: Path) -> None:
    """Raises unless this process may add to the lock that a file holds, if there is one.

    Raises:
      LockError: it cannot be used.
      typer.BadParameter: it is of another device or toolchain.
    """
    if not file.exists():
        return
    lock = Lock.load(file)
    try:
        _ = lock | Lock(device_fingerprint(), toolchain_fingerprint(), ())
    except ValueError as error:
        message = f"{str(file)!r} was made elsewhere: {error}; delete it, or give another file"
        raise typer.BadParameter(message, param_hint="--lock") from error


def _lock(file: Path, result: AutotuningResult) -> None:
    """Pins the winners in a file, in place of earlier decisions on the same calls."""
    try:
        with user_mistakes("--lock"):
            new = result.to_lock()
            lock = new.add_to(file)  # and not to what was read before the tuning: another may have added to it since
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(file)!r}: {error.strerror}", param_hint="--lock") from error
    typer.echo(f"{file} decides {len(lock)} calls, {len(new)} of them by this tuning")


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
