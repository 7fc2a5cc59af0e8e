"""What the commands print and how: results on stdout, progress and complaints on stderr."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

USAGE = 2
INTERRUPTED = 130


def complain(message: str) -> None:
    """One line on stderr, whatever lines the message has."""
    print("tilewright: " + " ".join(message.split()), file=sys.stderr)


def stdout() -> "Console":
    """Where results go; as wide as they need when a program reads them, for a cut table cannot be read."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)


def stderr() -> "Console":
    """Where progress goes."""
    from rich.console import Console

    return Console(stderr=True)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> "Table":
    """An empty table; the columns named in ``right`` hold figures."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        figures = column in right
        made.add_column(column, justify="right" if figures else "left", overflow="fold", no_wrap=figures)
    return made


def milliseconds(time_ms: float | None) -> str:
    """A time with three significant digits; a dash where there is none."""
    if time_ms is None:
        return "–"
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:.0f} ms"
