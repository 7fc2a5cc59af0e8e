"""Progress display of a tuning: a live line in a terminal or a notebook, else nothing."""

import contextlib
import importlib.util
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tilewright.ops.config.results import TunedCall
from tilewright.ops.tuning import events
from tilewright.ops.utils.describe import describe_config
from tilewright.ops.utils.text import milliseconds, plain_console


@contextlib.contextmanager
def progress_for(stream: IO[str] | None = None, *, plain: bool = False) -> Iterator[events.Event]:
    """Shows a tuning's progress while the context lasts.

    A terminal gets a live line, which is removed afterwards, and a permanent line for each measured call; a notebook
    gets the same in its output, or only the permanent lines if it lacks ipywidgets. Nothing is shown in files, pipes,
    dumb terminals, or continuous integration (``CI`` in the environment).

    Args:
      stream: the output stream; ``sys.stderr`` by default.
      plain: write the permanent lines also where a live line cannot be shown: for commands, whose output is read later.

    Yields:
      The ``on_event`` for ``tune``, ``Autotuner`` and ``ConfigSelectorChain``. It may be called from any thread;
      unknown events are ignored.
    """
    stream = sys.stderr if stream is None else stream
    terminal = is_interactive(stream)
    console = plain_console(file=stream, force_terminal=terminal, soft_wrap=True)
    live = importlib.util.find_spec("ipywidgets") is not None if console.is_jupyter else terminal
    columns = [f"{{task.fields[{name}]}}" for name in ("best", "failed", "trying", "building")]
    bar = event_bar(console, *columns, transient=True, disable=not live)
    with bar if live else contextlib.nullcontext():
        yield TuningProgress(bar).on_event if live or console.is_jupyter or plain else lambda event: None


def is_interactive(stream: IO[str]) -> bool:
    """True if a stream is a terminal that shows a live line."""
    if os.environ.get("CI") or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return False
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False


class TuningProgress:
    """Turns the events of a tuning into a bar task for each call, one of them visible, and permanent lines."""

    def __init__(self, bar: Progress):
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}
        self._task: TaskID | None = None
        self._title = ""
        self._failed: Counter[TaskID | None] = Counter()
        self._building: set[str] = set()

    def on_event(self, event: object) -> None:
        """Shows one event of a tuning; events of selection are ignored."""
        match event:
            case events.TuningStarted() if math.isfinite(event.budget_s):
                calls = "a call" if event.num_calls == 1 else f"{event.num_calls} calls"
                self._keep(f"tuning {calls}, within {event.budget_s:.0f} s (the budget), builds included")
            case events.CallStarted():
                self._begin(event)
            case events.CandidateStarted():
                self._show(trying=f"trying {describe_config(event.config)}")
            case events.CandidateDone() if event.candidate.failed:
                self._failed[self._task] += 1
                self._show(advance=1, failed=f"{self._failed[self._task]} failed")
            case events.CandidateDone() if event.best_ms is not None:
                self._show(advance=1, best=f"best {milliseconds(event.best_ms)}")
            case events.CandidateDone():
                self._show(advance=1)
            case events.CallTuned() if event.call.step == "measured":
                self._hide()
                self._keep(summary(event.call))
            case events.CallLeftOut():
                name = f"{event.inv.kernel.name} {event.inv.direction} {event.shapes}"
                self._keep(f"{name}: not tuned, {event.reason}")
            case events.BuildStarted():
                self._building.add(event.build)
                self._show()
            case events.BuildEnded():
                self._building.discard(event.build)
                if event.error:
                    self._keep(f"{event.build} could not be built: {event.error.partition(chr(10))[0]}")
                self._show()
            case events.BuildsLeft():
                self._keep(f"still being built, for the next tuning: {', '.join(event.builds)}")

    def _begin(self, event: events.CallStarted) -> None:
        self._hide()
        title, total = f"{event.inv.kernel.name} {event.inv.direction}", event.num_candidates
        if event.inv.key not in self._tasks:
            fields: dict[str, Any] = dict.fromkeys(("best", "failed", "trying", "building"), "")
            self._tasks[event.inv.key] = self._bar.add_task(title, total=total, **fields)
        self._task = self._tasks[event.inv.key]
        self._show()
        if self._bar.disable and title != self._title:  # no live line says it
            self._keep(f"{title}: {total} candidates")
        self._title = title

    def _show(self, *, advance: int = 0, trying: str = "", **changes: str) -> None:
        if self._task is not None:
            building = f"nvcc at work on {len(self._building)}" if self._building else ""
            fields: dict[str, Any] = {"trying": trying, "building": building, **changes}
            self._bar.update(self._task, advance=advance, visible=True, **fields)

    def _hide(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, visible=False)

    def _keep(self, text: str) -> None:
        self._bar.console.print(text)


def summary(call: TunedCall) -> str:
    """Describes a measured call in one line."""
    tried = sum(1 for candidate in call.candidates if not candidate.dropped)
    speedup = f", {call.speedup:.2f}× as fast as the default" if call.speedup else ""
    chosen = f"{describe_config(call.winner.config)}: {milliseconds(call.winner.time_ms)}"
    out = f"; left out: {'; '.join(f'{name} ({why})' for name, why in call.left_out.items())}" if call.left_out else ""
    return f"{call.op} {call.direction} {call.shapes} → {chosen}{speedup} ({tried} tried{out})"


def event_bar(console: Console, *fields: str, transient: bool = False, disable: bool = False) -> Progress:
    """A progress bar.

    Args:
      fields: fields of a task, shown after the count: templates such as ``"{task.fields[running]}"``.
      transient: remove the bar at its end.
      disable: show nothing.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *(TextColumn(field, style="dim", markup=False) for field in fields),
        console=console,
        transient=transient,
        disable=disable,
    )
