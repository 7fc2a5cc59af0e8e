"""Resources that a kernel needs on a device, and the limits that follow before anything is compiled or measured."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tilewright.ops.types import Device
from tilewright.ops.utils.known_devices import SHARED_KB, chip_of

# From the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability": those with half as many
# registers per block, times ten.
_HALF_REGISTERS = (53, 62)


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


def max_vmem_bytes(device: Device) -> int | None:
    """The VMEM of a core of a TPU; ``None`` if it is unknown, and for other devices."""
    chip = chip_of(device) if device.kind == "tpu" else None
    return None if chip is None or not chip.vmem_mb else chip.vmem_mb << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of one kernel; a field that is ``None`` is unknown, and implies no limit.

    Attributes:
      blocks: number of blocks in the grid; on a TPU those steps of the grid that may run on different cores.
      threads: number of threads in a block.
      shared_bytes: shared memory of a block, static and dynamic.
      registers: registers of a thread at launch.
      vmem_bytes: VMEM of a core of a TPU: the buffers of all blocks that are in flight, and scratch.
    """

    blocks: int | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    vmem_bytes: int | None = None

    @property
    def needs(self) -> Mapping[str, int | None]:
        """The resources that devices limit, by name."""
        found = {"threads": self.threads, "shared_bytes": self.shared_bytes, "vmem_bytes": self.vmem_bytes}
        if self.registers is not None and self.threads is not None:
            found["registers"] = self.registers * self.threads
        return found


def limits_of(device: Device) -> Mapping[str, int]:
    """The maximum resources of a block of a kernel, by the names of ``Footprint.needs``; without those not known."""
    # Mosaic for TPUs takes less VMEM by default, but a kernel may ask for all of it.
    block, vmem = block_limits(device.capability), max_vmem_bytes(device)
    found = {} if block is None else dataclasses.asdict(block)
    return found if vmem is None else {**found, "vmem_bytes": vmem}


def launch_reasons(footprints: Iterable[Footprint], device: Device) -> list[str]:
    """Reasons why a device would not launch one of these kernels; empty if its limits are unknown."""
    limits = limits_of(device)
    return [
        f"a block would take {name}={size}, and may have {limits[name]} on {device.name}"
        for each in footprints
        for name, size in each.needs.items()
        if size is not None and size > limits.get(name, size)
    ]


def busy_share(footprints: Sequence[Footprint], device: Device) -> float:
    """An upper bound of the share of a device's multiprocessors, or of a TPU's cores, that kernels can keep busy.

    A block runs on one of them, so a small grid leaves the others idle. Occupancy implies no further bound: however few
    blocks fit on a multiprocessor, a single one may keep it busy.

    Args:
      footprints: those of every kernel with matmuls; empty if unknown.
    """
    if not footprints or not device.cores:
        return 1.0
    # The share of the arithmetic that each kernel does is not known, so the largest grid bounds them all.
    grids = [device.cores if each.blocks is None else each.blocks for each in footprints]
    return min(1.0, max(1, *grids) / device.cores)
