"""The public function of attention over a split sequence."""

from typing import Any

from tilewright.kernels.flash_attention.op import CONTEXT_PARALLEL_ATTENTION, ContextParallelAttention
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results


@public_function(ContextParallelAttention.prepare)
@results(WITH_LSE)
def context_parallel_attention(*args: Any, **kwargs: Any) -> Any:
    """``flash_attention`` over a sequence whose rows are split over a mesh axis, inside ``jax.shard_map``.

    Every device passes its own rows and gets the output of its queries; the result is that of one device with the whole
    sequence, but for rounding. Gradients with respect to query, key, value and softmax_aux are exact. Partial results
    and sums of gradients are float32; what a device computes in one step is rounded to the query's dtype, as the output
    of ``flash_attention`` is. The ring has no forward-mode derivative.

    Args:
      query: ``[batch, q_length / n, heads, head_dim]``, this device's part of n; the batch dimension may be absent from
        all arrays of a call.
      key: ``[batch, kv_length / n, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
      value: ``[batch, kv_length / n, kv_heads, value_dim]``.
      bias: refused, as are mask and dropout: they are of all pairs of queries and keys.
      mask: refused.
      axis_name: the axis of the surrounding ``shard_map`` over which the rows are split, or several.
      strategy: "ring" passes keys and values around, behind the computation; "all_gather" gathers them first;
        "ulysses" exchanges rows for heads and back, which both numbers of heads must allow; "auto" takes the least
        time by a measurement on this mesh (``tilewright.tune``), or else by a model of an H100's links and FLOPs.
      layout: the rows of device i. "contiguous": the i-th part of n, as a sharding splits an array. "zigzag": chunks i
        and 2n − 1 − i of 2n, so that a causal mask leaves every device the same work: the caller has reordered the
        whole sequence by ``zigzag``, or else the result is that of another sequence. ``explain`` says what it gains.
      causal: a query sees the keys up to its own position in the whole sequence.
      causal_alignment: as for ``flash_attention``, of the whole sequence.
      sliding_window: as for ``flash_attention``. A ring ends early if no device sees keys further away.
      softmax_scale: as for ``flash_attention``.
      logits_soft_cap: as for ``flash_attention``.
      softmax_aux: sinks, ``[heads]`` or ``[heads, n]``, the same on every device.
      q_segment_ids: ``[batch, q_length / n]`` integers of this device's rows.
      kv_segment_ids: ``[batch, kv_length / n]``.
      query_seq_lengths: ``[batch]``, of the whole sequences; the same on every device.
      key_value_seq_lengths: ``[batch]``, of the whole sequences.
      cum_seqlens_q: ``[sequences + 1]`` boundaries in the whole sequence, of a batch of one; the same on every device.
        Pass the very same array as ``cum_seqlens_k`` for self-attention: a causal ring then leaves steps out, and with
        a NumPy array any ring those that are further than the longest sequence.
      cum_seqlens_k: the boundaries among the keys.
      dropout_prob: refused unless 0.
      dropout_seed: of no use without dropout.
      return_lse: also return the log-sum-exp of this device's queries, float32 ``[batch, heads, q_length / n]``.
      precision: precision of the matmuls.
      platform: as for ``flash_attention``, of each call that a device makes.
      cfg: a ``Choice`` of a plan, or a config for each call that a device makes.

    Returns:
      ``[batch, q_length / n, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. Rows without
      a visible key are as those of ``flash_attention``.

    Raises:
      ValueError, TypeError: a wrong argument; the call is outside of ``shard_map``; a bias, a mask or dropout; an odd
        number of rows on a device with layout="zigzag"; heads that n does not divide with strategy="ulysses".
      UnsupportedError: no allowed platform can serve a call.

    The ring is that of arXiv 2310.01889 with the kernels of FlashAttention-2; "ulysses" is arXiv 2309.14509.
    """
    return CONTEXT_PARALLEL_ATTENTION(*args, **kwargs)
