"""Proves that a rewritten Mosaic GPU kernel compiles to what it compiled to before, without a GPU.

.aot/venv/bin/python -m tests.aot.registers write FILE   # before the change, in the environment of `make aot`
.aot/venv/bin/python -m tests.aot.registers compare FILE # after it; exits with 1 if a kernel is worse

For the first config of every Hopper call of ``test_shipped_configs.py``, both directions, it records for each kernel
the registers per thread, the stack, the spills, the shared memory and a hash of the PTX.
Kernels with the same hash run the same instructions, whatever names and lines their sources have.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.aot.compiler import KernelReport, compile_for_h100
from tests.aot.test_shipped_configs import COMPILATIONS
from tilewright.kernels.op.choice import Platform

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
type Kernels = list[dict[str, Any]]


def programs() -> Iterator[tuple[str, Program]]:
    """Name and program of each call that is compiled, with its first config."""
    for name, (_, each) in COMPILATIONS.items():
        if each.backend.platform is Platform.PALLAS and each.number == 0:
            yield name.rpartition("-")[0], each.program()


def record() -> dict[str, Kernels]:
    """What every program's kernels compile to, in the order of compilation."""
    found = {}
    for name, (function, arguments) in programs():
        reports = compile_for_h100(function, *arguments, ptx=True)
        found[name] = [_fields(report) for report in reports]
        print(name, *(f"{kernel['registers']}/{kernel['spill_loads']}" for kernel in found[name]), flush=True)
    return found


def _fields(report: KernelReport) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(report).items() if name != "name"}


def is_worse(before: Kernels, after: Kernels) -> bool:
    """True if a program has other kernels than before, or one that takes more of anything."""
    if len(before) != len(after):
        return True
    more = ("registers", "stack", "spill_stores", "spill_loads", "shared_bytes", "serialised")
    return any((new[name] or 0) > (old[name] or 0) for old, new in zip(before, after, strict=True) for name in more)


def table(before: Mapping[str, Kernels], after: Mapping[str, Kernels]) -> list[str]:
    """A line of Markdown for each program: registers and bytes of spills before and after, and whether PTX is equal."""
    lines = ["| program | registers | spilled bytes | PTX |", "| --- | --- | --- | --- |"]
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, []), after.get(name, [])
        cells = [
            " → ".join(dict.fromkeys(", ".join(str(kernel[field]) for kernel in each) or "none" for each in (old, new)))
            for field in ("registers", "spill_loads")
        ]
        same = "equal" if [k["code"] for k in old] == [k["code"] for k in new] else "differs"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {same} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args(arguments)
    before = json.loads(args.file.read_text()) if args.action == "compare" else None
    found = record()
    if before is None:
        args.file.write_text(json.dumps(found, indent=1))
        return
    print(*table(before, found), sep="\n")
    worse = [name for name in before if is_worse(before[name], found.get(name, []))]
    if worse:
        raise SystemExit(f"worse than before: {', '.join(worse)}")


if __name__ == "__main__":
    main()
