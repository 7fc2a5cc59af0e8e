"""The properties of a CUDA device, without querying it: programs are also lowered for absent devices."""

from collections.abc import Mapping

from tilewright.kernels.op.footprint import block_limits
from tilewright.ops.types import Device

_MIN_SHARED_BYTES = 48 << 10
"""Shared memory that a block has on every device."""


def capability_of(device: Device) -> int | None:
    """Ten times the compute capability, such as 90; ``None`` if there is none or it is unknown."""
    return None if device.capability is None else 10 * device.capability[0] + device.capability[1]


def device_values(device: Device) -> Mapping[str, int] | None:
    """The device's values for predicates; ``None`` without a compute capability. The C++ side queries the device."""
    capability = capability_of(device)
    if capability is None:
        return None
    limits = block_limits(device.capability)
    shared = _MIN_SHARED_BYTES if limits is None else limits.shared_bytes
    return {"capability": capability, "shared_memory": shared, "multiprocessors": device.cores}


def architecture(capability: int) -> str:
    """nvcc's name of a target architecture, such as "86" or "90a".

    From 9.0 on with architecture-specific features (``90a``): the build is for one device, and wgmma needs them.
    """
    return f"{capability}a" if capability >= 90 else str(capability)


def parse_architecture(text: str) -> int:
    """Parses "90a", "90", "sm_90a" or "9.0" to ten times the compute capability.

    Raises:
      ValueError: the text has none of these forms.
    """
    digits = text.removeprefix("sm_").removesuffix("a").replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and 50 <= int(digits) < 1000):
        raise ValueError(f"{text!r} is no CUDA architecture such as 80 or 90a")
    return int(digits)
