"""Context-parallel attention as a function of arrays, on a given kernel; ``op.py`` has the public one."""

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.flash_attention.distributed.arguments import prepare
from tilewright.kernels.flash_attention.distributed.ring import AttentionKernel, ring_attention
from tilewright.kernels.flash_attention.distributed.whole import gathered_attention, ulysses_attention

_STRATEGIES = {"ring": ring_attention, "all_gather": gathered_attention, "ulysses": ulysses_attention}

OPTIONS = ("logits_soft_cap", "precision", "platform", "cfg")
"""The options that every call of the kernel gets as they are."""


def attention_over_axis(
    kernel: AttentionKernel,
    query: object,
    key: object,
    value: object,
    bias: object = None,
    mask: object = None,
    *,
    axis_name: object,
    strategy: str = "auto",
    layout: str = "zigzag",
    causal: object = False,
    causal_alignment: object = "top_left",
    sliding_window: object = None,
    softmax_scale: object = None,
    softmax_aux: object = None,
    q_segment_ids: object = None,
    kv_segment_ids: object = None,
    query_seq_lengths: object = None,
    key_value_seq_lengths: object = None,
    cum_seqlens_q: object = None,
    cum_seqlens_k: object = None,
    dropout_prob: object = 0.0,
    dropout_seed: object = None,
    return_lse: object = False,
    **options: Any,
) -> Any:
    """``(out, lse)`` or ``out`` of this device's queries; see ``context_parallel_attention``.

    Raises:
      ValueError, TypeError: a wrong argument, or one that has no meaning over several devices.
    """
    check_refused(bias, mask, {"dropout_prob": dropout_prob, "dropout_seed": dropout_seed})
    prepared = prepare(
        query, key, value,
        axis_name=axis_name, strategy=strategy, layout=layout,
        causal=causal, causal_alignment=causal_alignment, sliding_window=sliding_window,
        softmax_scale=softmax_scale, softmax_aux=softmax_aux,
        segment_ids=(q_segment_ids, kv_segment_ids), lengths=(query_seq_lengths, key_value_seq_lengths),
        cum_seqlens=(cum_seqlens_q, cum_seqlens_k), return_lse=return_lse,
        options=dict.fromkeys(OPTIONS) | options,
    )  # fmt: skip
    run = _STRATEGIES[prepared.strategy]
    out, lse = run(kernel, prepared.call, prepared.query, prepared.keys, prepared.sinks, prepared.arrays)
    if prepared.unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if prepared.call.return_lse else out


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
