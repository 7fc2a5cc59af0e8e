"""Compiled programs for work outside of any trace, with the config choices that each contains."""

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax

from tilewright.ops.config.chooser import ConfigChooser, Selection
from tilewright.ops.config.context import Overrides
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.lowering import ahead
from tilewright.ops.utils.target import active_target

# A program keeps its executables alive, so only the most recently used ones are kept.
MAX_PROGRAMS = 512

Decision = tuple[Invocation[Any, Any], Selection]
_recorders = threading.local()


def record(inv: Invocation[Any, Any], selection: Selection) -> None:
    """Adds a choice to every ``Decisions`` in force in this thread."""
    for decisions in getattr(_recorders, "stack", ()):
        decisions.append((inv, selection))


class Decisions(list[Decision]):
    """Collects every choice that this thread makes while the context lasts."""

    def __enter__(self) -> "Decisions":
        _recorders.stack = (*getattr(_recorders, "stack", ()), self)
        return self

    def __exit__(self, *exception: object) -> None:
        _recorders.stack = _recorders.stack[:-1]


class Program:
    """A jitted function, and the choices made when it was lowered."""

    def __init__(self, function: Callable[..., Any], version: Hashable):
        self._jitted = jax.jit(function)
        self._version = version
        self._decisions = Decisions()

    def run(self, *operands: object) -> Any:
        with self._decisions:
            return self._jitted(*operands)

    def compile(self, *structs: object) -> None:
        """Compiles for arguments of these shapes without running, for the target in force if there is one."""
        target = active_target()
        with self._decisions:
            lowered = self._jitted.lower(*structs)
            ahead.wait()  # otherwise XLA would compile the same kernels at the same time
            lowered.compile(device_assignment=None if target is None else target.devices)

    def valid_for(self, version: Hashable, chooser: ConfigChooser, overrides: Overrides) -> bool:
        """True if every choice would still be the same; checked again only after a cache has changed."""
        if version == self._version:
            return True
        for inv, selection in self._decisions:
            if selection.step != "explicit" and chooser.lookup(inv, overrides=overrides).config != selection.config:
                return False
        self._version = version
        return True


class Programs:
    """The programs of one executor, or of all calls that a transformation evaluates eagerly."""

    def __init__(self) -> None:
        self._programs: collections.OrderedDict[Hashable, Program] = collections.OrderedDict()
        self._lock = threading.RLock()  # re-entrant: a heuristic may call a kernel

    def get(
        self, key: Hashable, chooser: ConfigChooser, overrides: Overrides, make: Callable[[], Callable[..., Any]]
    ) -> Program:
        """The program of a key, compiled anew if one of its configs would no longer be chosen."""
        version = (chooser.version, overrides.version)
        with self._lock:
            program = self._programs.get(key)
            if program is not None and program.valid_for(version, chooser, overrides):
                self._programs.move_to_end(key)
                return program
            program = self._programs[key] = Program(make(), version)
            while len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
            return program
