"""The arguments and help of ``tilewright report``."""

import datetime
from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of 'tune --json', 'bench --json' or 'cache export'; the last file with a call wins. "
            "Default: everything in the disk cache for this device.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The page to write; an existing one is replaced.")] = Path(
        "report.html"
    ),
    date: Annotated[
        datetime.datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"], help="The date on the page instead of today's.",
            show_default=False,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write one HTML page about tuned calls: plots of all candidates, times, regret, failures, environment.

    The page needs no other file, no network and no script.
    """
    from tilewright.cli.report.reporting import write_report

    typer.echo(write_report(files or (), out, date and date.date()))
