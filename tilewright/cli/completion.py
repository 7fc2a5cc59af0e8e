"""Words that the shell may complete: those known without importing JAX, for it asks at every press of a key."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import typer

from tilewright.cli.choices import DTYPES, ISOLATIONS
from tilewright.kernels import OPS

_ENTRY = re.compile(r"(.+)-([0-9a-f]{32})\.json", re.ASCII)


def targets(incomplete: str) -> list[str]:
    """Ops. Not functions: to know a module's names is to run it."""
    return _beginning(OPS, incomplete)


def dtypes(incomplete: str) -> list[str]:
    return _beginning(DTYPES, incomplete)


def isolations(incomplete: str) -> list[str]:
    return _beginning(ISOLATIONS, incomplete)


def devices(incomplete: str) -> list[str]:
    from tilewright.ops.utils.known_devices import KNOWN_DEVICES

    return _beginning(KNOWN_DEVICES, incomplete)


def entry_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the cache's entries, each with its op and direction: both stand in the names of the files."""
    folder = context.params.get("path") or _cache_folder()
    try:
        found = [_ENTRY.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    return [(each[2][:8], each[1]) for each in found if each and each[2].startswith(incomplete.lower())]


def _cache_folder() -> Path:
    """As `ops.utils.folders.cache_folder` has it, whose package imports JAX."""
    root = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_cache_dir("tilewright")
    return Path(os.path.expanduser(root), "configs")


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
