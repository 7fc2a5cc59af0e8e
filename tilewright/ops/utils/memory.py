"""Bounded in-process caches that are cleared together with JAX's own."""

import collections
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from jax._src import util as jax_util

Value = TypeVar("Value")

_CACHES: "weakref.WeakSet[LruCache[object]]" = weakref.WeakSet()


def clear_all() -> None:
    """Clears every such cache and leaves JAX's own as they are."""
    for memory in list(_CACHES):
        memory.cache_clear()


class LruCache(Generic[Value]):
    """A least-recently-used cache, cleared by ``jax.clear_caches()``.

    Args:
      name: the name under which JAX lists the cache.
      limit: maximum of the sum of the values' sizes.
      size: size of a value; by default each counts as one.
    """

    def __init__(self, name: str, limit: int, size: Callable[[Value], int] = lambda value: 1) -> None:
        self._limit = limit
        self._size = size
        self._total = 0
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()
        self._lock = threading.Lock()
        jax_util.register_cache(self, name)
        _CACHES.add(self)  # type: ignore[arg-type]

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Hashable, value: Value) -> Value:
        """Stores a value unless another thread stored one first; returns the stored one."""
        with self._lock:
            if key in self._values:
                return self._values[key]
            self._values[key] = value
            self._total += self._size(value)
            while self._total > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest)
            return value

    # The interface by which JAX clears and inspects registered caches.

    def cache_clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._total = 0

    def cache_info(self) -> str:
        return f"{len(self._values)} values, {self._total} of {self._limit}"

    def cache_keys(self) -> list[Hashable]:
        return list(self._values)
