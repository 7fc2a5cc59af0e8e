"""What is known of a CUDA device without asking it: programs are lowered for cards that are not there."""

from collections.abc import Mapping
from types import MappingProxyType

from tilewright.ops.core.types import Device

# Shared memory that a block may opt in to, in KB, by compute capability times ten: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability". The C++ side asks the device itself.
_SHARED_KB = MappingProxyType(
    {
        50: 48, 52: 48, 53: 48,
        60: 48, 61: 48, 62: 48,
        70: 96, 72: 96, 75: 64,
        80: 163, 86: 99, 87: 163, 89: 99,
        90: 227,
        100: 227, 103: 227, 110: 227,
        120: 99, 121: 99,
    }
)  # fmt: skip
_LEAST_SHARED_KB = 48


def capability_of(device: Device) -> int | None:
    """The compute capability times ten, such as 90; ``None`` where there is none or it is not known."""
    return None if device.capability is None else 10 * device.capability[0] + device.capability[1]


def device_values(device: Device) -> Mapping[str, int] | None:
    """The device as predicates read it; ``None`` where it has no compute capability."""
    capability = capability_of(device)
    if capability is None:
        return None
    shared = _SHARED_KB.get(capability, _LEAST_SHARED_KB)
    return {"capability": capability, "shared_memory": shared << 10, "multiprocessors": device.cores}


def architecture(capability: int) -> str:
    """nvcc's name of a target, such as "86" or "90a".

    From 9.0 on with the features of that architecture alone: what is built is for one device, and wgmma needs them.
    """
    return f"{capability}a" if capability >= 90 else str(capability)


def parse_architecture(text: str) -> int:
    """The compute capability times ten of "90a", "90", "sm_90a" or "9.0".

    Raises:
      ValueError: it is none of these.
    """
    digits = text.removeprefix("sm_").removesuffix("a").replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and 50 <= int(digits) < 1000):
        raise ValueError(f"{text!r} is no CUDA architecture such as 80 or 90a")
    return int(digits)
