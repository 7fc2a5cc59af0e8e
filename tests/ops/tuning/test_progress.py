"""Progress of a tuning in a terminal, in a notebook, and where no one sees it."""

import builtins
import contextlib
import importlib.machinery
import io
import re
import sys
import types

import jax.numpy as jnp
import pytest

import tilewright
from tilewright.ops import Candidate, ConfigCache, ConfigSelectorChain, Kernel, TunedCall
from tilewright.ops.tuning import events, progress
from tilewright.ops.tuning.progress import progress_for

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        return [ESCAPE.sub("", line).strip() for line in self.getvalue().replace("\r", "\n").splitlines()]

    def shown(self):
        """What is left on the screen, by a terminal that knows the few sequences that are written."""
        screen, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                screen += [""] * (row + 1 - len(screen))
            elif part.endswith("A") and part.startswith("\x1b["):
                row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                screen[row] = ""
            elif not part.startswith("\x1b"):
                screen[row] = screen[row][:column].ljust(column) + part + screen[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in screen if line.strip()]


class Blocks(Kernel):
    def run(self, x, *, cfg):
        return x + 1

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")


CALL = TunedCall(
    "attention", "forward", "key", "f32[8,[bold]8]",
    (Candidate("slow", (4.0, 4.0), heuristic=True), Candidate("quick", (2.0, 2.0)), Candidate("no", check="dropped")),
    1,
)  # fmt: skip
INVOCATION = types.SimpleNamespace(kernel=types.SimpleNamespace(name="attention"), direction="forward", key="key")
STEPS = (
    events.CallStarted(INVOCATION, CALL.shapes, 3),
    events.CandidateStarted(0, "slow"),
    events.CandidateDone(0, CALL.candidates[0], 4.0),
    events.CandidateStarted(1, "quick"),
    events.CandidateDone(1, CALL.candidates[1], 2.0),
    events.CandidateDone(2, Candidate("bad", error="x"), 2.0),
    events.CandidateDone(3, CALL.candidates[2], 2.0),
)
SUMMARY = "attention forward f32[8,[bold]8] → quick: 2 ms, 2.00× as fast as the default (2 tried)"


def test_a_terminal_has_a_live_line_and_then_a_summary():
    stream = Terminal()
    with progress_for(stream) as on_event:
        for event in STEPS:
            on_event(event)
        on_event("an event of another kind")
        on_event(events.CallTuned(CALL))
    text = "\n".join(stream.lines())
    assert "attention forward ━" in text
    assert "0/3" in text
    assert stream.shown() == [SUMMARY]


def test_the_live_line_says_how_far_it_is():
    fields = ("best", "failed", "trying", "building")
    bar = progress.event_bar(progress.plain_console(file=io.StringIO()), disable=True)
    on_event, said = progress.TuningProgress(bar).on_event, []
    for event in (*STEPS, events.BuildStarted("a kernel"), events.BuildEnded("a kernel", 1.0)):
        on_event(event)
        (task,) = [task for task in bar.tasks if task.visible]
        remarks = filter(None, (task.fields[name] for name in fields))
        said.append(", ".join((f"{task.description}: {task.completed:.0f}/{task.total}", *remarks)))
    title = "attention forward"
    assert said == [
        f"{title}: 0/3",
        f"{title}: 0/3, trying slow",
        f"{title}: 1/3, best 4 ms",
        f"{title}: 1/3, best 4 ms, trying quick",
        f"{title}: 2/3, best 2 ms",
        f"{title}: 3/3, best 2 ms, 1 failed",
        f"{title}: 4/3, best 2 ms, 1 failed",
        f"{title}: 4/3, best 2 ms, 1 failed, nvcc at work on 1",
        f"{title}: 4/3, best 2 ms, 1 failed",
    ]


def test_a_call_that_is_resumed_goes_on_where_it_was():
    other = types.SimpleNamespace(kernel=types.SimpleNamespace(name="norm"), direction="forward", key="other")
    bar = progress.event_bar(progress.plain_console(file=io.StringIO()), disable=True)
    on_event = progress.TuningProgress(bar).on_event
    for event in (*STEPS[:3], events.CallStarted(other, "f32[8]", 2), STEPS[0]):
        on_event(event)
    (task,) = [task for task in bar.tasks if task.visible]
    assert (task.description, task.completed, task.fields["best"]) == ("attention forward", 1, "best 4 ms")


def test_where_nobody_looks_a_command_has_the_permanent_lines():
    stream = io.StringIO()
    with progress_for(stream, plain=True) as on_event:
        for event in (*STEPS, events.CallTuned(CALL)):
            on_event(event)
    assert stream.getvalue().splitlines() == ["attention forward: 3 candidates", SUMMARY]


def test_a_call_that_is_known_leaves_no_line():
    stream = Terminal()
    with progress_for(stream) as on_event:
        on_event(events.CallTuned(TunedCall("a", "forward", "k", "s", CALL.candidates, 1, step="disk")))
    assert stream.shown() == []


def test_an_error_leaves_the_terminal_as_it_was():
    stream = Terminal()

    def interrupted():
        with progress_for(stream) as on_event:
            on_event(STEPS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.shown() == []
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize(
    ("stream", "environment"),
    [(io.StringIO, {}), (Terminal, {"CI": "true"}), (Terminal, {"TERM": "dumb"})],
    ids=["file", "continuous integration", "dumb terminal"],
)
def test_where_nobody_looks_nothing_is_written(stream, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = stream()
    with progress_for(made) as on_event:
        for event in (*STEPS, events.CallTuned(CALL)):
            on_event(event)
    assert made.getvalue() == ""


@pytest.mark.parametrize("name", ["ZMQInteractiveShell", "TerminalInteractiveShell"])
@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_shows_the_lines_in_its_output(name, widgets, monkeypatch):
    shown, lines = [], []

    class Output(contextlib.nullcontext):
        clear_output = staticmethod(lambda **_: None)
        close = staticmethod(lambda: None)

    def display(data):
        shown.append(data)
        if hasattr(data, "_repr_mimebundle_"):
            lines.append(data._repr_mimebundle_(include=("text/plain",), exclude=())["text/plain"])

    monkeypatch.setattr(builtins, "get_ipython", lambda: type(name, (), {})(), raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    widget_module = types.ModuleType("ipywidgets")
    widget_module.Output, widget_module.__spec__ = Output, importlib.machinery.ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", widget_module if widgets else None)
    stream = io.StringIO()
    with progress_for(stream) as on_event:
        for event in (*STEPS, events.CallTuned(CALL)):
            on_event(event)
    assert stream.getvalue() == ""
    if name == "TerminalInteractiveShell":
        assert shown == []
        return
    assert SUMMARY in "".join(lines)
    assert widgets == any(isinstance(each, Output) for each in shown)
    assert widgets != ("attention forward: 3 candidates" in "".join(lines))


def test_a_real_tuning_is_shown(tmp_path):
    kernel, stream = Blocks("shown_blocks"), Terminal()
    with progress_for(stream) as on_event:
        result = tilewright.tune(
            kernel, jnp.ones(3), on_event=on_event, chooser=ConfigSelectorChain(ConfigCache()), verify=False
        )
    (call,) = result
    budget, line = stream.shown()
    assert budget == "tuning a call, within 120 s (the budget), builds included"
    assert line.startswith(f"shown_blocks forward f32[3] → {call.winner.config}: {call.winner.time_ms:.3g} ms")
    assert line.endswith("(2 tried)")
