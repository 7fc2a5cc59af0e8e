"""Entries of the persistent cache in words."""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.cli.output import milliseconds, table
from tilewright.ops.config.persistent import Entry
from tilewright.ops.utils.describe import describe_config, describe_key

if TYPE_CHECKING:
    from rich.table import Table


def entry_id(entry: Entry) -> str:
    """Eight hexadecimal digits that stand for an entry on the command line."""
    return hashlib.sha256(repr(entry.key).encode()).hexdigest()[:8]


def entries_table(entries: Sequence[Entry]) -> "Table":
    """One row for each entry, newest first."""
    from rich.markup import escape

    made = table(
        "tuned configs", "id", "op", "direction", "arguments", "config", "time", "device", "tuned", right=("time",)
    )
    for entry in sorted(entries, key=lambda entry: entry.created, reverse=True):
        key = key_fields(entry)
        made.add_row(
            entry_id(entry),
            str(key.get("op", "?")),
            str(key.get("direction", "?")),
            escape(describe_key(entry.key)),
            entry.readable if entry.config is None else describe_config(entry.config),
            milliseconds(entry.metadata.get("time_ms")),
            str(key.get("device", "?")),
            f"{entry.created:%Y-%m-%d %H:%M}" + (" (stale)" if entry.stale else ""),
        )
    return made


def key_fields(entry: Entry) -> dict[str, Any]:
    """The fields of the key of a call; nothing for a key of some other form."""
    if not isinstance(entry.key, str):
        return {}
    try:
        said = json.loads(entry.key)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def entry_text(entry: Entry) -> str:
    """All that an entry holds, as JSON."""
    said = {
        "id": entry_id(entry),
        "key": key_fields(entry) or repr(entry.key),
        "config": entry.readable,
        "created": entry.created.isoformat(),
        "stale": entry.stale,
        "toolchain": entry.toolchain,
        "source": entry.source,
        "metadata": {name: _plain(value) for name, value in entry.metadata.items()},
        "measurements": [_plain(measurement) for measurement in entry.measurements],
    }
    return json.dumps(said, indent=1, default=str)


def _plain(value: Any) -> Any:
    """JSON data as it is; anything else by what it prints."""
    try:
        json.dumps(value)
    except TypeError:
        return str(value)
    return value
