"""Compilation of Triton kernels, with or without a GPU, and reports by ptxas: registers, spills, stack."""

import dataclasses
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tilewright.errors import BuildError
from tilewright.kernels.op.footprint import block_limits
from tilewright.kernels.triton.description import ALIGNMENT, Launch
from tilewright.kernels.triton.dtypes import type_name
from tilewright.kernels.triton.requirements import PTX_VERSIONS, capabilities
from tilewright.ops.utils.triton_settings import triton_settings

type CompiledKernel = Any
"""Result of ``triton.compile``, whose type is in a package that need not be installed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Resources of a kernel on one compute capability.

    Attributes:
      registers: per thread.
      spill_stores, spill_loads, stack: bytes per thread.
      shared_bytes: per block.
      serialised: True if ptxas made every wgmma wait for the one before.
      texts: the stages of the compilation by name: "ttir", "ttgir", "llir", "ptx".
    """

    name: str
    capability: tuple[int, int]
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_bytes: int
    serialised: bool
    texts: dict[str, str] = dataclasses.field(repr=False, compare=False)

    @property
    def faults(self) -> list[str]:
        """Reasons why the kernel must not ship; empty if it may."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"{self.name} spills: {self.spill_stores=}, {self.spill_loads=}, {self.registers=}")
        if self.serialised:
            found.append(f"{self.name}: its wgmmas are serialised")
        limits = block_limits(self.capability)
        if limits is not None and self.shared_bytes > limits.shared_bytes:
            found.append(f"{self.name} takes {self.shared_bytes} bytes, more than a block of {self.capability} has")
        return found


def compiled(launch: Launch, capability: tuple[int, int]) -> CompiledKernel:
    """Compiles a launch by ``triton.compile``; from Triton's cache on disk, if any process compiled it before.

    Raises:
      BuildError: LLVM might end the process at that compute capability.
    """
    if capability not in PTX_VERSIONS:
        raise BuildError(f"Triton kernels compile for compute capabilities {capabilities()}, got {capability=}")
    return _compiled(launch, capability, triton_settings())


# What was made under other settings must not be kept on disk as what Triton makes by itself.
@functools.lru_cache(maxsize=1024)
def _compiled(launch: Launch, capability: tuple[int, int], settings: tuple[str, ...]) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, *_signature(launch))
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,  # the default so far, which Triton is going to change
        "ptx_version": PTX_VERSIONS[capability],
    }
    return triton.compile(source, target=GPUTarget("cuda", _number(capability), 32), options=options)


def report(launch: Launch, capability: tuple[int, int]) -> Report:
    """Compiles a launch for a compute capability, down to machine code, with the ptxas that Triton brings.

    Raises:
      BuildError: ptxas failed, or nothing is compiled for that compute capability.
    """
    kernel = compiled(launch, capability)
    output = _assembled(kernel.asm["ptx"], _number(capability))
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output)
    used = re.search(r"Used (\d+) registers", output)
    if frame is None or used is None:
        raise BuildError(f"ptxas says nothing of the registers or spills of {launch.name}", output)
    stack, stores, loads = map(int, frame.groups())
    texts = {name: text for name, text in kernel.asm.items() if isinstance(text, str)}
    # Warnings of ptxas: C7510, and others (C7513) in the same words, "wgmma.mma_async instructions are serialized".
    serialised = "C7510" in output or "serializ" in output
    shared = int(kernel.metadata.shared)
    return Report(launch.name, capability, int(used[1]), stores, loads, stack, shared, serialised, texts)


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types of the parameters by name, values of the constant ones, and attributes (the alignment) of pointers.

    A scalar of 1 is a constant, as Triton specialises it.
    """
    names = [parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr]
    types = [f"*{type_name(x.dtype)}" for x in launch.inputs] + ["i32"] * len(launch.scalars)
    types += [f"*{type_name(x.dtype)}" for x in launch.fresh]
    defaults = {p.name: p.default for p in launch.kernel.params if p.is_constexpr and p.has_default}
    unit_scalars = {name: value for name, value in launch.scalars if value == 1}
    constants = defaults | dict(launch.constants) | unit_scalars
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    ordered = {parameter.name: signature[parameter.name] for parameter in launch.kernel.params}
    pointers = [index for index, kind in enumerate(ordered.values()) if kind.startswith("*")]
    return ordered, constants, {(index,): [["tt.divisibility", ALIGNMENT]] for index in pointers}


@functools.cache
def _assembler(number: int) -> str:
    """Path of the ptxas that Triton brings."""
    from triton.backends.nvidia import compiler

    return compiler.get_ptxas(number).path


def _assembled(ptx: str, number: int) -> str:
    """Messages of ptxas about a PTX program."""
    # wgmma (sm_90a) and its successors exist only in architecture-specific targets.
    architecture = f"sm_{number}{'a' if number >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [_assembler(number), "-v", f"--gpu-name={architecture}", str(file), "-o", str(Path(folder, "cubin"))]
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BuildError(f"ptxas failed for {architecture}", process.stderr)
    return process.stderr
