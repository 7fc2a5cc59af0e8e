"""Requirements of Triton kernels: the GPU, and the package."""

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.ops.types import Device
from tilewright.ops.utils.target import is_assumed

MIN_CAPABILITY = (8, 0)
"""Ampere: before it there is neither bfloat16 nor an asynchronous copy to shared memory."""

MIN_VERSION = (3, 6)
"""The oldest Triton that was tested."""

PTX_VERSIONS: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (8, 0): 87, (8, 6): 87, (8, 7): 87, (8, 9): 87,
        (9, 0): 87,
        (10, 0): 87, (10, 3): 88, (11, 0): 90,
        (12, 0): 87, (12, 1): 88,
    }
)  # fmt: skip
"""The PTX ISA that kernels are compiled to, times ten, by compute capability: that of CUDA 12.8, because the ptxas that
XLA uses for what the GPU runs may be older than Triton's own, and a later one only where the target did not exist in
it. LLVM ends the process at a target that the PTX ISA does not have, so a capability without an entry is declined."""

MIN_VERSIONS: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({(11, 0): (3, 7)})
"""The oldest Triton whose ptxas knows a compute capability, where that is not ``MIN_VERSION``."""

INSTALL = "pip install 'tilewright[triton]'"


def unavailable(device: Device) -> list[str]:
    """Every reason why no Triton kernel can run on a device; empty if one can."""
    reasons = [] if is_assumed("triton") else list(package_reasons())
    if device.kind != "gpu" or device.capability is None or device.capability < MIN_CAPABILITY:
        needed = _dotted(MIN_CAPABILITY)
        reasons.append(f"needs a CUDA GPU of compute capability {needed} or up, got {device.described}")
    elif device.capability not in PTX_VERSIONS:
        reasons.append(f"compiles for compute capabilities {capabilities()}, got {device.described}")
    elif device.capability in MIN_VERSIONS and not reasons and not is_assumed("triton"):
        reasons += _version_reasons(MIN_VERSIONS[device.capability])
    return reasons


def capabilities() -> str:
    """The compute capabilities that kernels are compiled for, in words."""
    return ", ".join(map(_dotted, PTX_VERSIONS))


@functools.cache
def _version() -> tuple[int, ...] | None:
    """The leading numbers of Triton's version; None if it is not installed."""
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def package_reasons() -> list[str]:
    """Reasons why the installed Triton, or none, does not do."""
    return [f"needs the package triton: {INSTALL}"] if _version() is None else _version_reasons(MIN_VERSION)


def _version_reasons(oldest: tuple[int, ...]) -> list[str]:
    installed = _version()
    if installed is None or installed >= oldest:
        return []
    return [f"needs triton {_dotted(oldest)} or later, got {_dotted(installed)}: {INSTALL}"]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
