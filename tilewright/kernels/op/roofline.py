"""Peak rates of devices, and the minimum time of a call that follows; a faster measurement is not credible."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.types import Device


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
    """Rated peaks of a device, from NVIDIA's data sheets.

    Attributes:
      flops: FLOP/s of dense 16-bit matmuls; matmuls of wider operands are no faster.
      bandwidth: bytes per second of device memory.
      cache: bytes of the last-level cache, which may hold arrays that the caller has just written.
    """

    flops: float
    bandwidth: float
    cache: int


# The first entry that is part of the device's name applies.
_PEAKS = (
    ("GH200", Peaks(989.4e12, 4.9e12, 60 << 20)),
    ("H200", Peaks(989.4e12, 4.8e12, 50 << 20)),
    ("H100", Peaks(989.4e12, 3.9e12, 50 << 20)),  # the fastest memory among the cards of that name
    ("A100", Peaks(312e12, 2.04e12, 40 << 20)),
)


def peaks_of(device: Device) -> Peaks | None:
    """The peaks of a device; ``None`` if they are unknown."""
    return next((peaks for name, peaks in _PEAKS if device.kind == "gpu" and name in device.name), None)


def min_ms(cost: Cost, device: Device) -> float:
    """A lower bound in milliseconds for any kernel; 0 if the device's peaks are unknown."""
    peaks = peaks_of(device)
    if peaks is None:
        return 0.0
    beyond_cache = max(0.0, cost.bytes - peaks.cache)
    return 1e3 * max(cost.flops / peaks.flops, beyond_cache / peaks.bandwidth)
