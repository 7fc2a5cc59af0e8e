"""Requirements of Triton kernels: the GPU, and the package."""

import functools
import importlib.metadata
import re

from tilewright.ops.types import Device
from tilewright.ops.utils.target import is_assumed

MIN_CAPABILITY = (8, 0)
"""Ampere: before it there is neither bfloat16 nor an asynchronous copy to shared memory."""

MIN_VERSION = (3, 6)
"""The oldest Triton that was tested."""

INSTALL = "pip install 'tilewright[triton]'"


def unavailable(device: Device) -> list[str]:
    """Every reason why no Triton kernel can run on a device; empty if one can."""
    reasons = [] if is_assumed("triton") else list(package_reasons())
    if device.kind != "gpu" or device.capability is None or device.capability < MIN_CAPABILITY:
        needed = _dotted(MIN_CAPABILITY)
        reasons.append(f"needs a CUDA GPU of compute capability {needed} or up, got {device.described}")
    return reasons


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
    installed = _version()
    if installed is None:
        return [f"needs the package triton: {INSTALL}"]
    if installed < MIN_VERSION:
        return [f"needs triton {_dotted(MIN_VERSION)} or later, got {_dotted(installed)}: {INSTALL}"]
    return []


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
