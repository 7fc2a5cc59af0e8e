"""The work of ``tilewright report``, after its arguments are read."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import typer

from tilewright.cli.device import here
from tilewright.cli.entries import open_cache
from tilewright.cli.files import check_new_file
from tilewright.cli.output import Failure, complain, counted
from tilewright.cli.report.calls import ReportedCall, calls_of_cache, calls_of_file, merged
from tilewright.ops.utils.folders import absolute, replace_file


def write_report(files: Sequence[Path], out: Path, date: datetime.date | None) -> str:
    """Writes the page and returns a line that summarises it.

    Raises:
      typer.BadParameter: there is nothing to report, or the page cannot be written. Nothing is written then.
      Failure: a library is missing.
    """
    try:
        from tilewright.cli.report.page import render
    except ModuleNotFoundError as error:
        raise Failure(f"a report needs {error.name}: pip install 'tilewright[plot]'") from error
    check_new_file(absolute(out), "--out")
    if any(out.exists() and file.exists() and os.path.samefile(out, file) for file in files):
        raise typer.BadParameter(f"{str(out)!r} is one of the files to report", param_hint="--out")
    calls = merged(*map(_read, files)) if files else _calls_on_this_device()
    date = date or datetime.datetime.now(datetime.UTC).date()
    page = render(calls, date=date.isoformat()).encode()
    try:
        replace_file(absolute(out), page)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(out)!r}: {error.strerror}", param_hint="--out") from error
    return f"{counted(len(calls), 'call')}, {len(page) / 1024:.0f} KiB written to {out}"


def _read(file: Path) -> list[ReportedCall]:
    """Reads the measurements in a file that a command wrote."""
    try:
        calls, left_out = calls_of_file(file)
    except ValueError as error:
        expected = "what 'tune --json', 'bench --json' or 'cache export' writes"
        raise typer.BadParameter(f"{str(file)!r} cannot be reported, which takes {expected}: {error}") from error
    if left_out:
        _complain_of(left_out, str(file))
    return calls


def _complain_of(left_out: int, origin: str) -> None:
    verb = "holds" if left_out == 1 else "hold"
    complain(f"{counted(left_out, 'entry', 'entries')} of {origin} {verb} no measurements that can be read: left out")


def _calls_on_this_device() -> list[ReportedCall]:
    """The measurements on the present device in the user's disk cache."""

    cache, device = open_cache(), here().fingerprint
    calls, left_out = calls_of_cache(cache.entries(), device)
    if not calls:
        raise typer.BadParameter(
            f"{cache.path} holds no measurements of {device}; tune something, or name files of 'tune --json', "
            "'bench --json' or 'cache export'"
        )
    if left_out:
        _complain_of(left_out, str(cache.path))
    return calls
