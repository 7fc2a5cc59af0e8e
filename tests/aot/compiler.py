"""What ptxas compiles from Mosaic GPU kernels for an H100, on a machine without one.

Wants jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version, nvidia-cuda-nvcc and nvidia-nvvm.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental.mosaic.gpu import core as mosaic_gpu_core

import tilewright
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.topology import missing_compiler

H100 = "NVIDIA H100 80GB HBM3"
_DUMPS = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")  # on standard output; a folder would get every pass
_SALTS = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel as ptxas compiled it.

    Attributes:
      name: of the kernel's body.
      registers: per thread, before `setmaxnreg` moves them between warpgroups.
      stack, spill_stores, spill_loads: bytes per thread.
      serialised: whether ptxas made every wgmma wait for the one before.
      shared_bytes: what the kernel's scratch takes of a block's shared memory; None where some kernel of the program
        was lowered or compiled more often than the other, so that the two lists cannot be matched.
      code: a hash of its PTX without names, comments and source lines, if that was asked for.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    serialised: bool
    shared_bytes: int | None = None
    code: str = ""

    @property
    def faults(self) -> list[str]:
        """Why the kernel must not ship; empty if it may."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"{self.name} spills: {self.spill_stores=}, {self.spill_loads=}, {self.registers=}")
        if self.serialised:
            found.append(f"{self.name}: its wgmmas are serialised")
        return found


def missing_packages() -> str:
    """Why nothing can be compiled here; empty if it can."""
    missing = missing_compiler(find_device(H100))
    return f"{missing} (make aot installs it)" if missing else ""


def compile_for_h100(function: Callable[..., Any], *arguments: Any, ptx: bool = False) -> list[KernelReport]:
    """Lowers and compiles `function` and reports on each Mosaic GPU kernel, in the order of compilation.

    `arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are read. What a kernel wants
    beyond the shared memory of a block raises here as it would on the card. ``ptx`` fills in ``KernelReport.code``.
    """
    dumps = (*_DUMPS, "MOSAIC_GPU_DUMP_PTX") if ptx else _DUMPS
    with (
        _standard_output() as output,
        _kernels_of_their_own(),
        mock.patch.dict(os.environ, dict.fromkeys(dumps, "1")),
    ):
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        fresh = jax.jit(lambda *args: function(*args))  # of no use to what jax has traced and compiled before
        with tilewright.target_device(H100) as target:
            fresh.lower(*structs).compile(device_assignment=target.devices)
    return parse_reports(output())


def lower_as_there(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Lowers `function` as a process with an H100 does, for `compile_lowered`.

    Not as ``target_device`` does: under its mesh, which a process with the device does not have, nothing is kept.
    """
    with tilewright.target_device(H100) as target:
        sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    fresh = jax.jit(lambda *args: function(*args))
    device = jax.sharding.AbstractDevice(device_kind=H100, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return fresh.trace(*structs).lower(lowering_platforms=("cuda",))


def compile_lowered(lowered: jax.stages.Lowered) -> list[KernelReport]:
    """Compiles a program that was lowered before, and reports on those of its kernels that are new to the process."""
    with _standard_output() as output, mock.patch.dict(os.environ, dict.fromkeys(_DUMPS, "1")):
        lowered.compile()
    return parse_reports(output())


def parse_reports(text: str) -> list[KernelReport]:
    """Reads what Mosaic GPU says of resources and ptxas of the kernels; each run of ptxas ends with its time."""
    reports = []
    for block in re.split(r"Compile time = .*", text):
        entry = re.search(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", block)
        if entry is None:
            continue
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers", block)
        if frame is None or used is None:
            raise ValueError(f"ptxas says nothing of the registers or spills of {entry[1]}:\n{block}")
        stack, stores, loads = (int(number) for number in frame.groups())
        serialised = "C7510" in block or "serializ" in block
        code = _code(block, entry[1])
        reports.append(KernelReport(entry[1], int(used[1]), stack, stores, loads, serialised, code=code))
    shared = [int(number) for number in re.findall(r"smem_scratch_bytes=(\d+)", text)]
    if len(shared) == len(reports):
        reports = [dataclasses.replace(r, shared_bytes=size) for r, size in zip(reports, shared, strict=True)]
    return reports


def _code(text: str, name: str) -> str:
    """A hash of the PTX in a dump, without what names and source lines change; empty if there is none."""
    entry = re.search(r"^\.visible \.entry.*?^}", text, re.MULTILINE | re.DOTALL)
    if entry is None:
        return ""
    lines = (line.split("//")[0].strip() for line in entry[0].replace(name, "kernel").splitlines())
    code = [line for line in lines if line and not re.match(r"\.loc\b|\$L__(tmp|func)\w*:$", line)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _kernels_of_their_own() -> Iterator[None]:
    """JAX 0.12 compiles a kernel once per process, found by its hash; ptxas says nothing of one that it knows."""
    salt = next(_SALTS).to_bytes(8)
    hashes = types.SimpleNamespace(sha256=lambda data: hashlib.sha256(data + salt))
    with mock.patch.object(mosaic_gpu_core, "hashlib", hashes):
        yield


@contextlib.contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """Collects what Python and what the compiler write to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:

        def read() -> str:
            return text

        text = ""
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(os.fdopen(os.dup(1), "w")) as stream, stream:
                yield read
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            text = file.read()
