"""Generates the tables of docs/capabilities.md, ops × backends × options, from what the backends declare.

``python docs/capability_table.py`` prints them, ``--write`` puts them between the markers of the page, ``--check``
fails if the page has other ones.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.cudnn import jax_calls
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.op.cases import Case
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.kernels.triton import requirements
from tilewright.ops import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device

PAGE = Path(__file__).parent / "capabilities.md"
BEGIN, END = "<!-- capabilities: begin, written by docs/capability_table.py -->", "<!-- capabilities: end -->"

# One device of each kind that a backend may be written for; the table never depends on the machine that makes it.
DEVICES = (
    Device("cpu", "cpu", cores=8, fingerprint="cpu"),
    Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, "gpu:NVIDIA A100-SXM4-80GB:8.0"),
    Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132, "gpu:NVIDIA H100 80GB HBM3:9.0"),
    Device("tpu", "TPU v5e", None, 1, "tpu:TPU v5e"),
)


def invocation(op: Portfolio, case: Case) -> Invocation[Any, Any]:
    positional, keywords = case.arguments()
    return prepared(op, positional, keywords, concrete=False)[0]


def declared(op: Portfolio, case: Case) -> dict[str, str]:
    """For every backend what of forward and backward it supports, and on which of the devices."""
    inv = invocation(op, case)
    found: dict[str, list[str]] = {}
    for stage in (inv, inv.backward()) if op.differentiable else (inv,):
        able: dict[str, list[str]] = {}
        for device in DEVICES:
            for backend, reasons in op.reasons(dataclasses.replace(stage, device=device)).items():
                able.setdefault(backend, [])
                if not reasons:
                    able[backend].append(device.name)
        for backend, devices in able.items():
            found.setdefault(backend, []).append(" ".join(devices))
    return {backend: _cell(*stages) for backend, stages in found.items()}


def kinds_served(op: Portfolio) -> dict[str, list[str]]:
    """For every backend the kinds of device on which it can serve any of the cases."""
    found: dict[str, list[str]] = {}
    for case in op.cases.options.values():
        inv = invocation(op, case)
        for device in DEVICES:
            for backend, reasons in op.reasons(dataclasses.replace(inv, device=device)).items():
                kinds = found.setdefault(backend, [])
                if not reasons and device.kind.upper() not in kinds:
                    kinds.append(device.kind.upper())
    return found


def _cell(forward: str, *backward: str) -> str:
    if forward and all(backward):
        return "✓"
    return "forward only" if forward else "–"


def op_table(name: str) -> list[str]:
    """The lines of one op's table."""
    op = kernel(name)
    rows = [(option, declared(op, case)) for option, case in op.cases.options.items()]
    backends = list(dict.fromkeys(backend for _, row in rows for backend in row))
    lines = [f"| `{name}` | {' | '.join(backends)} |", "| --- |" + " :-: |" * len(backends)]
    kinds = kinds_served(op)
    lines.append(f"| runs on | {' | '.join(', '.join(kinds.get(b, ())) or '–' for b in backends)} |")
    return lines + [f"| {option} | {' | '.join(row.get(b, '–') for b in backends)} |" for option, row in rows]


def capability_table() -> str:
    """The tables of all ops, whatever compilers, libraries and devices this machine has."""
    newest = mock.patch.object(jax_calls, "cudnn_version", return_value=99999)
    installed = mock.patch.object(cute, "package_reasons", side_effect=list)
    triton = mock.patch.object(requirements, "package_reasons", return_value=[])
    # Where XLA may split tokens over several devices, kernels of vocabulary losses do not serve them.
    alone = mock.patch.object(jax, "device_count", return_value=1)
    with mock.patch.object(toolchain, "missing", return_value=[]), newest, installed, triton, alone:
        return "\n\n".join("\n".join(op_table(name)) for name in OPS if kernel(name).cases.options)


def with_table(page: str, table: str) -> str:
    """The page with the tables between its markers.

    Raises:
      ValueError: it has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of docs/capabilities.md.")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    table = capability_table()
    if not arguments.write and not arguments.check:
        print(table)
        return
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_table(page, table)
    if arguments.write:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != page:
        sys.exit("the tables of docs/capabilities.md are out of date: run make table")


if __name__ == "__main__":
    main()
