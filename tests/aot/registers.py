"""Proves that a rewritten Mosaic GPU kernel compiles to what it compiled to before, without a GPU.

.aot/venv/bin/python -m tests.aot.registers write FILE   # before the change, in the environment of `make aot`
.aot/venv/bin/python -m tests.aot.registers compare FILE # after it; exits with 1 if a kernel is worse

For the heuristic config of every Hopper case of attention, forward and backward, and of attention over a cache, it
records for each kernel the registers per thread, the stack, the spills, the shared memory and a hash of the PTX.
Kernels with the same hash run the same instructions, whatever names and lines their sources have.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tests.aot import test_pallas_serving as serving
from tests.aot import test_shipped_configs as attention
from tests.aot.compiler import KernelReport, compile_for_h100
from tests.kernels.conftest import H100
from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
type Kernels = list[dict[str, Any]]


def programs() -> Iterator[tuple[str, Program]]:
    """Name and program of each call that is compiled, with its first config."""
    known = set()
    for each in attention.compilations():
        name = each.name.rsplit("-", 1)[0]
        if name not in known:
            known.add(name)
            yield name, attention.program(each)
    for name, call in serving.CALLS.items():
        yield f"latents: {name}", _first(serving.BACKEND, jax.eval_shape(call))
    for name, fields in (serving.PACKED | serving.FEW_HEADS).items():
        yield f"packed: {name}", _first(PallasGpuPackedAttention(), serving.packed_inputs(fields))


def _first(backend: Any, inputs: Any) -> Program:
    params = backend.candidates(inputs, H100, "forward")[0]
    return lambda inputs: backend.forward(inputs, params), (inputs,)


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
