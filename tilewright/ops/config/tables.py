"""The tuned tables that ship inside the package: one ``AutotuningResult`` in JSON per file."""

import functools
import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewright.ops.config.cache import ConfigCache

logger = logging.getLogger(__name__)


def load_tables(device: str, folder: Path | None = None) -> ConfigCache:
    """The configs of every table that was measured on a device; a table that cannot be read is logged and left out."""
    place: Any = files("tilewright").joinpath("tables") if folder is None else folder
    merged = ConfigCache()
    if place.is_dir():
        for file in sorted(place.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".json"):
                for key, cfg in _read(file, device).items():
                    merged.put(key, cfg, origin="shipped")
    return merged


@functools.lru_cache(maxsize=64)
def _read(file: Any, device: str) -> dict[str, Any]:
    from tilewright.ops.execution.results import AutotuningResult  # results are made of caches

    try:
        result = AutotuningResult.from_json(file.read_text())
    except (OSError, ValueError) as error:
        logger.warning("the tuned table %s cannot be read: %s", file.name, error)
        return {}
    return result.configs if result.device == device else {}
