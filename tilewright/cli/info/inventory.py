"""The tables that ``tilewright info`` prints."""

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from tilewright import __version__
from tilewright.cli.device import here
from tilewright.cli.info.probing import ServedBackend, served_backends
from tilewright.cli.output import Failure, counted, stdout
from tilewright.kernels.cuda.shipped import shipped_folders
from tilewright.kernels.cuda.toolchain import find_compiler, missing
from tilewright.ops import PersistentCache
from tilewright.ops.lowering.lowered_files import LoweredFiles
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.text import table

if TYPE_CHECKING:
    from rich.table import Table


def print_inventory() -> None:
    """Prints a table of facts and a table of backends.

    Raises:
      Failure: JAX finds no device; raised after everything else is shown.
    """
    console = stdout()
    facts = table("tilewright", "what", "value")
    trouble = None
    try:
        for name, value in device_facts():
            facts.add_row(name, value)
    except Failure as error:
        trouble = error
        facts.add_row("device", "none")
    for name, value in machine_facts():
        facts.add_row(name, value)
    console.print(facts)
    console.print(backends_table(served_backends()))
    if trouble is not None:
        raise trouble


def device_facts() -> Iterator[tuple[str, str]]:
    """Facts of the device, each with its name."""
    device = here()
    capability = "" if device.capability is None else " (compute capability {}.{})".format(*device.capability)
    yield "device", f"{device.name}{capability}, {counted(jax.local_device_count(), 'device')} of kind {device.kind}"
    yield "cache key's device", device.fingerprint


def machine_facts() -> Iterator[tuple[str, str]]:
    """Versions and folders, each with its name."""
    yield "tilewright", __version__
    yield "python", platform.python_version()
    yield from ((f"toolchain: {name}", version) for name, version in toolchain_fingerprint().items())
    compiler = find_compiler()
    yield "CUDA compiler", "; ".join(missing(None)) or (compiler.identity if compiler else "")
    folders = [f"{folder} ({counted(len(list(folder.iterdir())), 'group')})" for folder in shipped_folders()]
    yield "shipped CUDA kernels", ", ".join(folders) or "none"
    cache = PersistentCache()
    yield "persistent cache", f"{cache.path} ({counted(len(cache), 'entry', 'entries')})"
    lowered = LoweredFiles()
    count, size = lowered.usage()
    yield "lowered kernels", f"{lowered.path} ({counted(count, 'file', 'files')}, {size / 1e6:.1f} MB)"


def backends_table(backends: list[ServedBackend]) -> "Table":
    """A table with a row for each backend of each op."""
    rows = table("backends", "op", "backend", "serves", "why it does not", unwrapped=("op", "backend"))
    shown = ""
    for each in backends:
        rows.add_row("" if each.op == shown else each.op, each.name, ", ".join(each.devices) or "nothing", each.why)
        shown = each.op
    return rows
