"""Output of the commands: results on stdout, progress and errors on stderr."""

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class Failure(typer.TyperException):
    """The arguments were right but the command failed: one line on stderr, exit code 1."""

    exit_code = FAILED


class Interrupted(typer.TyperException):
    """Ctrl-C ended a command; the message tells in one line what is kept: exit code 130."""

    exit_code = INTERRUPTED


def complain(message: str) -> None:
    """Prints a message as one line on stderr."""
    print("tilewright: " + " ".join(message.split()), file=sys.stderr)


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun, such as "1 call" or "2 calls"; ``plural`` for nouns that do not just add an "s"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def stdout() -> "Console":
    """The console for results; wide enough not to cut tables when a program reads them."""
    console = _console(stderr=False)
    return console if console.is_terminal else _console(stderr=False, width=200)


def stderr() -> "Console":
    """The console for progress."""
    return _console(stderr=True)


def _console(**options: Any) -> "Console":
    from tilewright.ops.tuning.progress import plain_console

    return plain_console(**options)


def table(title: str, *columns: str, right: tuple[str, ...] = (), unwrapped: tuple[str, ...] = ()) -> "Table":
    """An empty table. Columns named in ``right`` hold figures; these and those in ``unwrapped`` do not wrap."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    new_table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        figures = column in right
        new_table.add_column(
            Text(column),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures or column in unwrapped,
        )
    return new_table


def lines(*parts: tuple[str, str]) -> "Text":
    """Lines of text, each with its style, such as "dim"; none is parsed as markup."""
    from rich.text import Text

    return Text("\n").join([Text(text, style=style) for text, style in parts])
