"""Turns exceptions into the one line that the command line prints."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tilewright.cli.output import Failure
from tilewright.errors import TilewrightError


@contextmanager
def user_mistakes(subject: str = "") -> Iterator[None]:
    """Turns a ``ValueError`` or ``TypeError`` about the user's input into a usage error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"{subject}: {first_line(error)}" if subject else first_line(error)) from error


@contextmanager
def user_code(subject: str) -> Iterator[None]:
    """Turns any exception of the user's code into one line: a usage error for wrong values, else a failure.

    The line ends with the source location, since no traceback is shown.
    """
    try:
        yield
    except (typer.TyperException, typer.Exit, typer.Abort, TilewrightError):
        raise
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"{subject}: {first_line(error)}{raised_at(error)}") from error
    except SystemExit as error:  # a script without a guard on its __name__
        raise Failure(f"{subject} ended the program with exit code {error.code}{raised_at(error)}") from error
    except Exception as error:  # user code may raise anything
        if "KeyboardInterrupt" in str(error):  # Ctrl-C in a callback, which JAX wraps in an error of its own
            raise KeyboardInterrupt from error
        raise Failure(f"{subject} raised {type(error).__name__}: {first_line(error)}{raised_at(error)}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def raised_at(error: BaseException) -> str:
    """The innermost location in the user's own code; empty if there is none."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the location
    others = ("<", os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others) and "site-packages" not in frame.filename:
            return f" ({os.path.basename(frame.filename)}, line {frame.lineno})"
    return ""
