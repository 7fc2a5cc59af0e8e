"""A plot of a call's candidates: every sample a dot, every median a bar, fastest first."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tilewright.cli.report.calls import ReportedCall
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.utils.text import milliseconds

# If the slowest sample exceeds the fastest by more than this factor, the axis is logarithmic to separate the fast ones.
LOG_FROM = 6.0
# Text stays text, ids repeat, and dots are not taken for steps of one line.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tilewright", "path.simplify": False,
    "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
}  # fmt: skip


def field_plot(reported: ReportedCall, field: Sequence[Candidate], name: str) -> str:
    """Draws the candidates of a call that have a time, in the given order, as SVG.

    Args:
      name: the beginning of every id in it.
    """
    with style.context(["default", _SETTINGS]):
        figure = Figure(figsize=(10, 3.4))
        axes = figure.add_axes((0.08, 0.13, 0.9, 0.72))
        axes.set_xlim(0.5, len(field) + 0.5)
        _draw_axes(axes, [sample for candidate in field for sample in candidate.samples_ms])
        columns = [(x, candidate, candidate.time_ms or 0.0) for x, candidate in enumerate(field, 1)]
        dots = {(x, x, sample): None for x, c, time_ms in columns for sample in (*c.samples_ms, time_ms)}
        axes.plot(*_strokes(dots), color="#5d7a99", alpha=0.45, linewidth=4, solid_capstyle="round", gid="samples")
        medians = ((x - 0.36, x + 0.36, time_ms) for x, c, time_ms in columns if c.eligible)
        axes.plot(*_strokes(medians), color="#1c2430", linewidth=2, solid_capstyle="butt", gid="medians")
        if wrong := [(x, time_ms) for x, c, time_ms in columns if not c.eligible]:
            axes.plot(*zip(*wrong, strict=True), "x", color="#b3261e", gid="wrong")
        chosen, default = reported.call.winner, reported.call.heuristic
        label = "default, kept" if default is chosen else "chosen"
        for x, candidate, time_ms in columns:
            if candidate is chosen:
                axes.plot(x, time_ms, "o", color="#0b62c4", markersize=8)
                _label(axes, x, 1.03, f"{label}: {milliseconds(time_ms)}", "#0b62c4")
            elif candidate is default:
                axes.plot(x, time_ms, "s", color="#9a5b00", markersize=8, markerfacecolor="none")
                _label(axes, x, 1.1, f"default: {milliseconds(time_ms)}", "#9a5b00")
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    svg = written.getvalue()
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    # Hundredths of a point are enough.
    svg = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    return re.sub(r"\s*\n\s*", " ", svg)


def _draw_axes(axes: Axes, times_ms: Sequence[float]) -> None:
    is_log = max(times_ms) / min(times_ms) > LOG_FROM
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time_ms, _: f"{time_ms:.4g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("ms per call, log scale" if is_log else "ms per call")
    axes.set_xlabel("candidates, fastest first", loc="right")
    axes.grid(axis="y", color="#d5dae1")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _strokes(strokes: Iterable[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Horizontal strokes as one path, which takes a tenth of the bytes of a marker each; a dot has no length."""
    xs, ys = [], []
    for left, right, y in strokes:
        xs += [left, right, math.nan]
        ys += [y, y, math.nan]
    return xs, ys


def _label(axes: Axes, x: int, height: float, text: str, color: str) -> None:
    """A label above the plot with a line down from it."""
    axes.axvline(x, color=color, linewidth=0.8, linestyle="--")
    side = "left" if x <= sum(axes.get_xlim()) / 2 else "right"
    axes.text(x, height, text, color=color, transform=axes.get_xaxis_transform(), horizontalalignment=side)
