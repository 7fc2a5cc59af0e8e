"""Programs compiled by libtpu for TPUs that are not here: memory, spilled registers, cycles by its simulator.

Needs libtpu (``pip install 'tilewright[tpu]'``), which needs no TPU. Programs are compiled in a process that runs this
module: libtpu reads once a process where it writes its reports, and its simulator ends the process at instructions that
it does not know.
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
from jax._src import core as jax_core

from tilewright.ops.tuning.isolation import Worker, WorkerDied
from tilewright.ops.utils.known_devices import chip_by_name, find_device
from tilewright.ops.utils.target import target_device

MAX_STEPS = 512
"""Steps of a kernel's grid that are simulated: 128 take seconds, 512 a minute and 2.4 GB, 32768 take 18 GB."""

_MEMORY = 14 << 30  # the simulator takes all that there is for a grid of many steps
_LARGE = 4 << 30  # bytes after which a process is replaced
_SECONDS = 180.0  # blocks of thousands of rows are unrolled for minutes
_FATAL = re.compile(r"^F\d{4} .*?\] (?:Static LLO profiling of \S+ failed: )?(.*)", re.MULTILINE)
_OPS = re.compile(r"^HLO: %?(\S+)", re.MULTILINE)
_COUNTS = re.compile(r"^ - (\w+(?: \w+)?): \((\d+)/(\d+)\)", re.MULTILINE)
# Of one jax.Device: the clock is its peak over what its matrix units compute in a cycle.
_FLOPS_PER_CYCLE = {"v5e": 1 << 17, "v5p": 1 << 18, "v6e": 1 << 19, "tpu7x": 1 << 19}


@dataclasses.dataclass(frozen=True, slots=True)
class TpuKernel:
    """One kernel of ours in a compiled program.

    Attributes:
      bundles: its instructions, each for all units of a core.
      spills, fills: those of them that store and reload vector registers.
    """

    bundles: int
    spills: int
    fills: int


@dataclasses.dataclass(frozen=True, slots=True)
class TpuReport:
    """One program as libtpu compiled it.

    Attributes:
      peak_bytes: of HBM, arguments and results included.
      seconds: that lowering and compiling took.
      kernels: those of ours, by name.
      cycles: by the simulator for every operation, by name; empty where it was not run or ended the process.
      error: what it says where it cannot compile; empty if it can.
      unsimulated: the reason for which the simulator ended the process; empty if it did not.
    """

    peak_bytes: int = 0
    seconds: float = 0.0
    kernels: dict[str, TpuKernel] = dataclasses.field(default_factory=dict)
    cycles: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""
    unsimulated: str = ""

    @property
    def bundles(self) -> int:
        """Instructions of our kernels together."""
        return sum(kernel.bundles for kernel in self.kernels.values())

    @property
    def spills(self) -> int:
        """Instructions of our kernels that store vector registers."""
        return sum(kernel.spills for kernel in self.kernels.values())

    @property
    def fills(self) -> int:
        """Instructions of our kernels that reload vector registers."""
        return sum(kernel.fills for kernel in self.kernels.values())

    @property
    def kernel_cycles(self) -> int:
        """Cycles of our kernels together."""
        return sum(cycles for name, cycles in self.cycles.items() if name.startswith("tilewright_"))


def flops_per_cycle(tpu: str) -> int:
    """FLOPs in 16-bit matmuls of a cycle of one ``jax.Device``.

    Raises:
      ValueError: no such TPU is known, or its kernels cannot be simulated.
    """
    chip = find_device(tpu).chip.name
    if chip not in _FLOPS_PER_CYCLE:
        raise ValueError(f"kernels for {tpu} are not simulated: for those of {', '.join(_FLOPS_PER_CYCLE)} they are")
    return _FLOPS_PER_CYCLE[chip]


def cycle_seconds(tpu: str) -> float:
    """Seconds of a cycle."""
    chip = chip_by_name(tpu)
    assert chip is not None
    return flops_per_cycle(tpu) / chip.flops


def estimated_seconds(tpu: str, cycles: int, flops: float, bytes_accessed: float) -> float | None:
    """The time that a kernel may take, from its simulated cycles; ``None`` where these cannot be.

    The simulator takes trip counts that depend on data for none at all: a kernel faster than the matrix units was not
    simulated. It knows no bandwidth of HBM, by which time has a lower bound.

    Args:
      flops: those that the call cannot do without.
      bytes_accessed: of HBM, those that it cannot do without.
    """
    if not cycles or flops > cycles * flops_per_cycle(tpu):
        return None
    return max(cycles * cycle_seconds(tpu), bytes_accessed / (find_device(tpu).bandwidth_gbs * 1e9))


def report(
    tpu: str, make: str, /, *arguments: Any, simulate: bool = False, devices: int = 1, **options: Any
) -> TpuReport:
    """Compiles a program for a TPU, in another process.

    Args:
      tpu: its name, as ``target_device`` takes it.
      make: ``"module:function"``, which is called there with the arguments and options. It returns the function to
        compile, its arguments as ``ShapeDtypeStruct`` and, of a program for several devices, perhaps the mesh.
      simulate: run the simulator; a grid of more than ``MAX_STEPS`` is an error of the report.
      devices: those that the program runs on.
    """
    try:
        return _compiler(simulate).report(tpu, devices, make, arguments, options)
    except WorkerDied as error:
        died = str(error)
        if not simulate:
            return TpuReport(error=died)
    # At instructions that the simulator does not know it ends the process.
    reason = _FATAL.search(died)
    compiled = report(tpu, make, *arguments, devices=devices, **options)
    return dataclasses.replace(compiled, unsimulated=reason[1] if reason else died.partition("\n")[0])


class _Compiler:
    """A process that compiles one program after the other, replaced when it dies or grows."""

    def __init__(self, simulate: bool):
        self._simulate = simulate
        self._folder = tempfile.TemporaryDirectory()
        self._worker: Worker | None = None

    def report(self, *job: Any) -> TpuReport:
        """Has a program compiled.

        Raises:
          WorkerDied: the process ended, or took too long.
        """
        worker = self._worker = self._worker or self._started()
        try:
            found: dict[str, Any] = worker.ask(_SECONDS, self._simulate, self._folder.name, *job)
        except WorkerDied:
            self._worker = None
            raise
        if worker.held_bytes > _LARGE:
            worker.end()
            self._worker = None
        kernels = {name: TpuKernel(**kernel) for name, kernel in found.pop("kernels", {}).items()}
        return TpuReport(kernels=kernels, **found)

    def _started(self) -> Worker:
        flags = [f"--xla_jf_dump_to={self._folder.name}", "--xla_jf_dump_llo_text=true"]
        flags.append("--xla_jf_dump_llo_pass_label_regex=hlo-static-bundle-profile")
        if self._simulate:
            flags.append(f"--xla_jf_dump_static_llo_profile_to={self._folder.name}")
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program that is not compiled is not reported
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": " ".join(flags),
        }
        return Worker(__spec__.name, environment)


@functools.cache
def _compiler(simulate: bool) -> _Compiler:
    return _Compiler(simulate)


# What follows runs in the other process.


def _answer(
    simulate: bool, folder: Path, tpu: str, devices: int, make: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a `TpuReport`."""
    for path in folder.iterdir():
        path.unlink()
    module, _, name = make.partition(":")
    try:
        function, structs, *meshes = getattr(importlib.import_module(module), name)(*arguments, **options)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(target_device(tpu, devices))
            for mesh in meshes:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            # A function of its own: nothing is taken from an earlier trace.
            traced = jax.jit(lambda *args: function(*args)).trace(*structs)
            if simulate and (steps := max(_steps(traced.jaxpr.jaxpr), default=0)) > MAX_STEPS:
                raise ValueError(f"a grid of {steps} steps is too long to be simulated, {MAX_STEPS} at most")
            compiled = traced.lower(lowering_platforms=("tpu",)).compile(device_assignment=target.devices)
    except Exception as error:  # what cannot be compiled is a result
        return {"error": f"{type(error).__name__}: {error}".partition(" [type.googleapis.com")[0][:4000]}
    peak = compiled.memory_analysis().peak_memory_in_bytes
    seconds = round(time.monotonic() - start, 2)
    return {"peak_bytes": peak, "seconds": seconds, "kernels": dict(_kernels(folder)), "cycles": dict(_cycles(folder))}


def _steps(jaxpr: Any) -> Iterator[int]:
    """The steps of the grid of each Pallas kernel in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield math.prod(eqn.params["grid_mapping"].grid)
        for inner in jax_core.jaxprs_in_params(eqn.params):
            yield from _steps(inner)


def _kernels(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    for path in folder.glob("*hlo-static-bundle-profile.txt"):
        for part in re.split(r"(?m)^(?=HLO: )", path.read_text()):
            name = _OPS.search(part)
            counts = {key: (int(used), int(slots)) for key, used, slots in _COUNTS.findall(part)}
            # A unit that a kernel does not use may be left out of the report; spills have a slot in every bundle.
            if name is None or not name[1].startswith("tilewright_") or "VMEM_SPILL_COUNT" not in counts:
                continue
            (spills, bundles), (fills, _) = counts["VMEM_SPILL_COUNT"], counts["VMEM_FILL_COUNT"]
            yield name[1], {"bundles": bundles, "spills": spills, "fills": fills}


def _cycles(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.glob("*static_llo_profile.textproto"):
        text = path.read_text()
        names = re.findall(r'hlo_op_name: "([^"]+)"', text)
        yield from zip(names, map(int, re.findall(r"estimated_cycles: (\d+)", text)), strict=True)


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody asks any more
        while True:
            simulate, folder, *job = connection.recv()
            connection.send(("ok", _answer(simulate, Path(folder), *job), _held_bytes()))
    os._exit(0)  # libtpu's threads may not end by themselves


if __name__ == "__main__":
    _main()
