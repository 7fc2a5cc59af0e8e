"""Checks of the arguments of context-parallel attention, before any work, and their canonical forms."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from tilewright.kernels.flash_attention.arguments import alignment, query_key_value
from tilewright.kernels.flash_attention.distributed.call import ContextCall, MaskArrays
from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.distributed.ring import Keys
from tilewright.kernels.flash_attention.distributed.strategy import Sizes, StrategyName, check_strategy
from tilewright.kernels.flash_attention.masking import (
    FAR,
    Band,
    Pair,
    ScoreShape,
    check_alone,
    is_given,
    lengths_mask,
    packed_bounds,
    segments_mask,
)
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import on_host
from tilewright.kernels.op.sharding import AxisName, check_manual, devices_along


class Prepared(NamedTuple):
    """A call after its checks."""

    strategy: StrategyName
    call: ContextCall
    query: jax.Array
    keys: Keys
    sinks: jax.Array | None
    arrays: MaskArrays
    unbatched: bool


def prepare(
    query: object,
    key: object,
    value: object,
    *,
    axis_name: Any,
    strategy: str,
    layout: str,
    causal: object,
    causal_alignment: object,
    sliding_window: object,
    softmax_scale: object,
    softmax_aux: object,
    segment_ids: Pair,
    lengths: Pair,
    cum_seqlens: Pair,
    return_lse: object,
    options: dict[str, Any],
) -> Prepared:
    """Checks a call inside ``shard_map``.

    Raises:
      ValueError, TypeError: a wrong argument, or one that has no meaning here.
    """
    queries, keys, values, unbatched = query_key_value(query, key, value)
    axis: AxisName = tuple(axis_name) if isinstance(axis_name, list | tuple) else axis_name
    split = _layout(layout, devices_along(axis, "rows"), queries.shape[1], keys.shape[1])
    queries, scale = arguments.scaled(queries, softmax_scale)
    bottom_right = alignment(causal_alignment)
    is_causal = arguments.flag("causal", causal)
    band, moving = _band(split, is_causal, sliding_window, bottom_right, lengths, cum_seqlens)
    shape = ScoreShape(queries.shape[0], queries.shape[2], split.q_length, split.kv_length, unbatched)
    arrays = _mask_arrays(shape, segment_ids, lengths, cum_seqlens)
    sinks = None if softmax_aux is None else arguments.sinks_array(softmax_aux, queries.shape[2])
    # As the kernel does with 64-bit sinks beside narrower queries: the ring adds them itself.
    sinks = arguments.to_32_bit(sinks, queries.dtype)
    # Canonical here, so that a wrong option is an error before the first hop.
    checked = {
        "softmax_scale": scale,
        "logits_soft_cap": arguments.soft_cap(options["logits_soft_cap"]),
        "precision": arguments.matmul_precision(options["precision"]),
        "platform": arguments.platforms(options["platform"]),
    }
    call = ContextCall(
        axis, split, band, moving, bottom_right, _longest(cum_seqlens), tuple(checked.items()),
        options["cfg"], arguments.flag("return_lse", return_lse),
    )  # fmt: skip
    sizes = Sizes(
        split, queries.shape[0], queries.shape[2], keys.shape[2], queries.shape[3], values.shape[3],
        queries.dtype.itemsize,
    )  # fmt: skip
    documents = arrays.q_bounds is not None or arrays.kv_ids is not None
    chosen = check_strategy(strategy, sizes, call.static_band, documents)
    if strategy in ("auto", "ring"):
        check_manual(AxisType.Auto)
    return Prepared(chosen, call, queries, Keys(keys, values, arrays.kv_ids), sinks, arrays, unbatched)


def _layout(name: str, shards: int, q_length: int, kv_length: int) -> Layout:
    if name == "contiguous":
        return Layout("contiguous", shards, q_length, kv_length)
    if name != "zigzag":
        raise ValueError(f"layout={name!r} must be 'zigzag' or 'contiguous'")
    if q_length % 2 or kv_length % 2:
        raise ValueError(
            "layout='zigzag' gives each device two chunks of one size, got an odd number of rows on each device: "
            f"{q_length} of the query, {kv_length} of the keys; use layout='contiguous' or an even number"
        )
    return Layout("zigzag", shards, q_length, kv_length)


def _band(
    layout: Layout, causal: bool, window: object, bottom_right: bool, lengths: Pair, cum_seqlens: Pair
) -> tuple[Band, bool]:
    """The band of the call, and True if it counts from the ends of each element or packed sequence."""
    left, right = arguments.window(window, causal) if window is not None else (None, 0 if causal else None)
    if left is None and right is None:
        return Band(), False
    # By identity, as ``flash_attention`` does: values are not known while tracing.
    packed = cum_seqlens[0] is not None and cum_seqlens[0] is not cum_seqlens[1]
    moving = packed or (bottom_right and any(each is not None for each in lengths))
    # Sequences that have the same boundaries on both sides are aligned at either end as their indices are.
    shifted = bottom_right and not moving and cum_seqlens[0] is None
    offset = layout.shards * (layout.kv_length - layout.q_length) if shifted else 0
    return Band(-FAR if left is None else offset - left, FAR if right is None else offset + right), moving


def _longest(cum_seqlens: Pair) -> int | None:
    """Tokens of the longest of packed sequences if the host has their boundaries, which are the same for the keys."""
    bounds = cum_seqlens[0]
    if bounds is not cum_seqlens[1] or not on_host(bounds):
        return None
    return max(1, int(np.diff(np.asarray(bounds)).max(initial=1)))


def _mask_arrays(shape: ScoreShape, segment_ids: Pair, lengths: Pair, cum_seqlens: Pair) -> MaskArrays:
    found: dict[str, Any] = {}
    if is_given("cum_seqlens_q", "cum_seqlens_k", cum_seqlens):
        check_alone(segment_ids, lengths)
        found["q_bounds"], found["kv_bounds"] = packed_bounds(shape.batch, cum_seqlens)
    if is_given("q_segment_ids", "kv_segment_ids", segment_ids):
        ids = segments_mask(shape, segment_ids)
        found |= {"q_ids": ids.q_segment_ids, "kv_ids": ids.kv_segment_ids}
    mask = lengths_mask(shape, lengths)
    return MaskArrays(**found, q_lengths=mask.q_lengths, kv_lengths=mask.kv_lengths)
