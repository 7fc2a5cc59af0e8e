"""Peak rates of devices, and the minimum time of a call that follows; a faster measurement is not credible."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.types import Device
from tilewright.ops.utils.known_devices import chip_of


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The minimum that a call must compute and move.

    Attributes:
      flops: floating-point operations of its matmuls.
      bytes: device memory read and written, each array once.
    """

    flops: float
    bytes: float


def array_bytes(tree: Any, *, floating: bool = False) -> int:
    """Bytes of the arrays in a tree, or of the floating-point ones only."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    counted = [x for x in arrays if not floating or jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in counted)


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """Rated peaks of a device.

    Attributes:
      flops: FLOP/s of dense 16-bit matmuls; matmuls of wider operands are not faster.
      bandwidth: bytes per second of device memory.
      cache: bytes of on-chip memory, which may hold arrays that the caller has just written.
    """

    flops: float
    bandwidth: float
    cache: int


def peaks_of(device: Device) -> Peaks | None:
    """The peaks of the fastest device with the same chip; ``None`` if they are unknown."""
    # By chip: the name of a MIG partition, or of a card that the table does not list, does not tell its memory.
    chip = chip_of(device)
    if chip is None or not chip.flops:
        return None
    return Peaks(chip.flops, 1e9 * chip.peak_gbs, round(chip.cache_mb * (1 << 20)))


def min_ms(cost: Cost, device: Device) -> float:
    """A lower bound in milliseconds for any kernel; 0 if the device's peaks are unknown."""
    peaks = peaks_of(device)
    if peaks is None:
        return 0.0
    beyond_cache = max(0.0, cost.bytes - peaks.cache)
    return 1e3 * max(cost.flops / peaks.flops, beyond_cache / peaks.bandwidth)
