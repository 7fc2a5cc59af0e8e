"""Shell completion of words that are known without importing JAX, since it runs at every press of the key."""

import os
import re
from pathlib import Path

import typer

from tilewright.cli.choices import DTYPES
from tilewright.kernels import OPS

_ENTRY = re.compile(r"(.+)-([0-9a-f]{32})\.json", re.ASCII)


def targets(incomplete: str) -> list[str]:
    """Names of ops. Functions are not completed, since listing a module's names means running it."""
    return [word for word in OPS if word.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    return [word for word in DTYPES if word.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    from tilewright.ops.utils.known_devices import KNOWN_DEVICES

    return [word for word in KNOWN_DEVICES if word.startswith(incomplete)]


def entry_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the cache's entries, each with its op and direction, which are part of the file names."""
    folder = context.params.get("path") or _cache_folder()
    try:
        found = [_ENTRY.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    return [(each[2][:8], each[1]) for each in found if each and each[2].startswith(incomplete.lower())]


def _cache_folder() -> Path:
    """The folder that `ops.utils.folders.cache_folder` returns, whose package imports JAX."""
    root = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_cache_dir("tilewright")
    return Path(os.path.expanduser(root), "configs")
