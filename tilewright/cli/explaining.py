"""The work of ``tilewright explain``, after its arguments are read."""

from typing import TYPE_CHECKING

from tilewright.cli.device import here, named_device, on_device
from tilewright.cli.options import CallOptions
from tilewright.cli.output import complain, lines, stdout, table
from tilewright.cli.targets import NamedCall, named_calls
from tilewright.ops import explain
from tilewright.ops.tuning.progress import milliseconds
from tilewright.ops.utils.describe import describe_config

if TYPE_CHECKING:
    from rich.table import Table


def explain_and_print(target: str, options: CallOptions, device: str | None) -> None:
    """Prints a table for each call of the target, on this device or on a named one."""
    here()
    known = None if device is None else named_device(device)
    for call in named_calls(target, options, known):
        with on_device(known):
            rows = explanation_table(call)
        if rows.row_count:
            stdout().print(rows)
        else:
            complain(f"{call.name} calls no kernel of tilewright; there is nothing to explain")


def explanation_table(call: NamedCall) -> "Table":
    """A table with a row for each kernel call of a function, forward and backward."""
    rows = table(call.name, "call", "config", "from", "time", "why no other", right=("time",))
    for found in explain(call.function, *call.args):
        choice = found.choice
        rows.add_row(
            lines((f"{found.op} {found.direction}", ""), (found.arguments, "dim")),
            describe_config(choice.config),
            choice.origin,
            milliseconds(choice.time_ms),
            "\n".join(f"{name}: {'; '.join(why)}" for name, why in choice.rejected.items()) or "there is no other",
        )
    return rows
