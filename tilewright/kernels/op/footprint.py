"""Resources that a kernel needs on a device, and the limits that follow before anything is compiled or measured."""

import dataclasses
from collections.abc import Iterable, Sequence

from tilewright.ops.types import Device
from tilewright.ops.utils.known_devices import SHARED_KB

_HALF_REGISTERS = (53, 62)
"""Compute capabilities times ten with half as many registers per block (CUDA C++ Programming Guide)."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLimits:
    """Maximum resources of one thread block.

    Attributes:
      shared_bytes: shared memory, static and dynamic.
      registers: 32-bit registers of all its threads together.
      threads: number of threads.
    """

    shared_bytes: int
    registers: int
    threads: int = 1024


def block_limits(capability: tuple[int, int] | None) -> BlockLimits | None:
    """The limits on devices of a compute capability; ``None`` if they are unknown."""
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    if number not in SHARED_KB:
        return None
    # 64 K registers of 32 bits, half of that on two embedded GPUs.
    return BlockLimits(SHARED_KB[number] << 10, 1 << (15 if number in _HALF_REGISTERS else 16))


def max_shared_bytes(device: Device, unknown: int) -> int:
    """The maximum shared memory of a block on a device; ``unknown`` if the device's limit is unknown."""
    limits = block_limits(device.capability)
    return unknown if limits is None else limits.shared_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of one kernel; a field that is ``None`` is unknown, and implies no limit.

    Attributes:
      blocks: number of blocks in the grid.
      threads: number of threads in a block.
      shared_bytes: shared memory of a block, static and dynamic.
      registers: registers of a thread at launch.
    """

    blocks: int | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None


def launch_reasons(footprints: Iterable[Footprint], device: Device) -> list[str]:
    """Reasons why a device would not launch one of these kernels; empty if its limits are unknown."""
    limits = block_limits(device.capability)
    if limits is None:
        return []
    reasons = []
    for each in footprints:
        needed = {"threads": each.threads, "shared_bytes": each.shared_bytes}
        if each.registers is not None and each.threads is not None:
            needed["registers"] = each.registers * each.threads
        for name, size in needed.items():
            limit = getattr(limits, name)
            if size is not None and size > limit:
                reasons.append(f"a block would take {name}={size}, and may have {limit} on {device.name}")
    return reasons


def busy_share(footprints: Sequence[Footprint], device: Device) -> float:
    """An upper bound of the share of a device's multiprocessors that kernels can keep busy.

    A block runs on one multiprocessor, so a small grid leaves the others idle. Occupancy implies no further bound:
    however few blocks fit on a multiprocessor, a single one may keep it busy.

    Args:
      footprints: those of every kernel with matmuls; empty if unknown.
    """
    if not footprints or not device.cores:
        return 1.0
    # The share of the arithmetic that each kernel does is not known, so the largest grid bounds them all.
    grids = [device.cores if each.blocks is None else each.blocks for each in footprints]
    return min(1.0, max(1, *grids) / device.cores)
