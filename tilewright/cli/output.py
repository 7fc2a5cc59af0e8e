"""Output of the commands: results on stdout, progress and errors on stderr."""

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

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
    """The console for results."""
    from tilewright.ops.utils.text import output_width

    return _console(width=output_width())


def stderr() -> "Console":
    """The console for progress."""
    return _console(stderr=True)


def _console(**options: Any) -> "Console":
    from tilewright.ops.utils.text import plain_console

    return plain_console(**options)
