"""Builds that configs need and that take a compiler minutes, and the number of compilers that fit on a machine."""

import abc
import contextlib
import os
import threading
from collections.abc import Iterable

import jax

from tilewright.ops.utils.processes import usable_cores


class Build(abc.ABC):
    """Something that must be compiled before a config can run and takes minutes, such as nvcc's shared objects.

    Equal builds stand for the same result, whoever made it. A build can be pickled, so that another process can make
    it.
    """

    @property
    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """The maximum memory that its compiler needs."""

    @abc.abstractmethod
    def is_made(self) -> bool:
        """True if this process can use the result already."""

    @abc.abstractmethod
    def is_installed(self) -> bool:
        """True if it came with an installed package, so that every process of a program has it."""

    @abc.abstractmethod
    def make(self, cancelled: threading.Event) -> None:
        """Compiles it, unless it exists, or waits for the result of another process that is compiling it.

        Raises:
          BuildError: it cannot be compiled.
          Cancelled: the event was set.
        """

    def command(self, op: str) -> str:
        """The command line that makes it, for calls of an op."""
        return f"tilewright build {op}"


class Cancelled(Exception):
    """A build was cancelled, by the user or because another one failed."""


def missing_builds(builds: Iterable[Build]) -> tuple[Build, ...]:
    """The builds whose absence rules a config out unless the user asked for it explicitly.

    In a program of several processes only installed builds count, since one process may have built what the others
    lack, and all must choose the same config.
    """
    needed = tuple(builds)
    if not needed:
        return ()
    if jax.process_count() > 1:
        return tuple(each for each in needed if not each.is_installed())
    return tuple(each for each in needed if not each.is_made())


def parallel_compilers(memory_bytes: Iterable[int], *, spared: int = 0) -> int:
    """The number of compilers to run at once: cores not spared, limited by how many of the largest fit into free
    memory.
    """
    largest = max(memory_bytes, default=1)
    return max(1, min(usable_cores() - spared, _free_memory() // max(1, largest)))


def _free_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
