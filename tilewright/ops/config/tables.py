"""The tuned tables shipped inside the package: one ``AutotuningResult`` in JSON per file."""

import functools
import json
import logging
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.utils.stable_ids import with_current_names

logger = logging.getLogger(__name__)


type Table = dict[str, TunedCall]
"""Maps a call's key to its winner and to the fastest configs of other implementations, in case the winner cannot run.
"""


def shipped_folder() -> Any:
    """The folder of the tables in the package."""
    return files("tilewright").joinpath("tables")


def load_tables(device: str, folder: Path | None = None, *, op: str | None = None, key: str | None = None) -> Table:
    """Merges all tables for a device, the last by file name winning; what cannot be read is logged and left out.

    Args:
      op: read the entries of this op alone, by default of all.
      key: read the entry of this call alone.
    """
    merged: Table = {}
    for file in _files(folder):
        merged |= _read(file, device, op, key)
    return merged


def known_keys(device: str, folder: Path | None = None, *, op: str) -> frozenset[str]:
    """The keys of an op's calls in the tables for a device, whether their configs can be read or not."""
    keys: set[str] = set()
    for file in _files(folder):
        try:
            document = _document(file)
            if document["device"] == device:
                keys |= {with_current_names(each["key"]) for each in document["entries"] if each["op"] == op}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            keys |= _read(file, device, op, None).keys()  # says what is wrong, and reads what can be read
    return frozenset(keys)


def _files(folder: Path | None) -> list[Any]:
    root: Any = shipped_folder() if folder is None else folder
    files = root.iterdir() if root.is_dir() else ()
    return sorted((file for file in files if file.name.endswith(".json")), key=lambda file: file.name)


@functools.lru_cache(maxsize=64)
def _read(file: Any, device: str, op: str | None, key: str | None) -> Table:
    try:
        document = _document(file)
        # Rebuilding configs loads the modules of their backends: not those of other devices' tables, nor of other ops.
        if isinstance(document, dict) and document.get("device", device) != device:
            return {}
        result = _result(file, document, op, key)
    except (OSError, ValueError) as error:
        logger.warning("the tuned table %s cannot be read: %s", file.name, error)
        return {}
    return {entry.key: entry for entry in result}


@functools.lru_cache(maxsize=8)
def _document(file: Any) -> Any:
    """The data of a table, parsed once for all ops."""
    return json.loads(file.read_text())


def _result(file: Any, document: Any, op: str | None = None, key: str | None = None) -> AutotuningResult:
    """The content of a table, without the entries and candidates that name what this version does not have."""
    return AutotuningResult.of_document(
        document,
        lost=lambda error: logger.warning("the tuned table %s is read without a part: %s", file.name, error),
        op=op,
        key=key,
    )


def table_file(device: str, folder: Path) -> Path:
    """The file in a folder that is, or would be, the table of a device."""
    for file in sorted(folder.glob("*.json")):
        if json.loads(file.read_text()).get("device") == device:
            return file
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', device.split(':')[1].lower()).strip('-')}.json"


def add_to_table(file: Path, result: AutotuningResult, command: str) -> None:
    """Merges the result of a tuning into a table file, replacing earlier entries for the same calls.

    For each call the winner, the heuristic and the fastest candidate of every implementation are kept as evidence. The
    file also lists the commands that made the table, latest last.

    Raises:
      ValueError: the file is not a table, or is for another device.
    """
    commands: list[str] = []
    merged = result
    if file.exists():
        document = json.loads(file.read_text())
        before = _result(file, document)
        if before.device != result.device:
            raise ValueError(f"{file} is of {before.device!r}, not of {result.device!r}")
        commands = list(document.get("commands", ()))
        merged = before | result
    document = json.loads(merged.compact().to_json()) | {"commands": list(dict.fromkeys([*commands, command]))}
    temporary = file.with_suffix(".part")  # a killed run leaves either the old table or the new one
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(file)
