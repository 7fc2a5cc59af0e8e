"""The op of attention over a split sequence: its argument list, and what its plans share."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import ArrayLike

from tilewright.kernels.flash_attention.arguments import alignment, query_key_value
from tilewright.kernels.flash_attention.contents import CONTENTS
from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.layout import LayoutName
from tilewright.kernels.flash_attention.distributed.model import StrategyName, zigzag_gain
from tilewright.kernels.flash_attention.distributed.whole import gathered_attention
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
from tilewright.kernels.flash_attention.options import AttentionOptions
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import on_host
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.distributed import TracedOp
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.kernels.op.public import with_defaults
from tilewright.kernels.op.sharding import AxisName, axis_of, check_manual, devices_along
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.prepared import prepare
from tilewright.ops.utils.device import current_device

_PLANS = "tilewright.kernels.flash_attention.distributed.plans"


class ContextParallelOp(TracedOp[ContextInputs, Any], abc.ABC):
    """Attention over a sequence whose rows are split; see ``context_parallel_attention`` for the arguments."""

    contents = CONTENTS

    def __init__(self) -> None:
        plans = ("RingAttention", "GatheredAttention", "UlyssesAttention")
        super().__init__("context_parallel_attention", version="1", backends=[f"{_PLANS}:{plan}" for plan in plans])

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: None = None,
        mask: None = None,
        *,
        axis_name: AxisName,
        strategy: StrategyName = "auto",
        layout: LayoutName = "contiguous",
        **options: Unpack[AttentionOptions],
    ) -> ContextInputs:
        """Checks a call inside ``shard_map``."""
        given = with_defaults(AttentionOptions, options)
        check_refused(bias, mask, {"dropout_prob": given["dropout_prob"]})
        queries, keys, values, unbatched = query_key_value(query, key, value)
        axis = axis_of(axis_name)
        devices = devices_along(axis, "rows")
        batch, q_length, heads, _ = queries.shape
        kv_length = keys.shape[1]
        rows = _checked_layout(layout, q_length, kv_length)
        queries, scale = arguments.scaled(queries, given["softmax_scale"])
        bottom_right, is_causal = alignment(given["causal_alignment"]), arguments.flag("causal", given["causal"])
        lengths = given["query_seq_lengths"], given["key_value_seq_lengths"]
        cum_seqlens = given["cum_seqlens_q"], given["cum_seqlens_k"]
        further = devices * (kv_length - q_length)
        band, moving = _band(is_causal, given["sliding_window"], bottom_right, further, lengths, cum_seqlens)
        shape = ScoreShape(batch, heads, q_length, kv_length, unbatched)
        masking = _mask_arrays(shape, (given["q_segment_ids"], given["kv_segment_ids"]), lengths, cum_seqlens)
        sinks = None if given["softmax_aux"] is None else arguments.sinks_array(given["softmax_aux"], heads)
        inputs = ContextInputs(
            queries,
            keys,
            values,
            softmax_scale=scale,
            layout=rows,
            # As the kernel does with 64-bit sinks beside narrower queries: the ring adds them itself.
            softmax_aux=arguments.to_32_bit(sinks, queries.dtype),
            lowest=band.lowest,
            highest=band.highest,
            moving_ends=moving,
            bottom_right=bottom_right,
            longest=_longest(cum_seqlens),
            logits_soft_cap=arguments.soft_cap(given["logits_soft_cap"]),
            precision=arguments.matmul_precision(given["precision"]),
            return_lse=arguments.flag("return_lse", given["return_lse"]),
            unbatched=unbatched,
            platform=cast("Portfolio[Any, Any]", self.kernel).backends.allowed(given["platform"]),
            devices=devices,
            strategy=strategy,
            axis=axis,
            **masking,
        )
        self.check_strategy(inputs, current_device())
        if strategy in ("auto", "ring"):
            check_manual(AxisType.Auto)
        return inputs

    def advice(self, inv: Invocation[Choice, Any], cfg: Choice) -> Sequence[str]:
        """The gain of the zigzag layout under a causal mask."""
        gain = zigzag_gain(self.inputs_of(inv), cfg.backend)
        return [] if gain is None else [gain]

    def results(self, inputs: ContextInputs) -> Any:
        """``(out, lse)`` of this device's queries."""
        batch, q_length, heads, _ = inputs.query.shape
        out = jax.ShapeDtypeStruct((batch, q_length, heads, inputs.value.shape[3]), inputs.query.dtype)
        return out, jax.ShapeDtypeStruct((batch, heads, q_length), accumulation_dtype(inputs.query.dtype))

    def outputs(self, inputs: ContextInputs, results: Any) -> Any:
        """The caller's results, from ``(out, lse)``."""
        out, lse = (each[0] for each in results) if inputs.unbatched else results
        return (out, lse) if inputs.return_lse else out

    def reference(self, inputs: ContextInputs) -> Any:
        """The oracle inside ``shard_map``: that of ``flash_attention`` with the keys and values of all devices."""

        attention = cast("Portfolio[Any, Any]", self.kernel)

        def oracle(*args: Any, cfg: object, **options: Any) -> Any:
            (call,), _ = prepare(attention, args, options)
            return attention.reference(call)

        return self.outputs(inputs, gathered_attention(self.completed(inputs).replace(kernel=oracle), None))

    def sampled(self, inputs: ContextInputs, key: jax.Array) -> ContextInputs:
        """Normal arrays, a few segments, whole lengths, packed sequences of one length."""
        found, devices = super().sampled(inputs, key), inputs.devices
        ends = {"q": devices * inputs.query.shape[1], "kv": devices * inputs.key.shape[1]}
        drawn: dict[str, Any] = {}
        for side, end in ends.items():
            if (lengths := inputs.arrays[f"{side}_lengths"]) is not None:
                drawn[f"{side}_lengths"] = jnp.full(lengths.shape, end, jnp.int32)
            if (bounds := inputs.arrays[f"{side}_bounds"]) is not None:
                drawn[f"{side}_bounds"] = jnp.asarray(np.linspace(0, end, bounds.shape[0]).astype(np.int32))
        return found.replace(**drawn)


def _checked_layout(name: object, q_length: int, kv_length: int) -> LayoutName:
    if name == "contiguous":
        return "contiguous"
    if name != "zigzag":
        raise ValueError(f"layout={name!r} must be 'zigzag' or 'contiguous'")
    if q_length % 2 or kv_length % 2:
        raise ValueError(
            "layout='zigzag' gives each device two chunks of one size, got an odd number of rows on each device: "
            f"{q_length} of the query, {kv_length} of the keys; use layout='contiguous' or an even number"
        )
    return "zigzag"


def _band(
    causal: bool, window: object, bottom_right: bool, further: int, lengths: Pair, cum_seqlens: Pair
) -> tuple[Band, bool]:
    """The band of the call, and True if it counts from the ends of each element or packed sequence.

    Args:
      further: the number of keys beyond that of queries, in the whole sequence.
    """
    left, right = arguments.window(window, causal) if window is not None else (None, 0 if causal else None)
    if left is None and right is None:
        return Band(), False
    # By identity, as ``flash_attention`` does: values are not known while tracing.
    packed = cum_seqlens[0] is not None and cum_seqlens[0] is not cum_seqlens[1]
    moving = packed or (bottom_right and any(each is not None for each in lengths))
    # Sequences that have the same boundaries on both sides are aligned at either end as their indices are.
    shifted = bottom_right and not moving and cum_seqlens[0] is None
    offset = further if shifted else 0
    return Band(-FAR if left is None else offset - left, FAR if right is None else offset + right), moving


def _longest(cum_seqlens: Pair) -> int | None:
    """Tokens of the longest of packed sequences if the host has their boundaries, which are the same for the keys."""
    bounds = cum_seqlens[0]
    if bounds is not cum_seqlens[1] or not on_host(bounds):
        return None
    return max(1, int(np.diff(np.asarray(bounds)).max(initial=1)))


def _mask_arrays(shape: ScoreShape, segment_ids: Pair, lengths: Pair, cum_seqlens: Pair) -> dict[str, Any]:
    """The arrays that mask, by field."""
    found: dict[str, Any] = {}
    if is_given("cum_seqlens_q", "cum_seqlens_k", cum_seqlens):
        check_alone(segment_ids, lengths)
        found["q_bounds"], found["kv_bounds"] = packed_bounds(shape.batch, cum_seqlens)
    if is_given("q_segment_ids", "kv_segment_ids", segment_ids):
        ids = segments_mask(shape, segment_ids)
        found |= {"q_ids": ids.q_segment_ids, "kv_ids": ids.kv_segment_ids}
    mask = lengths_mask(shape, lengths)
    return found | {"q_lengths": mask.q_lengths, "kv_lengths": mask.kv_lengths}


def check_refused(bias: object, mask: object, options: Mapping[str, Any]) -> None:
    """Raises for arguments that are of all pairs of queries and keys."""
    # Without dropout a seed may be given, as to ``flash_attention``.
    probability = options.get("dropout_prob") or None
    given = [name for name, each in (("bias", bias), ("mask", mask), ("dropout_prob", probability)) if each is not None]
    if given:
        raise ValueError(
            f"attention over a split sequence takes no {' or '.join(given)}: it is of all pairs of queries and keys, "
            "of which a device has some; mask by causal, sliding_window, segment ids, lengths or cumulative lengths"
        )
