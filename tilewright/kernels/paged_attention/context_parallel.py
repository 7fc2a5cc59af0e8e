"""Attention over pages that are split over a mesh axis: the functions for use inside ``shard_map``.

They call the serving ops and share their configs and tables; they have no kernels of their own, because a kernel is
selected and tuned on one device, which has no axis to communicate over.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, flag, scaled, sinks_array, soft_cap
from tilewright.kernels.op.sharding import AxisName
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.ops.mla_decode import mla_decode
from tilewright.kernels.paged_attention.ops.page_attention import page_attention
from tilewright.kernels.paged_attention.ops.ragged_page_attention import ragged_page_attention
from tilewright.kernels.paged_attention.ops.update_pages import update_pages
from tilewright.kernels.paged_attention.results import PAGES
from tilewright.kernels.paged_attention.split_pages import SplitPages, token_ranges
from tilewright.ops.kernel.kernel import errors_naming_function
from tilewright.ops.utils.promotion import default_promotion

type Window = int | tuple[int | None, int | None] | None


@results(WITH_LSE)
@default_promotion()
def context_parallel_page_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    cum_q_lens: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    causal: bool = True,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    softmax_scale: ArrayLike | None = None,
    sliding_window: Window = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    page_offset: ArrayLike | None = None,
    return_lse: bool = False,
    platform: PlatformOption = None,
) -> Any:
    """``page_attention`` or ``ragged_page_attention`` over pages split over a mesh axis, inside ``jax.shard_map``.

    Device i of n has the logical pages i, i + n, i + 2n, ... of every sequence, in pages of its own. Each attends to
    its pages, and partial results are gathered with their log-sum-exp; for many tokens on many devices they are summed
    instead, by one maximum of ``[tokens, heads]`` and one sum of ``[tokens, heads, value_dim + 1]``, both in float32.
    All arrays except pages and scales of pages are the same on every device, and so are the results. They differ from
    those of one device only by rounding: a device's output is rounded to the query's dtype, then the sum is.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]``: this device's pages, in the query's dtype, int8,
        float8_e4m3fn or float8_e5m2.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      page_table: ``[sequences, pages_per_sequence]`` integers: column p has a number among the pages of device p mod n.
        A page that does not exist there holds nothing.
      kv_lengths: ``[sequences]`` integers: tokens of each sequence on all devices, the new ones included, which are the
        last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      axis_name: the axis of the surrounding ``shard_map`` over which pages are split, or several.
      causal: a query sees the keys up to its own position.
      key_scale: factor of stored keys: a number, or broadcastable to this device's ``[num_pages, page_size, kv_heads]``
        with rank 3.
      value_scale: the same for the values.
      softmax_scale: 1/√head_dim by default.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, as in
        ``ragged_page_attention``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes.
      softmax_aux: sinks, ``[heads]`` or ``[heads, n]``, the same on every device; they count once.
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits.
      page_offset: added to the pages of the table that are not negative, as in ``page_attention``.
      return_lse: also return the natural log-sum-exp of the logits.
      platform: as in ``page_attention``, of each device's call.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A token that sees no key
      gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument, or a call outside of ``shard_map``.
      UnsupportedError: no allowed platform can serve a call.

    A device reads only its own pages, unless there are ``alibi_slopes``, or more than n query tokens for each sequence:
    then it goes over the whole table, in which the pages of other devices are missing.
    """
    with errors_naming_function("context_parallel_page_attention"):
        split = SplitPages.of(axis_name)
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        arguments.check_heads(queries, keys)
        tokens, heads, _ = queries.shape
        given = None if cum_q_lens is not None else tokens
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, given)
        sequences = lengths.shape[0]
        table = arguments.moved_pages(arguments.page_table_array(page_table, sequences), page_offset)
        bounds = None if cum_q_lens is None else arguments.boundaries_array("cum_q_lens", cum_q_lens, sequences)
        is_causal = flag("causal", causal)
        left, right = arguments.window_sides(sliding_window, is_causal)
        sinks = None if softmax_aux is None else sinks_array(softmax_aux, heads)
        wants_lse = flag("return_lse", return_lse)
        options: dict[str, Any] = {
            "key_scale": arguments.scale_array("key_scale", key_scale, keys),
            "value_scale": arguments.scale_array("value_scale", value_scale, values),
            "logits_soft_cap": soft_cap(logits_soft_cap),
            "platform": platform,
            "return_lse": True,
        }
        queries, options["softmax_scale"] = scaled(queries, softmax_scale)
        slopes = arguments.slopes_array(alibi_slopes, heads)
        if slopes is None and (bounds is None or 0 < tokens <= split.devices * sequences):
            # A token is a sequence of its own: its keys on this device are a range of this device's tokens.
            ranges = token_ranges(lengths, bounds, tokens, 1 if bounds is None else None, left, right)
            own = split.dense_table(table)
            partial = page_attention(
                queries, keys, values, own if bounds is None else own[ranges.sequence],
                split.tokens_before(ranges.ends, keys.shape[1]),
                starts=None if left is None else split.tokens_before(ranges.starts, keys.shape[1]),
                **options,
            )  # fmt: skip
        else:
            partial = ragged_page_attention(
                queries, keys, values, split.sparse_table(table), lengths,
                jnp.arange(tokens + 1, dtype=jnp.int32) if bounds is None else bounds,
                causal=is_causal, sliding_window=(left, right), alibi_slopes=slopes, **options,
            )  # fmt: skip
        return _results(split, partial, sinks, wants_lse)


@results(WITH_LSE)
@default_promotion()
def context_parallel_mla_decode(
    query: ArrayLike,
    latent_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    axis_name: AxisName,
    kv_lora_rank: int = 512,
    causal: bool = True,
    scale: ArrayLike | None = None,
    softmax_scale: ArrayLike | None = None,
    sliding_window: Window = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    page_offset: ArrayLike | None = None,
    return_lse: bool = False,
    platform: PlatformOption = None,
) -> Any:
    """``mla_decode`` over pages of latents split over a mesh axis, inside ``jax.shard_map``.

    Heads cannot divide a latent, which all of them read: with pages split, each device has a part of the cache and all
    heads. The split is that of ``context_parallel_page_attention``.

    Args:
      query: ``[sequences, heads, head_dim]`` or ``[sequences, q_length, heads, head_dim]``, the same on every device.
      latent_pages: ``[num_pages, page_size, head_dim]``: this device's pages, or with a head of 1 before the last
        dimension.
      page_table: ``[sequences, pages_per_sequence]`` integers: column p has a number among the pages of device p mod n.
      lengths: ``[sequences]`` integers: tokens of each sequence on all devices, the new ones included.
      axis_name: the axis of the surrounding ``shard_map`` over which pages are split, or several.
      kv_lora_rank: elements of the value.
      causal: a query sees the latents up to its own position.
      scale: factor of stored latents: a number, or broadcastable to this device's ``[num_pages, page_size, 1]`` with
        rank 3.
      softmax_scale: as in ``mla_decode``.
      sliding_window: as in ``mla_decode``.
      logits_soft_cap: as in ``mla_decode``.
      softmax_aux: sinks, ``[heads]`` or ``[heads, n]``, the same on every device; they count once.
      alibi_slopes: as in ``mla_decode``.
      page_offset: added to the pages of the table that are not negative, as in ``page_attention``.
      return_lse: also return the natural log-sum-exp of the logits.
      platform: as in ``mla_decode``, of each device's call.

    Returns:
      The query's shape with ``kv_lora_rank`` instead of head_dim, in its dtype, with the log-sum-exp if asked for; the
      same on every device.

    Raises:
      ValueError, TypeError: a wrong argument, or a call outside of ``shard_map``.
      UnsupportedError: no allowed platform can serve a call.

    A device reads only its own pages, unless there are ``alibi_slopes``, a window on the left, or more than n query
    tokens of each sequence: then it goes over the whole table, in which the pages of other devices are missing.
    """
    with errors_naming_function("context_parallel_mla_decode"):
        split = SplitPages.of(axis_name)
        layout = "[sequences, heads, head_dim] or [sequences, q_length, heads, head_dim]"
        queries = arguments.query_array(query, (3, 4), layout)
        latents = as_array("latent_pages", latent_pages)
        *leading, heads, head_dim = queries.shape
        table = arguments.moved_pages(arguments.page_table_array(page_table, leading[0]), page_offset)
        kv_lengths = arguments.lengths_array("lengths", lengths, leading[0])
        is_causal = flag("causal", causal)
        left, right = arguments.window_sides(sliding_window, is_causal)
        sinks = None if softmax_aux is None else sinks_array(softmax_aux, heads)
        wants_lse = flag("return_lse", return_lse)
        options: dict[str, Any] = {
            "kv_lora_rank": kv_lora_rank,
            "scale": scale,
            "softmax_scale": softmax_scale,
            "logits_soft_cap": logits_soft_cap,
            "platform": platform,
            "return_lse": True,
        }
        q_length = math.prod(leading[1:])
        if left is None and alibi_slopes is None and 0 < q_length <= split.devices:
            ranges = token_ranges(kv_lengths, None, leading[0] * q_length, q_length, left, right)
            own = split.dense_table(table)[ranges.sequence]
            ends = split.tokens_before(ranges.ends, latents.shape[1]) if latents.ndim > 1 else ranges.ends
            flat = queries.reshape(-1, heads, head_dim)
            partial = mla_decode(flat, latents, own, ends, **options)
            partial = tuple(x.reshape(*leading, *x.shape[1:]) for x in partial)
        else:
            partial = mla_decode(
                queries, latents, split.sparse_table(table), kv_lengths,
                causal=is_causal, sliding_window=(left, right), alibi_slopes=alibi_slopes, **options,
            )  # fmt: skip
        return _results(split, partial, sinks, wants_lse)


@results(PAGES)
@default_promotion()
def context_parallel_update_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    key: ArrayLike,
    value: ArrayLike | None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    cum_q_lens: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    page_offset: ArrayLike | None = None,
    platform: PlatformOption = None,
) -> Any:
    """``update_pages`` of pages split over a mesh axis, inside ``jax.shard_map``, without communication.

    Every device is given all new tokens and writes those whose pages it has; see ``context_parallel_page_attention``.

    Args:
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]``: this device's pages.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]``; None where there are no values.
      key: ``[tokens, kv_heads, head_dim]``, packed, the same on every device.
      value: ``[tokens, kv_heads, value_dim]``; None where there are no values.
      page_table: ``[sequences, pages_per_sequence]`` integers: column p has a number among the pages of device p mod n.
      kv_lengths: ``[sequences]`` integers: tokens of each sequence on all devices when this is done.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      axis_name: the axis of the surrounding ``shard_map`` over which pages are split, or several.
      key_scale: as in ``update_pages``, of this device's pages.
      value_scale: likewise.
      page_offset: added to the pages of the table that are not negative, as in ``page_attention``.
      platform: as in ``update_pages``.

    Returns:
      This device's new pages of keys, of values if there are any, and their scales if there are any.

    Raises:
      ValueError, TypeError: a wrong argument, or a call outside of ``shard_map``.
      UnsupportedError: no allowed platform can serve the call.
    """
    with errors_naming_function("context_parallel_update_pages"):
        split = SplitPages.of(axis_name)
        sequences = arguments.lengths_array("kv_lengths", kv_lengths, None).shape[0]
        table = arguments.moved_pages(arguments.page_table_array(page_table, sequences), page_offset)
        own = split.sparse_table(table)
        return update_pages(
            key_pages, value_pages, key, value, own, kv_lengths, cum_q_lens,
            key_scale=key_scale, value_scale=value_scale, platform=platform,
        )  # fmt: skip


def _results(split: SplitPages, partial: Any, sinks: jax.Array | None, return_lse: bool) -> Any:
    own_out, own_lse = partial
    out, lse = split.merged(own_out, own_lse, sinks)
    return (out, lse) if return_lse else out
