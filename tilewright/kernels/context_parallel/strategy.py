"""The choice of a strategy by a model of its time, forward, on GPUs of one host."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from tilewright.kernels.context_parallel.layout import Layout
from tilewright.kernels.context_parallel.plan import ring_steps
from tilewright.kernels.flash_attention.masking import Band

type StrategyName = Literal["auto", "ring", "all_gather", "ulysses"]

FLOPS = 6e11
"""FLOPs of attention per millisecond: bfloat16 on an H100."""

LINK_BYTES = 3e8
"""Bytes per millisecond that a device sends while it receives as many: NVLink of an H100, 450 GB/s at most."""

MEMORY_BYTES = 2.5e9
"""Bytes per millisecond of device memory."""

COLLECTIVE_MS = 0.02
"""Milliseconds of a collective that moves nothing."""

STEP_MS = 0.03
"""Milliseconds by which a step of the ring delays the device: the launch of its kernels, and the choice of its plan."""

MAX_GATHERED_BYTES = 4 << 30
"""Bytes of keys and values of all devices beyond which they are not gathered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a device's part."""

    layout: Layout
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @property
    def query_bytes(self) -> int:
        """Bytes of the query and the output."""
        return self.batch * self.layout.q_length * self.heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def key_bytes(self) -> int:
        """Bytes of key and value."""
        return self.batch * self.layout.kv_length * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def pair_ms(self) -> float:
        """Milliseconds of a visible pair of query and key in all heads."""
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim) / FLOPS

    @property
    def ulysses_reason(self) -> str:
        """The reason why heads cannot be split over the devices; empty if they can."""
        shards = self.layout.shards
        if self.heads % shards or self.kv_heads % shards:
            return (
                f"{shards} devices must divide the query heads and the key heads, got {self.heads} and {self.kv_heads}"
            )
        return ""


def best_strategy(sizes: Sizes, band: Band) -> StrategyName:
    """The strategy of the least predicted time among those that can serve the call."""
    times = predicted_ms(sizes, band)
    if sizes.layout.shards * sizes.key_bytes > MAX_GATHERED_BYTES:
        del times["all_gather"]
    return min(times, key=lambda name: times[name])


def predicted_ms(sizes: Sizes, band: Band) -> dict[StrategyName, float]:
    """Milliseconds of each strategy that can serve the call, in order of preference among equals.

    The ring hides a hop behind the kernels of its step, each of which ends with the device that has the most to do; the
    others move everything before and after one call.
    """
    # A backward pass multiplies computation and transfers by nearly the same factor, so the forward pass decides.
    layout, shards = sizes.layout, sizes.layout.shards
    steps = ring_steps(layout, band)
    work = np.array([step.areas() for step in steps] or [[0] * shards], float) * sizes.pair_ms
    hop = sizes.key_bytes / LINK_BYTES + COLLECTIVE_MS
    # The partial result is read and written in float32.
    merging = 8 * sizes.batch * layout.q_length * sizes.heads * sizes.value_dim / MEMORY_BYTES
    hops = [hop] * (len(work) - 1) + [0.0]
    times: dict[StrategyName, float] = {
        "ring": sum(max(ms, each) for ms, each in zip(work.max(axis=1).tolist(), hops, strict=True))
        + len(work) * (STEP_MS + merging),
        "all_gather": float(work.sum(axis=0).max()) + (shards - 1) * sizes.key_bytes / LINK_BYTES + COLLECTIVE_MS,
    }
    if not sizes.ulysses_reason:
        moved = (sizes.query_bytes + sizes.key_bytes) * (shards - 1) / shards
        times["ulysses"] = float(work.sum()) / shards + moved / LINK_BYTES + 4 * COLLECTIVE_MS
    return times


def check_strategy(strategy: str, sizes: Sizes, band: Band) -> StrategyName:
    """The strategy that runs.

    Raises:
      ValueError: there is none of that name, or it cannot serve the call.
    """
    if strategy == "auto":
        return best_strategy(sizes, band)
    known: Mapping[str, StrategyName] = {"ring": "ring", "all_gather": "all_gather", "ulysses": "ulysses"}
    if strategy not in known:
        raise ValueError(f"{strategy=} must be 'auto', 'ring', 'all_gather' or 'ulysses'")
    if strategy == "ulysses" and sizes.ulysses_reason:
        raise ValueError(f"strategy='ulysses' splits the heads: {sizes.ulysses_reason}; use 'ring' or 'all_gather'")
    return known[strategy]
