"""The demo's picture: the loss curve, and the times of every candidate of each tuned call."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

from tilewright.ops import AutotuningResult
from tilewright.ops.utils.describe import describe_key

matplotlib.use("Agg")  # a demo over ssh has no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter


class Comparison(NamedTuple):
    """One train step made on both attentions from the same state; ``gradient_difference`` is relative."""

    step: int
    their_loss: float
    their_seconds: float
    our_seconds: float
    gradient_difference: float


def plot(
    file: Path,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    comparisons: Sequence[Comparison],
    tuned: AutotuningResult,
) -> None:
    """Writes a PNG; ``validation`` holds (step, loss)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 4), layout="constrained")
    _losses(left, losses, validation, comparisons)
    _candidates(right, tuned)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _losses(
    axes: Axes,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    comparisons: Sequence[Comparison],
) -> None:
    window = min(25, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(np.arange(len(smooth)) + window - 1, smooth, color="tab:blue", label=f"training, mean of {window}")
    axes.plot(
        [each.step for each in comparisons], [each.their_loss for each in comparisons],
        "x", color="tab:orange", markersize=5, label="same step, jax.nn.dot_product_attention",
    )  # fmt: skip
    axes.plot(*zip(*validation, strict=True), "o", color="tab:green", label="validation")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="training")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _candidates(axes: Axes, tuned: AutotuningResult) -> None:
    """One row for each call: a dot for every candidate, the heuristic and the chosen one marked."""
    names = []
    for row, call in enumerate(tuned):
        times = [candidate.time_ms for candidate in call.candidates if candidate.time_ms is not None]
        axes.plot(times, [row] * len(times), "o", color="0.6", markersize=6, label="candidate" if row == 0 else None)
        marks = ((call.heuristic, "heuristic", "s", "tab:orange", 11), (call.winner, "chosen", "*", "tab:green", 13))
        for candidate, label, marker, color, size in marks:
            if candidate is not None and candidate.time_ms is not None:
                axes.plot(
                    [candidate.time_ms], [row], marker, color=color, markersize=size, fillstyle="none",
                    markeredgewidth=1.8, linestyle="none", label=label if row == 0 else None,
                )  # fmt: skip
        arguments = textwrap.fill(describe_key(call.key), 44)
        names.append(f"{call.op} {call.direction}\n{arguments}")
    axes.set_yticks(range(len(names)), names, fontsize=6.5)
    axes.invert_yaxis()
    axes.margins(y=0.15)
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set(xlabel="time of one call, ms", title=f"tuning on {tuned.device}")
    axes.grid(alpha=0.3)
    if names:
        axes.legend(frameon=False, loc="best")
