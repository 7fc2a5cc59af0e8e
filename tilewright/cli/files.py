"""Output files of commands: refused before the work if possible, otherwise reported in one line after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from tilewright.cli.output import Failure


def check_new_file(file: Path | None, option: str, *, existing: bool = False) -> None:
    """Raises unless the file can be created, as far as its folder shows.

    Args:
      existing: True if the caller itself checks an existing file.

    Raises:
      typer.BadParameter: the file cannot be created.
    """
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(file.parent)!r}", param_hint=option)
    if not existing and file.is_dir():
        raise typer.BadParameter(f"{str(file)!r} is a directory", param_hint=option)


@contextmanager
def writing(file: Path, option: str) -> Iterator[None]:
    """Turns an ``OSError`` into a one-line failure.

    Raises:
      Failure: the file could not be written.
    """
    try:
        yield
    except OSError as error:
        raise Failure(f"{option}: cannot write {str(file)!r}: {error.strerror or error}") from error
