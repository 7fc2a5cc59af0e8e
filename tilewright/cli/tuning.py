"""What ``tilewright tune`` does once its arguments are read."""

from pathlib import Path

import typer

from tilewright.cli.options import CallOptions
from tilewright.cli.output import INTERRUPTED, complain, stderr, stdout
from tilewright.cli.progress import TuningProgress, result_table
from tilewright.cli.targets import named_calls
from tilewright.ops import AutotuningResult, default_executor, tune
from tilewright.ops.config.selection import ConfigSelectorChain


def tune_and_report(
    target: str, options: CallOptions, *, budget_s: float | None, again: bool, json_file: Path | None
) -> int:
    """Tunes, prints the table, and returns the exit code."""
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(json_file.parent)!r}", param_hint="--json")
    calls = named_calls(target, options)
    total = AutotuningResult()
    interrupted = False
    with TuningProgress(stderr()) as progress:
        for call in calls:
            try:
                result = tune(call.function, *call.args, budget_s=budget_s, reuse=not again, on_event=progress.on_event)
            except KeyboardInterrupt:  # while the program was lowered: nothing of this call was measured yet
                interrupted = True
                break
            total |= result
            interrupted = result.interrupted
            if interrupted:
                break
    if json_file is not None and total.entries:
        json_file.write_text(total.to_json() + "\n")
    return _report(target, total, interrupted)


def _report(target: str, result: AutotuningResult, interrupted: bool) -> int:
    if result.entries:
        stdout().print(result_table(result))
    elif not interrupted:
        complain(f"{target} calls no kernel of tilewright; there is nothing to tune")
    measured = sum(1 for call in result if call.step == "measured")
    place = _cache_path()
    if measured and place:
        typer.echo(f"{measured} of {len(result)} measured now and kept in {place}")
    elif result.entries:
        typer.echo(f"all {len(result)} known, nothing measured" + (f" ({place})" if place else ""))
    if interrupted:
        complain(f"interrupted; the {measured} calls measured so far are kept")
        return INTERRUPTED
    return 0


def _cache_path() -> Path | None:
    chooser = default_executor().chooser
    if isinstance(chooser, ConfigSelectorChain) and chooser.persistent is not None:
        return chooser.persistent.path
    return None
