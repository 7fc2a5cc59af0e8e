"""Measures anew what is stale or missing in the tuned table that ships for this device, and writes the table.

``python -m tools.tables rms_norm``, or ``all`` in place of an op: in a checkout, on the card, with the packages
installed that the table names. The table is written after each call, so that a run which was cut short goes on where it
was.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.cli.device import here
from tilewright.cli.mistakes import first_line
from tilewright.cli.output import FAILED, INTERRUPTED, complain, counted
from tilewright.cli.targets import find_op, op_call
from tilewright.kernels import OPS, kernel
from tilewright.ops import AutotuningResult, Invocation, Tuner, device_fingerprint, use_lock
from tilewright.ops.config.lockfile import key_fields
from tilewright.ops.config.results import TunedCall
from tilewright.ops.config.tables import Table, add_to_table, load_tables, shipped_folder, table_file
from tilewright.ops.program import find_invocations, tune_invocations
from tilewright.ops.tuning.events import CallTuned, TuningEvent
from tilewright.ops.tuning.progress import progress_for
from tilewright.ops.types import Direction
from tilewright.ops.utils.fingerprint import toolchain_fingerprint


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the calls of an op, or of all, that `stale_calls` finds; writes the table after each.

    Returns the exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=[*OPS, "all"])
    parser.add_argument("--again", action="store_true", help="measure again what the cache holds")
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument("--isolation", choices=["auto", "process", "none"], default="auto")
    given = parser.parse_args(arguments)
    target, budget_s, tuner = given.target, given.budget, Tuner(isolation=given.isolation)
    began = time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the measuring processes need the memory
    device, folder = device_fingerprint(), Path(str(shipped_folder()))
    table, file = load_tables(device, folder), table_file(device, folder)
    _complain_of_missing_packages(file)
    recorded: list[TunedCall] = []
    wanted, failed, interrupted = 0, False, False

    with use_lock(None), progress_for(sys.stderr, plain=True) as on_event:

        def record(event: TuningEvent) -> None:
            on_event(event)
            if isinstance(event, CallTuned):
                tuned = AutotuningResult((event.call,), device=device, toolchain=toolchain_fingerprint())
                add_to_table(file, tuned, f"python -m tools.tables {target}")
                recorded.append(event.call)

        for op in OPS if target == "all" else [find_op(target).name]:
            if budget_s is not None and time.monotonic() - began >= budget_s:
                complain(f"not looked at, for the budget had ended: {op}")
                continue
            calls = stale_calls(op, table)
            wanted += len(calls)
            if not calls:
                continue
            started = time.monotonic() if budget_s is None else began
            try:
                result = tune_invocations(
                    calls, began=started, budget_s=budget_s, reuse=not given.again, tuner=tuner, on_event=record
                )
                interrupted = result.interrupted
            except ExceptionGroup as group:
                complain(f"{op}: {group.message}; the first: {first_line(group.exceptions[0])}")
                failed = True
            if interrupted:
                break
    if recorded:
        print(AutotuningResult(tuple(recorded), device=device))
    print(f"{counted(wanted, 'entry', 'entries')} missing or stale, {len(recorded)} of them recorded in {file}")
    if interrupted:
        complain(f"interrupted; {file} has what was measured")
    return INTERRUPTED if interrupted else FAILED if failed else 0


def _complain_of_missing_packages(file: Path) -> None:
    """Names the packages without which winners of a table cannot be measured again."""
    known = json.loads(file.read_text())["toolchain"] if file.exists() else {}
    if missing := sorted(known.keys() - toolchain_fingerprint().keys()):
        complain(f"{file.name} was measured with packages that are not installed here: {', '.join(missing)}")


def stale_calls(op: str, table: Table) -> list[Invocation[Any, Any]]:
    """The calls of an op whose entry in a table is stale, and its cases without an entry."""
    of_op, found = kernel(op), {}
    for entry in table.values():
        if entry.op == op and entry.is_stale(of_op):
            direction: Direction = "forward" if entry.direction == "forward" else "backward"
            with contextlib.suppress(ValueError):  # its class was removed: no call can have this key any more
                inv = Invocation.of_description(of_op, key_fields(entry.key), direction)
                found[inv.key] = inv
    for case in of_op.cases.of_device(here().kind).values():
        call = op_call(op, case, backward=True)
        for inv in find_invocations(call.function, *call.args):
            if not any(key in table for key in (inv.key, *inv.former_keys)):
                found[inv.key] = inv
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main())
