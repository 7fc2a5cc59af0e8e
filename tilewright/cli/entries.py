"""Entries of the persistent cache as text."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.output import Failure
from tilewright.ops.config import lockfile
from tilewright.ops.config.persistent import Entry, PersistentCache
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.serialize import canonical_json, tagged
from tilewright.ops.utils.text import lines, milliseconds, table

if TYPE_CHECKING:
    from rich.table import Table


ID_DIGITS = 8


def open_cache(folder: Path | None = None) -> PersistentCache:
    """Opens a cache, the user's by default, whose folder can be listed or does not exist yet.

    Raises:
      typer.BadParameter: the given folder does not exist or cannot be listed.
      Failure: the user's folder cannot be read.
    """
    from tilewright.kernels import OPS, kernel

    for op in OPS:  # the types of the configs: the cache rebuilds only those that are loaded
        kernel(op)
    # A config whose type is not loaded is shown as text; a warning for each would only alarm the user.
    logging.getLogger(PersistentCache.__module__).addFilter(_is_no_unloaded_warning)
    cache = PersistentCache(folder)
    try:
        os.listdir(cache.path)
    except FileNotFoundError as error:
        if folder is not None:
            raise typer.BadParameter(f"there is no directory {str(folder)!r}", param_hint="--path") from error
    except OSError as error:
        message = f"the cache {str(cache.path)!r} cannot be read: {error.strerror or error}"
        if folder is not None:
            raise typer.BadParameter(message, param_hint="--path") from error
        raise Failure(f"{message}; TILEWRIGHT_CACHE_DIR names another place") from error
    return cache


def _is_no_unloaded_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().endswith(" is not loaded")


def full_id(entry: Entry) -> str:
    """The 32 hexadecimal digits at the end of an entry's file name; any unique prefix of them identifies the entry.

    The shell completes them only from the file names.
    """
    return hashlib.sha256(canonical_json(tagged(entry.key)).encode()).hexdigest()[:32]


def entry_id(entry: Entry) -> str:
    """The digits that ``cache list`` shows."""
    return full_id(entry)[:ID_DIGITS]


def find_entry(entries: Sequence[Entry], beginning: str, cache_name: str) -> Entry:
    """The entry whose id has this prefix.

    Raises:
      typer.BadParameter: there is none, or more than one, in which case the message names them.
    """
    prefix = beginning.strip().lower()
    found = [entry for entry in entries if prefix and full_id(entry).startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise typer.BadParameter(
            f"no entry of {cache_name} has an id that begins with {beginning!r}; 'tilewright cache list' shows them",
            param_hint="entry",
        )
    named = [f"{entry_id(entry)} ({_call(entry)})" for entry in found[:5]]
    rest = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise typer.BadParameter(
        f"{beginning!r} is the beginning of {len(found)} ids: {', '.join(named)}{rest}", param_hint="entry"
    )


def _call(entry: Entry) -> str:
    key = key_fields(entry)
    return f"{key.get('op', '?')} {key.get('direction', '?')}"


def entries_table(entries: Sequence[Entry]) -> "Table":
    """A table with a row for each entry, newest first."""
    rows = table(
        "tuned configs", "id", "call, and its config", "time", "device", "tuned", right=("time",), unwrapped=("id",)
    )
    for entry in sorted(entries, key=lambda entry: entry.created, reverse=True):
        key = key_fields(entry)
        rows.add_row(
            entry_id(entry),
            lines(
                (_call(entry), ""),
                (describe_key(entry.key), "dim"),
                (f"→ {entry.readable if entry.config is None else describe_config(entry.config)}", "bold"),
            ),
            milliseconds(entry.metadata.get("time_ms")),
            str(key.get("device", "?")),
            f"{entry.created:%Y-%m-%d %H:%M}" + (" (stale)" if entry.stale else ""),
        )
    return rows


def key_fields(entry: Entry) -> dict[str, Any]:
    """The fields of a call's key; empty for a key of another form."""
    try:
        return lockfile.key_fields(entry.key)  # type: ignore[arg-type]  # it may be of any type
    except (TypeError, ValueError):
        return {}


def entry_text(entry: Entry) -> str:
    """Everything that an entry holds, as JSON."""
    document = {
        "id": entry_id(entry),
        "key": key_fields(entry) or repr(entry.key),
        "config": entry.readable,
        "created": entry.created.isoformat(),
        "stale": entry.stale,
        "toolchain": entry.toolchain,
        "source": entry.source,
        "metadata": entry.metadata,
        "measurements": entry.measurements,
    }
    return json.dumps(document, indent=1, default=str)
