"""What earlier tunings of a call left on disk: candidates that failed, and what a killed one had measured."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.ops.config.persistent import Entry, PersistentCache
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.kernel import Invocation

FOLDER = "unfinished"


def unfinished(cache: PersistentCache) -> PersistentCache:
    """Where the tunings that write to a cache keep what they have not finished."""
    return PersistentCache(cache.path / FOLDER)


class Journal:
    """The record of one call's tuning, kept up to date while it runs and removed when its result is stored.

    Without a disk cache there is none. What another toolchain or another source measured does not count.
    """

    def __init__(self, chooser: ConfigSelectorChain, inv: Invocation[Any, Any], source: str):
        self._inv, self._source = inv, source
        self._results = chooser.persistent
        self._unfinished = None if self._results is None else unfinished(self._results)

    def known(self, configs: Sequence[Any]) -> dict[int, Candidate]:
        """What is known of candidates, by their index: measurements of a killed tuning, and all failures."""
        if self._results is None or self._unfinished is None:
            return {}
        said = [
            *(candidate for candidate in self._candidates(self._results) if candidate.failed),
            # Whether one may be dropped depends on what the others took, which may be other ones this time.
            *(candidate for candidate in self._candidates(self._unfinished) if not candidate.dropped),
        ]
        found = {}
        for candidate in said:
            for index, config in enumerate(configs):
                if type(config) is type(candidate.config) and config == candidate.config:
                    found[index] = candidate
        return found

    def record(self, found: Iterable[Candidate]) -> None:
        """Keeps what was found so far."""
        if self._unfinished is None:
            return
        candidates = list(found)
        try:
            self._unfinished.put(
                self._inv.key,
                candidates[0].config,
                measurements=[candidate.fields() for candidate in candidates],
                metadata={"op": self._inv.kernel.name, "direction": self._inv.direction},
                source=self._source,
            )
        except TypeError:  # a config without a JSON form; storing the result will say so
            self._unfinished = None

    def finish(self) -> None:
        """The result is stored: what is unfinished is no longer needed."""
        if self._unfinished is not None:
            self._unfinished.remove(self._inv.key)
            with contextlib.suppress(OSError):  # others are not finished
                self._unfinished.path.rmdir()

    def _candidates(self, cache: PersistentCache) -> list[Candidate]:
        entry: Entry | None = cache.entry(self._inv.key, source=self._source)
        if entry is None or entry.stale:
            return []
        try:
            return [Candidate(**said) for said in entry.measurements]
        except TypeError:  # written by another version, with other fields
            return []
