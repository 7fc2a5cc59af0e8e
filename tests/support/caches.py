"""A cache on disk for the default executor of one test; a folder of tests takes the fixture into its conftest."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A persistent cache of its own for the default executor."""
    from tilewright.ops import executor

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    for cached in (executor.default_chain, executor.default_executor):
        cached.cache_clear()
    yield tmp_path / "configs"
    for cached in (executor.default_chain, executor.default_executor):
        cached.cache_clear()
