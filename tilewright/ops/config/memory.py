"""The in-memory cache of configs."""

import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import Any


class ConfigCache:
    """Maps keys to configs for the life of the process; safe to share between threads.

    Each entry remembers its origin: ``"user"`` for a plain `put`, else the step of the selection chain that stored it
    (``"heuristic"``, ``"autotune"``, ``"disk"``).
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Any, str]] = {}
        self._version = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """A number that grows whenever the contents change, and only then."""
        return self._version

    def put(self, key: Hashable, cfg: object, *, origin: str = "user") -> None:
        """Stores ``cfg`` under ``key``, replacing an earlier entry."""
        entry = (cfg, origin)
        with self._lock:
            previous = self._entries.get(key)
            # An equal config of another type, such as True instead of 1, counts as a change.
            if previous is None or type(previous[0]) is not type(cfg) or previous != entry:
                self._entries[key] = entry
                self._version += 1

    def get(self, key: Hashable) -> Any | None:
        """The config under ``key``, or ``None``."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def origin(self, key: Hashable) -> str | None:
        """The origin of the config under ``key``, or ``None`` if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Removes every entry."""
        with self._lock:
            if self._entries:
                self._entries.clear()
                self._version += 1

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Removes the entries of some keys; missing ones are ignored."""
        with self._lock:
            present = [key for key in keys if key in self._entries]
            for key in present:
                del self._entries[key]
            self._version += bool(present)

    def items(self) -> list[tuple[Hashable, Any]]:
        """A snapshot of the keys and configs."""
        with self._lock:
            return [(key, cfg) for key, (cfg, _) in self._entries.items()]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries)"
