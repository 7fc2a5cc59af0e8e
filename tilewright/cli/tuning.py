"""The work of ``tilewright tune``, after its arguments are read."""

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import typer

from tilewright.cli.device import here
from tilewright.cli.files import check_new_file, writing
from tilewright.cli.mistakes import first_line, user_mistakes
from tilewright.cli.options import CallOptions
from tilewright.cli.output import FAILED, Failure, Interrupted, complain, counted
from tilewright.cli.targets import named_calls
from tilewright.ops import (
    AutotuningResult,
    Invocation,
    Lock,
    PersistentCache,
    Tuner,
    default_executor,
    device_fingerprint,
    use_lock,
)
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.program import find_invocations, tune_invocations
from tilewright.ops.tuning.isolation import is_shared, prestart
from tilewright.ops.tuning.progress import progress_for
from tilewright.ops.utils.fingerprint import toolchain_fingerprint


def tune_and_report(
    target: str,
    options: CallOptions,
    tuner: Tuner,
    *,
    budget_s: float | None,
    call_budget_s: float | None,
    again: bool,
    json_file: Path | None,
    lock_file: Path | None = None,
) -> int:
    """Tunes, prints the table, and returns the exit code."""
    clock = time.monotonic()
    # The measuring processes need the device's memory. JAX reads this variable once, when it first looks for a device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_new_file(json_file, "--json")
    check_new_file(lock_file, "--lock", existing=True)
    if is_shared(here()) and tuner.isolation != "none":
        prestart()
    began = datetime.datetime.now(datetime.UTC)
    # Measurements must not depend on a lock, nor fail if the environment names a lock that is still to be made.
    with use_lock(None):
        if lock_file is not None:
            _check_lock(lock_file)  # refuse it now rather than after the tuning
        limits = {"budget_s": budget_s, "call_budget_s": call_budget_s}
        result = _tune_all(target, options, tuner, began=clock, again=again, **limits)
        if json_file is not None and result.entries:
            with writing(json_file, "--json"):
                json_file.write_text(result.to_json() + "\n")
        lost = _report(target, result, began)
        if lock_file is not None and result.entries:
            _lock(lock_file, result)
    if result.interrupted:
        measured = sum(1 for call in result if call.step == "measured")
        raise Interrupted(f"interrupted; {_kept(measured, lost, json_file)}")
    return FAILED if lost else 0


def _tune_all(
    target: str, options: CallOptions, tuner: Tuner, *, began: float, again: bool, **limits: float | None
) -> AutotuningResult:
    calls = named_calls(target, options)
    invocations: list[Invocation[Any, Any]] = []
    try:
        for call in calls:
            invocations += find_invocations(call.function, *call.args)
    except KeyboardInterrupt:  # nothing was measured yet
        return AutotuningResult(interrupted=True)
    with progress_for(sys.stderr, plain=True) as on_event:
        try:
            return tune_invocations(invocations, began=began, tuner=tuner, reuse=not again, on_event=on_event, **limits)
        except ExceptionGroup as group:
            raise _all_failed(target, group) from group


def _all_failed(target: str, group: ExceptionGroup) -> Failure:
    """The failure to report if no candidate of a call ran; results of other calls are kept."""
    innermost = group
    while isinstance(innermost.exceptions[0], ExceptionGroup):
        innermost = innermost.exceptions[0]
    first = innermost.exceptions[0]
    return Failure(f"{target}: {innermost.message}; the first: {type(first).__name__}: {first_line(first)}")


def _check_lock(file: Path) -> None:
    """Raises unless this process may add to an existing lock file.

    Raises:
      LockError: the file cannot be used.
      typer.BadParameter: its lock is for another device or toolchain.
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
    """Pins the winners in a file, replacing earlier decisions for the same calls."""
    try:
        with user_mistakes("--lock"):
            new = result.to_lock()
            lock = new.add_to(file)  # reads the file again: another process may have added to it since
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(file)!r}: {error.strerror}", param_hint="--lock") from error
    typer.echo(f"{file} decides {counted(len(lock), 'call')}, {len(new)} of them by this tuning")


def _report(target: str, result: AutotuningResult, began: datetime.datetime) -> int:
    """Prints the result, and returns the number of measured calls that are not on disk."""
    if result.entries:
        typer.echo(str(result))
    elif not result.interrupted and not result.left_out:
        complain(f"{target} calls no kernel of tilewright; there is nothing to tune")
    _report_left_out(result)
    measured = [call for call in result if call.step == "measured"]
    cache = _cache()
    if cache is None or not result.entries:
        return 0
    lost = sum(1 for call in measured if (entry := cache.entry(call.key)) is None or entry.created < began)
    if lost:
        complain(f"{counted(lost, 'call')} of {len(measured)} measured could not be written to {cache.path}")
    elif measured:
        typer.echo(f"{len(measured)} of {len(result)} measured now and kept in {cache.path}")
    else:
        known = "the only call is known" if len(result) == 1 else f"all {counted(len(result), 'call')} known"
        typer.echo(f"{known}, nothing measured ({cache.path})")
    return lost


def _report_left_out(result: AutotuningResult) -> None:
    """Reports the calls and candidates for which there was no time."""
    for call in result.left_out:
        complain(f"not tuned, for the budget had ended: {call}")
    for entry in result:
        for name, why in entry.left_out.items():
            complain(f"{entry.op} {entry.direction}: candidates of {name} were left out: {why}")


def _kept(measured: int, lost: int, json_file: Path | None) -> str:
    """Describes what an interrupt leaves."""
    if not measured:
        return "nothing was measured to its end; a next tuning goes on where this one was"
    if lost:
        return "what was measured is not on disk" + (f", but in {json_file}" if json_file else "")
    return f"the {counted(measured, 'call')} measured so far {'is' if measured == 1 else 'are'} kept"


def _cache() -> PersistentCache | None:
    chooser = default_executor().chooser
    return chooser.persistent if isinstance(chooser, ConfigSelectorChain) else None
