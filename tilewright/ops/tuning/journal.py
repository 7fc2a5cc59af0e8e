"""The records that earlier tunings of a call left on disk: failed candidates, and measurements of killed tunings."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.ops.config.persistent import Entry, PersistentCache
from tilewright.ops.config.selection import ConfigSelectorChain, measured_sources
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.kernel import Invocation

FOLDER = "unfinished"


def unfinished(cache: PersistentCache) -> PersistentCache:
    """The cache of unfinished tunings beside a cache of results."""
    return PersistentCache(cache.path / FOLDER)


class Journal:
    """The record of one call's tuning, updated while it runs and removed when its result is stored.

    Without a disk cache nothing is recorded. Records of another toolchain or source of any candidate are ignored.
    """

    def __init__(self, chooser: ConfigSelectorChain, inv: Invocation[Any, Any], configs: Sequence[Any]):
        self._inv, self._configs = inv, configs
        # Read before anything is measured: sources may change while it is.
        self._sources = measured_sources(inv, configs)
        self._results = chooser.persistent
        self._unfinished = None if self._results is None else unfinished(self._results)

    def known(self) -> dict[int, Candidate]:
        """The known candidates by index: measurements of a killed tuning, and all failures."""
        if self._results is None or self._unfinished is None:
            return {}
        recorded = [
            *(candidate for candidate in self._candidates(self._results) if candidate.failed),
            # A drop depends on the times of other candidates, which may be different ones this time.
            *(candidate for candidate in self._candidates(self._unfinished) if not candidate.dropped),
        ]
        found = {}
        for candidate in recorded:
            for index, config in enumerate(self._configs):
                if type(config) is type(candidate.config) and config == candidate.config:
                    found[index] = candidate
        return found

    def record(self, found: Iterable[Candidate]) -> None:
        """Stores the outcomes so far."""
        if self._unfinished is None:
            return
        candidates = list(found)
        try:
            self._unfinished.put(
                self._inv.key,
                candidates[0].config,
                measurements=[candidate.fields() for candidate in candidates],
                metadata={
                    "op": self._inv.kernel.name,
                    "direction": self._inv.direction,
                    "sources": self._sources,
                },
            )
        except TypeError:  # the config has no JSON form; storing the result will report it
            self._unfinished = None

    def finish(self) -> None:
        """Removes the record, after the result was stored."""
        if self._unfinished is not None:
            self._unfinished.remove(self._inv.key)
            with contextlib.suppress(OSError):  # other calls are unfinished
                self._unfinished.path.rmdir()

    def _candidates(self, cache: PersistentCache) -> list[Candidate]:
        entry: Entry | None = cache.entry(self._inv.key)
        if entry is None or entry.stale or entry.metadata.get("sources") != self._sources:
            return []
        try:
            return [Candidate(**fields) for fields in entry.measurements]
        except TypeError:  # written by another version, with other fields
            return []
