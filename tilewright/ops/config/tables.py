"""The tuned tables that ship inside the package: one ``AutotuningResult`` in JSON per file."""

import functools
import json
import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewright.ops.config.results import AutotuningResult, TunedCall

logger = logging.getLogger(__name__)


type Table = dict[str, TunedCall]
"""By a call's key its winner, and the fastest configs of other implementations, for where it cannot run."""


def load_tables(device: str, folder: Path | None = None) -> Table:
    """What every table of a device says, the last by name first; one that cannot be read is logged and left out."""
    place: Any = files("tilewright").joinpath("tables") if folder is None else folder
    merged: Table = {}
    if place.is_dir():
        for file in sorted(place.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".json"):
                merged |= _read(file, device)
    return merged


@functools.lru_cache(maxsize=64)
def _read(file: Any, device: str) -> Table:
    try:
        text = file.read_text()
        said = json.loads(text)
        # Configs are rebuilt by the modules of their backends, which other devices' tables need not load.
        if isinstance(said, dict) and said.get("device", device) != device:
            return {}
        result = AutotuningResult.from_json(text)
    except (OSError, ValueError) as error:
        logger.warning("the tuned table %s cannot be read: %s", file.name, error)
        return {}
    return {entry.key: entry for entry in result}


def add_to_table(file: Path, result: AutotuningResult, command: str) -> None:
    """Adds what a tuning found to the table in a file, in place of what the file says of the same calls.

    Of each call the winner, the heuristic and the fastest of every implementation stay, as evidence. The commands that
    made a table stand in it, latest last.

    Raises:
      ValueError: the file holds something else, or the table of another device.
    """
    commands: list[str] = []
    merged = result
    if file.exists():
        text = file.read_text()
        before = AutotuningResult.from_json(text)
        if before.device != result.device:
            raise ValueError(f"{file} is of {before.device!r}, not of {result.device!r}")
        commands = list(json.loads(text).get("commands", ()))
        merged = before | result
    said = json.loads(merged.compact().to_json()) | {"commands": list(dict.fromkeys([*commands, command]))}
    part = file.with_suffix(".part")  # a run that is killed leaves the old table or the new one
    part.write_text(json.dumps(said, indent=1) + "\n")
    part.replace(file)
