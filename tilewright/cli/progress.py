"""A table of a tuning's result."""

from typing import TYPE_CHECKING

from tilewright.cli.output import lines, table
from tilewright.ops.config.results import AutotuningResult
from tilewright.ops.tuning.progress import milliseconds
from tilewright.ops.utils.describe import describe_config, describe_key

if TYPE_CHECKING:
    from rich.table import Table


def result_table(result: AutotuningResult, title: str = "tuned calls") -> "Table":
    """A table with a row for each call: the chosen config, its comparison with the heuristic, and its source."""
    figures = ("time", "heuristic", "speedup", "tried")
    rows = table(title, "call, and what it will run with", *figures, "from", right=figures)
    for call in result:
        heuristic = call.heuristic
        failed = sum(1 for candidate in call.candidates if candidate.failed)
        dropped = sum(1 for candidate in call.candidates if candidate.dropped)
        rows.add_row(
            lines(
                (f"{call.op} {call.direction}", ""),
                (describe_key(call.key), "dim"),
                (f"→ {describe_config(call.winner.config)}", "bold"),
            ),
            milliseconds(call.winner.time_ms),
            milliseconds(heuristic.time_ms if heuristic else None),
            f"{call.speedup:.2f}×" if call.speedup else "–",
            f"{len(call.candidates) - dropped}"
            + (f", {failed} failed" if failed else "")
            + (f", {dropped} dropped" if dropped else ""),
            call.step if call.complete else f"{call.step}, cut short",
        )
    return rows
