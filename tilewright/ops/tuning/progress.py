"""Progress display of a tuning: a live line in a terminal or a notebook, else nothing."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from tilewright.ops.config.results import TunedCall
from tilewright.ops.tuning import events
from tilewright.ops.utils.describe import describe_config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NOTEBOOK_INTERVAL_S = 0.25
"""Minimum time between two updates of a notebook's line, each of which is a message to the browser."""


@contextmanager
def progress_for(stream: IO[str] | None = None, *, plain: bool = False) -> Iterator[events.Event]:
    """Shows a tuning's progress while the context lasts.

    A terminal gets a live line, which is removed afterwards, and a permanent line for each measured call; a notebook
    gets the same in its output. Nothing is shown in files, pipes, dumb terminals, continuous integration (``CI`` in the
    environment), or without rich.

    Args:
      stream: the output stream; ``sys.stderr`` by default.
      plain: write the permanent lines also where a live line cannot be shown: for commands, whose output is read later.

    Yields:
      The ``on_event`` for ``tune``, ``Autotuner`` and ``ConfigSelectorChain``. It may be called from any thread;
      unknown events are ignored.
    """
    stream = sys.stderr if stream is None else stream
    display = _notebook_display()
    if display is not None:
        yield TuningProgress(_NotebookLine(display)).on_event
    elif is_interactive(stream) and (bar := _bar(stream)) is not None:
        with bar:
            yield TuningProgress(_TerminalLine(bar)).on_event
    elif plain:
        yield TuningProgress(_PlainLine(stream)).on_event
    else:
        yield _ignore


def _ignore(event: object) -> None:
    pass


def is_interactive(stream: IO[str]) -> bool:
    """True if a stream is a terminal that shows a live line."""
    if os.environ.get("CI") or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return False
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False


class Line(Protocol):
    """One line that changes, and permanent lines above it."""

    def show(self, title: str, done: int, total: int, remark: str) -> None: ...

    def keep(self, text: str) -> None: ...


@dataclasses.dataclass(slots=True)
class _CallProgress:
    """Progress of one call."""

    title: str
    total: int
    done: int = 0
    failed: int = 0
    best_ms: float | None = None


class TuningProgress:
    """Turns the events of a tuning into lines."""

    def __init__(self, line: Line):
        self._line = line
        self._calls: dict[str, _CallProgress] = {}
        self._call = _CallProgress("", 0)
        self._building: list[str] = []

    def on_event(self, event: object) -> None:
        """Shows one event of a tuning; events of selection are ignored."""
        match event:
            case events.TuningStarted() if math.isfinite(event.budget_s):
                calls = "a call" if event.num_calls == 1 else f"{event.num_calls} calls"
                self._line.keep(f"tuning {calls}, within {event.budget_s:.0f} s (the budget), builds included")
            case events.CallStarted() | events.CallResumed():
                title = f"{event.inv.kernel.name} {event.inv.direction}"
                self._call = self._calls.setdefault(event.inv.key, _CallProgress(title, event.num_candidates))
                self._show("")
            case events.CandidateStarted():
                self._show(f"trying {describe_config(event.config)}")
            case events.CandidateMeasured():
                self._call.done, self._call.best_ms = self._call.done + 1, event.best_ms
                self._show("")
            case events.CandidateFailed():
                self._call.done, self._call.failed = self._call.done + 1, self._call.failed + 1
                self._show("")
            case events.CandidateDropped() | events.CandidateLeftOut():
                self._call.done += 1
                self._show("")
            case events.CallTuned() if event.call.step == "measured":
                self._line.keep(summary(event.call))
            case events.CallLeftOut():
                name = f"{event.inv.kernel.name} {event.inv.direction} {event.shapes}"
                self._line.keep(f"{name}: not tuned, {event.reason}")
            case _:
                self._on_build(event)

    def _on_build(self, event: object) -> None:
        match event:
            case events.BuildStarted():
                self._building.append(event.build)
                self._show("")
            case events.BuildMade() | events.BuildFailed():
                if event.build in self._building:
                    self._building.remove(event.build)
                if isinstance(event, events.BuildFailed):
                    self._line.keep(f"{event.build} could not be built: {event.error.partition(chr(10))[0]}")
                self._show("")
            case events.BuildsLeft():
                self._line.keep(f"still being built, for the next tuning: {', '.join(event.builds)}")

    def _show(self, trying: str) -> None:
        call = self._call
        best = "" if call.best_ms is None else f"best {milliseconds(call.best_ms)}"
        failed = f"{call.failed} failed" if call.failed else ""
        building = f"nvcc at work on {len(self._building)}" if self._building else ""
        remark = ", ".join(filter(None, (best, failed, trying, building)))
        self._line.show(call.title, call.done, call.total, remark)


def summary(call: TunedCall) -> str:
    """Describes a measured call in one line."""
    tried = sum(1 for candidate in call.candidates if not candidate.dropped)
    speedup = f", {call.speedup:.2f}× as fast as the default" if call.speedup else ""
    chosen = f"{describe_config(call.winner.config)}: {milliseconds(call.winner.time_ms)}"
    out = f"; left out: {'; '.join(f'{name} ({why})' for name, why in call.left_out.items())}" if call.left_out else ""
    return f"{call.op} {call.direction} {call.shapes} → {chosen}{speedup} ({tried} tried{out})"


def milliseconds(time_ms: float | None) -> str:
    """Formats a time with three significant digits; a dash if there is none."""
    if time_ms is None:
        return "–"
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:.0f} ms"


def plain_console(**options: Any) -> "Console":
    """A console that prints text verbatim: the brackets of shapes and paths are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def event_bar(console: "Console", *fields: str, transient: bool = False) -> "Progress":
    """A progress bar.

    Args:
      fields: fields of a task, shown after the count: templates such as ``"{task.fields[remark]}"``.
      transient: remove the bar at its end.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *(TextColumn(field, style="dim", markup=False) for field in fields),
        console=console,
        transient=transient,
    )


def _bar(stream: IO[str]) -> "Progress | None":
    """A terminal's progress bar; ``None`` if rich is not installed."""
    try:
        console = plain_console(file=stream, force_terminal=True, force_jupyter=False)
    except ImportError:
        return None
    return event_bar(console, "{task.fields[remark]}", transient=True)


class _PlainLine:
    """Permanent lines only: names each call when it begins."""

    def __init__(self, stream: IO[str]):
        self._stream = stream
        self._title = ""

    def show(self, title: str, done: int, total: int, remark: str) -> None:
        if title and title != self._title:
            self._title = title
            self.keep(f"{title}: {total} candidates")

    def keep(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _TerminalLine:
    """A live line by rich, which also prints the output of others above the line."""

    def __init__(self, bar: "Progress"):
        self._bar = bar
        self._task = bar.add_task("tuning", total=None, remark="", visible=False)
        self._title = ""

    def show(self, title: str, done: int, total: int, remark: str) -> None:
        if title != self._title:  # also after a permanent line: the clock restarts
            self._bar.reset(self._task, total=total, description=title, visible=True)
            self._title = title
        self._bar.update(self._task, completed=done, remark=remark)

    def keep(self, text: str) -> None:
        self._bar.update(self._task, visible=False)
        self._bar.console.print(text)
        self._title = ""


class _NotebookLine:
    """A live line by IPython's display, whose output can be replaced later."""

    def __init__(self, display: Callable[..., Any]):
        self._display = display
        self._handle: Any = None
        self._kept: list[str] = []
        self._shown_at = 0.0

    def show(self, title: str, done: int, total: int, remark: str) -> None:
        now = time.monotonic()
        if done and now - self._shown_at < NOTEBOOK_INTERVAL_S:
            return
        self._shown_at = now
        self._put(f"{title}: {done}/{total}{', ' if remark else ''}{remark}")

    def keep(self, text: str) -> None:
        self._kept.append(text)
        self._put()

    def _put(self, *last: str) -> None:
        bundle = {"text/plain": "\n".join((*self._kept, *last))}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _notebook_display() -> Callable[..., Any] | None:
    """``IPython.display.display`` if this process is the kernel of a notebook; imports nothing to find out."""
    ipython, display = sys.modules.get("IPython"), sys.modules.get("IPython.display")
    find_shell = getattr(ipython, "get_ipython", None)
    shell = None if find_shell is None else find_shell()
    # Colab's class is derived from this one.
    if not any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__):
        return None
    return getattr(display, "display", None)
