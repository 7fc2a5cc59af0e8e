"""What devices can do at most, and so the least time that a call can take; a measurement below it is not believed."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.types import Device


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What a call must compute and move at least.

    Attributes:
      flops: floating-point operations of its matrix products.
      bytes: device memory read and written, each array once.
    """

    flops: float
    bytes: float


def array_bytes(tree: Any, *, floating: bool = False) -> int:
    """Bytes of the arrays in a tree, of floating-point ones alone if asked."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    wanted = [x for x in arrays if not floating or jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in wanted)


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """Rated maxima of a device, from NVIDIA's data sheets.

    Attributes:
      flops: per second, of dense matrix products in 16 bits; no product of wider operands is faster.
      bandwidth: bytes per second of device memory.
      cache: bytes of the last cache before it, which may hold what the caller has just written.
    """

    flops: float
    bandwidth: float
    cache: int


# By what a device's name holds; the first that fits.
_PEAKS = (
    ("GH200", Peaks(989.4e12, 4.9e12, 60 << 20)),
    ("H200", Peaks(989.4e12, 4.8e12, 50 << 20)),
    ("H100", Peaks(989.4e12, 3.9e12, 50 << 20)),  # the fastest memory among the cards of that name
    ("A100", Peaks(312e12, 2.04e12, 40 << 20)),
)


def peaks_of(device: Device) -> Peaks | None:
    """The maxima of a device; ``None`` where they are not known here."""
    return next((peaks for name, peaks in _PEAKS if device.kind == "gpu" and name in device.name), None)


def min_ms(cost: Cost, device: Device) -> float:
    """The milliseconds below which no kernel can be; 0 for a device that is not known here."""
    peaks = peaks_of(device)
    if peaks is None:
        return 0.0
    beyond_cache = max(0.0, cost.bytes - peaks.cache)
    return 1e3 * max(cost.flops / peaks.flops, beyond_cache / peaks.bandwidth)
