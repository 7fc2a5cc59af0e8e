"""What a kernel takes of a device, and what follows from that before anything is compiled or measured."""

import dataclasses
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from tilewright.ops.types import Device

# From the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", by capability times ten:
# shared memory that a block may opt in to, in KB, and those whose registers are half as many.
SHARED_KB = MappingProxyType(
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
_FEW_REGISTERS = (53, 62)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLimits:
    """What one block of threads may have at most.

    Attributes:
      shared_bytes: of shared memory, static and dynamic.
      registers: of all its threads together, 32 bits each.
      threads: of the block.
    """

    shared_bytes: int
    registers: int
    threads: int = 1024


def block_limits(capability: tuple[int, int] | None) -> BlockLimits | None:
    """The limits on devices of a compute capability; ``None`` where they are not known here."""
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    if number not in SHARED_KB:
        return None
    return BlockLimits(SHARED_KB[number] << 10, 1 << (15 if number in _FEW_REGISTERS else 16))


def max_shared_bytes(device: Device, unknown: int) -> int:
    """Shared memory that a block may have on a device; ``unknown`` where that is not known here."""
    limits = block_limits(device.capability)
    return unknown if limits is None else limits.shared_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What one kernel takes; what is ``None`` is not known, and bounds nothing.

    Attributes:
      blocks: of the grid.
      threads: of a block.
      shared_bytes: of a block's shared memory, static and dynamic.
      registers: of a thread when the kernel is launched.
    """

    blocks: int | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None


def launch_reasons(footprints: Iterable[Footprint], device: Device) -> list[str]:
    """Why a device would not launch a kernel of these; empty for one that is not known here."""
    limits = block_limits(device.capability)
    if limits is None:
        return []
    reasons = []
    for each in footprints:
        taken = {"threads": each.threads, "shared_bytes": each.shared_bytes}
        if each.registers is not None and each.threads is not None:
            taken["registers"] = each.registers * each.threads
        for name, size in taken.items():
            limit = getattr(limits, name)
            if size is not None and size > limit:
                reasons.append(f"a block would take {name}={size}, and may have {limit} on {device.name}")
    return reasons


def busy_share(footprints: Sequence[Footprint], device: Device) -> float:
    """The part of a device's multiprocessors that kernels can keep busy at most.

    A block runs on one multiprocessor, so a grid of few blocks leaves the rest of them idle, whatever its kernel does.
    This is the one bound that occupancy gives: how many blocks a multiprocessor holds at a time is none, for a single
    one may keep it busy.

    Args:
      footprints: of every kernel that multiplies matrices; none where they are not known.
    """
    if not footprints or not device.cores:
        return 1.0
    grids = [device.cores if each.blocks is None else each.blocks for each in footprints]
    return min(1.0, max(1, *grids) / device.cores)
