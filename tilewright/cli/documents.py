"""The JSON files that the commands write, recognised by their fields."""

import enum
import os
from pathlib import Path
from typing import Any

import typer

from tilewright.ops.config.persistent import EXPORT_LIMIT, parse_document
from tilewright.ops.utils.folders import read_file


class Kind(enum.Enum):
    """The kind of a file; the value tells people which command wrote it and which ones read it."""

    TUNING = "a result of 'tilewright tune --json', which 'tilewright report' reads"
    EXPORT = "what 'tilewright cache export' wrote, which 'tilewright cache import' and 'tilewright report' read"
    BENCH = "a result of 'tilewright bench --json', which 'tilewright report' reads"
    LOCK = "a lock file, which holds no measurements: 'tilewright tune --lock' and TILEWRIGHT_LOCK read it"


def document_of(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
      typer.BadParameter: the file cannot be read.
      ValueError: the file holds something else.
    """
    try:
        return parse_document(read_file(os.path.expanduser(file), EXPORT_LIMIT))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {str(file)!r}: {error.strerror or error}") from error


def kind_of(document: dict[str, Any]) -> Kind | None:
    """The kind of a document by its outermost fields; ``None`` if no command writes such a document."""
    if {"op", "environment", "measurements"} <= document.keys():
        return Kind.BENCH
    if {"decisions", "sha256"} <= document.keys():
        return Kind.LOCK
    if "entries" not in document:
        return None
    entries = document["entries"]
    of_cache = isinstance(entries, list) and all(isinstance(each, dict) and "checksum" in each for each in entries)
    return Kind.EXPORT if document.keys() == {"schema", "entries"} and of_cache else Kind.TUNING
