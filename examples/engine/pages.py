"""The pages of the cache: which are free, who reads which, and whose text is still there to be read again."""

import collections
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def page_keys(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """A key of each full page of a text, which stands for all text up to the page's end."""
    key = b""
    for page in itertools.batched(tokens, page_size):
        if len(page) == page_size:
            yield (key := next_key(key, page))


def next_key(key: bytes, page: Sequence[int]) -> bytes:
    """The key of a full page behind the one with a key, which is empty for the first page."""
    return hashlib.sha256(key + np.asarray(page, np.int32).tobytes()).digest()


class PagePool:
    """Hands out pages, and keeps full ones that nobody reads until their room is needed.

    Requests share full pages alone, into which nobody writes again.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = collections.deque(range(num_pages))
        self._readers = [0] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Pages with a key that nobody reads, least recently used first."""

    @property
    def available(self) -> int:
        """Pages that ``take`` can give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that have a reader."""
        return self.num_pages - self.available

    def take(self, count: int) -> list[int]:
        """Pages without text. Raises ``MemoryError``, and takes none, if there are fewer."""
        if count > self.available:
            raise MemoryError(f"{count} pages were asked for, {self.available} of {self.num_pages} are left")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._by_key[self._key_of.pop(page)]
        self._readers[page] = 1
        return page

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning of a text, less its last token; the caller becomes their reader."""
        found = []
        for key in page_keys(tokens[:-1], self.page_size):
            page = self._by_key.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._readers[page] += 1
            found.append(page)
        return found

    def publish(self, page: int, key: bytes) -> None:
        """Makes a full page known to ``share``. The first page of a key stays the one that is known."""
        if key not in self._by_key and page not in self._key_of:
            self._by_key[key], self._key_of[page] = page, key

    def release(self, pages: Iterable[int]) -> None:
        """Ends the reading of pages. Later pages of a text are given up before earlier ones."""
        for page in reversed(list(pages)):
            self._readers[page] -= 1
            if self._readers[page] < 0:
                raise ValueError(f"page {page} has no reader")
            if self._readers[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)
