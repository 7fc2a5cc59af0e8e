"""The TPUs that kernels are written for, and what a core of them has."""

from tilewright.kernels.op.footprint import max_vmem_bytes
from tilewright.ops.types import Device
from tilewright.ops.utils.known_devices import chip_of

CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
"""The chips that every kernel is compiled for in the tests (``tests/aot_tpu``)."""

LANES = 128
"""Columns of a vector register, and of a tile in VMEM."""

SUBLANES = 8
"""Rows of a vector register of 32-bit elements; rows of narrower ones are packed into as many."""

VMEM_RESERVE = 2 << 20
"""Bytes of VMEM that are left to the compiler, for its own scratch and for spilled registers."""


def device_reasons(device: Device) -> list[str]:
    """Reasons why a device is no TPU that the kernels are for; empty if it is one."""
    chip = chip_of(device) if device.kind == "tpu" else None
    if chip is not None and chip.name in CHIPS:
        return []
    return [f"needs a TPU v5e, v5p, v6e or v7x, got {device.described}"]


def vmem_bytes(device: Device) -> int:
    """The VMEM that a kernel may have on a TPU; that of the smallest one for other devices."""
    return (max_vmem_bytes(device) or 64 << 20) - VMEM_RESERVE
