"""A tuning's events as a progress bar with the best time so far, and its result as a table."""

import abc
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tilewright.cli.output import milliseconds, table
from tilewright.ops.execution import events
from tilewright.ops.execution.results import AutotuningResult, TunedCall
from tilewright.ops.utils.describe import describe_config, describe_key

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class EventProgress(abc.ABC):
    """A progress bar as a context manager, whose ``on_event`` goes to what it shows the progress of.

    Args:
      fields: of a task, shown after the count: templates such as ``"{task.fields[best]}"``.
    """

    def __init__(self, console: "Console", *fields: str):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            *map(TextColumn, fields),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @abc.abstractmethod
    def on_event(self, event: Any) -> None:
        """Shows one event."""


class TuningProgress(EventProgress):
    """Of ``tilewright.tune``; keeps the calls that were finished.

    Attributes:
      calls: what was tuned so far, in order.
    """

    def __init__(self, console: "Console"):
        super().__init__(console, "{task.fields[best]}", "[dim]{task.fields[trying]}")
        self.calls: list[TunedCall] = []
        self._task: Any = None

    def on_event(self, event: Any) -> None:
        """Shows one event of a tuning; those of selection are let pass."""
        match event:
            case events.CallStarted():
                name = f"{event.inv.kernel.name} {event.inv.direction}"
                self._task = self._bar.add_task(name, total=event.num_candidates, best="", trying="")
            case events.CandidateStarted():
                self._bar.update(self._task, trying=describe_config(event.config))
            case events.CandidateMeasured():
                self._bar.update(self._task, advance=1, best=f"best {milliseconds(event.best_ms)}", trying="")
            case events.CandidateFailed() | events.CandidateDropped():
                self._bar.update(self._task, advance=1, trying="")
            case events.CallTuned():
                self._finish(event.call)

    def _finish(self, call: TunedCall) -> None:
        self.calls.append(call)
        if self._task is not None and call.step == "measured":
            self._bar.update(self._task, best=f"best {milliseconds(call.winner.time_ms)}", trying="")
        self._task = None


def result_table(result: AutotuningResult, title: str = "tuned calls") -> "Table":
    """One row for each call: what was chosen, how it compares with the heuristic, and where that is known from."""
    from rich.markup import escape

    figures = ("time", "heuristic", "speedup", "tried")
    made = table(title, "call, and what it will run with", *figures, "from", right=figures)
    for call in result:
        heuristic = call.heuristic
        failed = sum(1 for candidate in call.candidates if candidate.failed)
        dropped = sum(1 for candidate in call.candidates if candidate.dropped)
        arguments, chosen = escape(describe_key(call.key)), escape(describe_config(call.winner.config))
        made.add_row(
            f"{call.op} {call.direction}\n[dim]{arguments}[/dim]\n→ [bold]{chosen}[/bold]",
            milliseconds(call.winner.time_ms),
            milliseconds(heuristic.time_ms if heuristic else None),
            f"{call.speedup:.2f}×" if call.speedup else "–",
            f"{len(call.candidates) - dropped}"
            + (f", {failed} failed" if failed else "")
            + (f", {dropped} dropped" if dropped else ""),
            call.step if call.complete else f"{call.step}, cut short",
        )
    return made
