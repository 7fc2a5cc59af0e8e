"""Builds that take a compiler minutes and that configs need, and how many such compilers fit on a machine."""

import abc
import contextlib
import os
import threading
from collections.abc import Iterable

import jax

from tilewright.ops.utils.processes import usable_cores


class Build(abc.ABC):
    """Something that must be compiled before a config can run, in minutes rather than seconds: nvcc's shared objects.

    Equal builds are the same thing, whoever made it. A build can be pickled, for another process may make it.
    """

    @property
    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Memory that its compiler takes at most."""

    @abc.abstractmethod
    def is_made(self) -> bool:
        """Tells if it is there, for this process."""

    @abc.abstractmethod
    def is_installed(self) -> bool:
        """Tells if it came with a package, so that every process of a program has it."""

    @abc.abstractmethod
    def make(self, cancelled: threading.Event) -> None:
        """Compiles it, unless it is there or another process is at it, whose result is waited for.

        Raises:
          BuildError: it cannot be compiled.
          Cancelled: the event was set.
        """

    def command(self, op: str) -> str:
        """The command line that makes it, for calls of an op."""
        return f"tilewright build {op}"


class Cancelled(Exception):
    """A build was given up because another failed, or by the user."""


def missing_builds(builds: Iterable[Build]) -> tuple[Build, ...]:
    """Those for want of which a config is not chosen unless somebody asked for it.

    In a program of several processes what one of them has built counts for nothing, for the others may lack it, and all
    must choose alike.
    """
    wanted = tuple(builds)
    if not wanted:
        return ()
    if jax.process_count() > 1:
        return tuple(each for each in wanted if not each.is_installed())
    return tuple(each for each in wanted if not each.is_made())


def parallel_compilers(memory_bytes: Iterable[int], *, spared: int = 0) -> int:
    """As many compilers as there are cores, less those spared, and as many of the largest as fit into free memory."""
    largest = max(memory_bytes, default=1)
    return max(1, min(usable_cores() - spared, _free_memory() // max(1, largest)))


def _free_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
