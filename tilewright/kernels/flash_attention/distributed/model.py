"""The choice of a plan by a model of its time in a training step, on GPUs of one host.

Constants are fitted to two H100 with 32 heads on 8 of 128: 1024 to 32768 tokens on each device, causal and packed
(benchmarks/results/nvidia-h100-80gb-hbm3/context_parallel_variants.json). Predictions are within 7 % there from 2048
tokens on for rings and exchanged heads, 18 % for gathered keys.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.plan import ring_steps
from tilewright.kernels.flash_attention.masking import Band
from tilewright.ops.utils.known_devices import measured_rates

type StrategyName = Literal["auto", "ring", "all_gather", "ulysses"]

_RATES = measured_rates("H100")

FLOPS = _RATES.attention / 1e3
"""FLOPs of attention per millisecond."""

LINK_BYTES = _RATES.link / 1e3
"""Bytes per millisecond that a device sends while it receives as many."""

MEMORY_BYTES = _RATES.write / 1e3
"""Bytes per millisecond of device memory."""

COLLECTIVE_MS = 0.045
"""Milliseconds of a collective that moves nothing."""

STEP_MS = 0.12
"""Milliseconds by which a step of the ring delays the device: the launch of its kernels, and the choice of its plan."""

BACKWARD = 2.5
"""Matmul FLOPs of the backward pass relative to the forward pass."""

ARRAY_POSITIONS = 1.5
"""Time of kernels that read positions from arrays relative to those with a band of indices, both passes together.

Fitted to one run; that the arrays are the reason is likely, not shown.
Two H100, causal, 8192 tokens each, 32 heads on 8, head dim 128: gathered keys take 10.1 ms; the model predicts 6.7
without this factor (benchmarks/results/nvidia-h100-80gb-hbm3/context_parallel_first.json).
"""

DOCUMENTS = 1.2
"""Time of the device that has the most to do relative to the mean, where documents are the mask.

How long they are and where they begin is not known while tracing; a device with some of the heads has part of each.
"""

MARGIN = 1.05
"""Predicted speed beside the ring's that another strategy must have, for it needs more memory."""

MAX_GATHERED_BYTES = 4 << 30
"""Bytes of keys and values of all devices beyond which they are not gathered."""


def query_bytes(inputs: ContextInputs) -> int:
    """Bytes of a device's query and output."""
    batch, length, heads, head_dim = inputs.query.shape
    return batch * length * heads * (head_dim + inputs.value.shape[3]) * inputs.query.dtype.itemsize


def key_bytes(inputs: ContextInputs) -> int:
    """Bytes of a device's key and value."""
    return (inputs.key.size + inputs.value.size) * inputs.key.dtype.itemsize


def pair_ms(inputs: ContextInputs) -> float:
    """Milliseconds of a visible pair of query and key in all heads."""
    batch, _, heads, head_dim = inputs.query.shape
    return 2 * batch * heads * (head_dim + inputs.value.shape[3]) / FLOPS


def ulysses_reason(inputs: ContextInputs) -> str:
    """The reason why heads cannot be split over the devices; empty if they can."""
    devices, heads, kv_heads = inputs.devices, inputs.query.shape[2], inputs.key.shape[2]
    if heads % devices or kv_heads % devices:
        return f"{devices} devices must divide the query heads and the key heads, got {heads} and {kv_heads}"
    return ""


@functools.lru_cache(maxsize=64)  # every plan of a choice asks
def best_strategy(inputs: ContextInputs) -> StrategyName:
    """The strategy of the least predicted time among those that can serve the call; the ring if it is about as fast."""
    times = predicted_ms(inputs)
    if inputs.devices * key_bytes(inputs) > MAX_GATHERED_BYTES:
        del times["all_gather"]
    return min(times, key=lambda name: times[name] * (1.0 if name == "ring" else MARGIN))


def predicted_ms(inputs: ContextInputs) -> dict[StrategyName, float]:
    """Milliseconds of both passes for each strategy that can serve the call, in order of preference among equals.

    The ring hides a hop behind the kernels of its step, each of which ends with the device that has the most to do; the
    others move everything before and after one call.
    """
    shards, band, of_keys = inputs.devices, inputs.static_band, key_bytes(inputs)
    steps = ring_steps(inputs.rows, band)
    work = np.array([step.areas() for step in steps] or [[0] * shards], float) * pair_ms(inputs)
    both, uneven = 1 + BACKWARD, DOCUMENTS if inputs.has_documents and shards > 1 else 1.0
    ring = _ring_ms((uneven * work.max(axis=1)).tolist(), inputs)
    # Key, value and both gradients, each with a kernel that brings its rows into order.
    gathered = 3 * (shards - 1) * of_keys / LINK_BYTES + 4 * 2 * COLLECTIVE_MS
    by_array = 1.0 if band == Band() or shards == 1 else ARRAY_POSITIONS
    times: dict[StrategyName, float] = {
        "ring": ring,
        # dK and dV of all devices are float32.
        "all_gather": both * by_array * uneven * float(work.sum(axis=0).max()) + gathered,
    }
    if not ulysses_reason(inputs):
        moved = 2 * (query_bytes(inputs) + of_keys) * (shards - 1) / shards
        times["ulysses"] = both * float(work.sum()) / shards + moved / LINK_BYTES + 8 * COLLECTIVE_MS
    return times


def zigzag_gain(inputs: ContextInputs, strategy: str) -> str | None:
    """A sentence about the time that the zigzag layout would save a contiguous call; ``None`` if it saves none.

    Args:
      strategy: that of the call as it is; with the other layout it is the best, or the one that the caller wants.
    """
    before: Mapping[Any, float] = predicted_ms(inputs)
    if inputs.layout == "zigzag" or inputs.devices == 1 or strategy not in before:
        return None
    if inputs.query.shape[1] % 2 or inputs.key.shape[1] % 2:
        return None
    other = inputs.replace(layout="zigzag")
    after: Mapping[Any, float] = predicted_ms(other)
    wanted = best_strategy(other) if inputs.strategy == "auto" else strategy
    now, then = before[strategy], after[wanted]
    if then >= now:
        return None
    return (
        f"layout='zigzag' with rows reordered by tilewright.zigzag gives every device the same work: {then:.3g} ms by "
        f"{wanted!r} instead of {now:.3g} ms for both passes, by the model of an H100"
    )


def _ring_ms(work: Sequence[float], inputs: ContextInputs) -> float:
    """Milliseconds of a ring's steps; ``work`` is the forward time of the busiest device in each."""
    hop = key_bytes(inputs) / LINK_BYTES
    total = 0.0
    for number, ms in enumerate(work):
        last = number == len(work) - 1
        total += max(ms, 0.0 if last else hop + COLLECTIVE_MS)
        # Keys and values go on, and their gradients follow in float32.
        sent = (0 if last else hop) + (2 * hop if number else 0)
        total += max(BACKWARD * ms, sent + COLLECTIVE_MS if sent else 0.0)
    # A merge reads and writes the partial result and dQ in float32, and reads the addends.
    merging = 10 * (query_bytes(inputs) / inputs.query.dtype.itemsize) / MEMORY_BYTES * (len(work) - 1)
    home = hop + COLLECTIVE_MS if len(work) > 1 else 0.0
    return total + 2 * STEP_MS * len(work) + merging + home
