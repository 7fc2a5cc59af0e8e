"""Compiled programs for work that starts outside any trace, kept as long as every choice in them stands."""

import collections
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax

from tilewright.ops.config.context import Overrides

if TYPE_CHECKING:
    from tilewright.ops.config.selection import ConfigChooser, Selection
    from tilewright.ops.core.kernel import Invocation

    Decision = tuple[Invocation[Any, Any], Selection]

# A program keeps its executable alive; the least recently used goes when there are more.
MOST_PROGRAMS = 512

_recorders = threading.local()


def record(inv: "Invocation[Any, Any]", selection: "Selection") -> None:
    """Tells all ``Decisions`` contexts of this thread what was chosen."""
    for decisions in getattr(_recorders, "stack", ()):
        decisions.append((inv, selection))


class Decisions(list["Decision"]):
    """Collects every choice that this thread makes while the context lasts."""

    def __enter__(self) -> "Decisions":
        _recorders.stack = (*getattr(_recorders, "stack", ()), self)
        return self

    def __exit__(self, *exception: object) -> None:
        _recorders.stack = _recorders.stack[:-1]


class Program:
    """A jitted function and the choices that went into it."""

    def __init__(self, function: Callable[..., Any], version: Any):
        self._jitted = jax.jit(function)
        self._version = version
        self._decisions = Decisions()

    def run(self, *operands: Any) -> Any:
        with self._decisions:
            return self._jitted(*operands)

    def compile(self, *operands: Any) -> None:
        with self._decisions:
            self._jitted.lower(*operands).compile()

    def valid_for(self, version: Any, chooser: "ConfigChooser", overrides: Overrides) -> bool:
        """Whether every choice would come out the same now; asked again only when a cache has changed."""
        if version == self._version:
            return True
        for inv, selection in list(self._decisions):
            if selection.step != "explicit" and chooser.lookup(inv, overrides=overrides).config != selection.config:
                return False
        self._version = version
        return True


class Programs:
    """The programs that were used last, by whatever tells two of them apart; safe to share between threads."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Hashable, Program] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        chooser: "ConfigChooser",
        overrides: Overrides,
        function: Callable[[], Callable[..., Any]],
    ) -> Program:
        """The program of a key, made anew where there is none or where a cache now says something else.

        Args:
          overrides: those in force.
          function: gives the function to compile.
        """
        version = (chooser.version, overrides.version)
        with self._lock:
            program = self._known.get(key)
            if program is not None and program.valid_for(version, chooser, overrides):
                self._known.move_to_end(key)
                return program
            program = self._known[key] = Program(function(), version)
            self._known.move_to_end(key)
            while len(self._known) > MOST_PROGRAMS:
                self._known.popitem(last=False)
        return program
