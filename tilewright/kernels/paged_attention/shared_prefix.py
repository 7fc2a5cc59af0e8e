"""Attention over pages that several sequences have in common, which are read once for all of them.

The queries of all sequences of a group attend to the group's prefix together, as rows of one matmul; each attends to
the rest of its own sequence; and the two partial results are summed by their log-sum-exp (cascade inference, Ye et al.,
"FlashInfer", arXiv 2501.01005; Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from tilewright.kernels.numerics.softmax import merged_parts
from tilewright.kernels.op.arguments import PlatformOption, flag, scaled, sinks_array, soft_cap
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.ops.page_attention import page_attention
from tilewright.kernels.paged_attention.ops.ragged_page_attention import ragged_page_attention
from tilewright.kernels.paged_attention.token_layout import boundaries, packed_tokens
from tilewright.ops.kernel.arrays import explicit_sharding
from tilewright.ops.kernel.kernel import errors_naming_function
from tilewright.ops.utils.promotion import default_promotion


class GroupOrder(NamedTuple):
    """Packed tokens ordered by the group of their sequence; those without a group are the last.

    Attributes:
      bounds: where the groups' tokens begin and end in that order.
      order: the tokens in that order; ``None`` if it is their own.
    """

    bounds: Int[Array, " groups+1"]
    order: Int[Array, " tokens"] | None


@results(WITH_LSE)
@default_promotion()
def shared_prefix_page_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    prefix_table: ArrayLike,
    prefix_lengths: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    cum_q_lens: ArrayLike | None = None,
    *,
    prefix_group: ArrayLike | None = None,
    causal: bool = True,
    tree_mask: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    softmax_scale: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    page_offset: ArrayLike | None = None,
    return_lse: bool = False,
    platform: PlatformOption = None,
) -> Any:
    """``page_attention`` or ``ragged_page_attention`` where groups of sequences begin with the same tokens.

    It is two calls, each of which is selected, tuned and explained as any other: ``ragged_page_attention`` of the
    queries of each group over its prefix, whose keys and values are read once for all tokens of a tile instead of
    once for each sequence; and that function, or ``page_attention`` where each sequence has one token, over the rest.
    The results differ from those of one call over whole sequences only by rounding: each partial result is rounded to
    the query's dtype, then the sum is.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      prefix_table: ``[groups, pages_per_prefix]`` integers: the pages that the sequences of a group begin with.
      prefix_lengths: ``[groups]`` integers: tokens in these pages, of which the last one need not be full.
      page_table: ``[sequences, pages_per_sequence]`` integers: the pages after the prefix.
      kv_lengths: ``[sequences]`` integers: tokens after the prefix, the new ones included, which are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      prefix_group: ``[sequences]`` integers: the row of ``prefix_table`` that a sequence begins with, in any order; a
        sequence whose row does not exist, such as −1, has no prefix. By default there is one, which all have.
      causal: a query sees the keys up to its own position.
      tree_mask: ``[tokens, words]`` uint32, as in ``ragged_page_attention``; with ``cum_q_lens``.
      key_scale: as in ``ragged_page_attention``.
      value_scale: likewise.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      logits_soft_cap: ``c · tanh(logits / c)`` after the scale.
      softmax_aux: sinks, ``[heads]`` or ``[heads, n]``; they count once.
      page_offset: added to the pages of both tables that are not negative, as in ``page_attention``.
      return_lse: also return the natural log-sum-exp of the logits.
      platform: as in ``page_attention``, of each of the two calls.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A token that sees no key
      or belongs to no sequence gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve a call.

    There are no windows and no ``alibi_slopes``, by which a key's place before each query would matter.
    """
    with errors_naming_function("shared_prefix_page_attention"):
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        arguments.check_heads(queries, keys)
        tokens, heads, _ = queries.shape
        given = None if cum_q_lens is not None else tokens
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, given)
        sequences = lengths.shape[0]
        bounds = None if cum_q_lens is None else arguments.boundaries_array("cum_q_lens", cum_q_lens, sequences)
        prefixes = arguments.lengths_array("prefix_lengths", prefix_lengths, None)
        groups = prefixes.shape[0]
        shared_table = arguments.integers(
            "prefix_table", prefix_table, (groups, None), f"[groups, pages_per_prefix] with {groups=}"
        )
        own_table = arguments.page_table_array(page_table, sequences)
        if prefix_group is None and groups != 1:
            raise ValueError(f"prefix_group must say which of several prefixes a sequence has, got {groups=}")
        if prefix_group is not None:
            prefix_group = arguments.integers(
                "prefix_group", prefix_group, (sequences,), f"[sequences] with {sequences=}"
            )
        if tree_mask is not None and bounds is None:
            raise ValueError("tree_mask is of sequences with several new tokens, which cum_q_lens must tell")
        sinks = None if softmax_aux is None else sinks_array(softmax_aux, heads)
        wants_lse = flag("return_lse", return_lse)
        options: dict[str, Any] = {
            "key_scale": key_scale,
            "value_scale": value_scale,
            "logits_soft_cap": soft_cap(logits_soft_cap),
            "page_offset": page_offset,
            "platform": platform,
            "return_lse": True,
        }
        queries, options["softmax_scale"] = scaled(queries, softmax_scale)
        ordered = _group_order(prefix_group, bounds, tokens, groups)
        shared = ragged_page_attention(
            _taken(queries, ordered.order), keys, values, shared_table, prefixes, ordered.bounds,
            causal=False, **options,
        )  # fmt: skip
        if bounds is None:
            own = page_attention(queries, keys, values, own_table, lengths, **options)
        else:
            own = ragged_page_attention(
                queries, keys, values, own_table, lengths, bounds, causal=causal, tree_mask=tree_mask, **options
            )
        place = None if ordered.order is None else jnp.argsort(ordered.order)
        outs, lses = (jnp.stack([_taken(x, place), y]) for x, y in zip(shared, own, strict=True))
        out, lse = merged_parts(outs, lses, sinks)
        return (out, lse) if wants_lse else out


def _group_order(prefix_group: Any, cum_q_lens: Any, tokens: int, groups: int) -> GroupOrder:
    if prefix_group is None:
        if cum_q_lens is None:
            return GroupOrder(jnp.asarray([0, tokens], jnp.int32), None)
        # Tokens before and after those of the sequences are in no group.
        return GroupOrder(boundaries(cum_q_lens, tokens)[jnp.asarray([0, -1])], None)
    sequences = prefix_group.shape[0]
    exists = (prefix_group >= 0) & (prefix_group < groups)
    group = jnp.where(exists, prefix_group, groups)
    if cum_q_lens is not None:
        if sequences == 0:
            group = jnp.full(tokens, groups, jnp.int32)
        else:
            at = packed_tokens(cum_q_lens, tokens, sequences, None)
            group = jnp.where(at.owned, group[at.sequence], groups)
    before = jnp.sum(group[None, :] < jnp.arange(groups + 1, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    return GroupOrder(before, jnp.argsort(group, stable=True))


def _taken(array: jax.Array, rows: jax.Array | None) -> Any:
    """Rows of an array of tokens, split as the array is."""
    if rows is None:
        return array
    return array.at[rows].get(out_sharding=explicit_sharding(jax.typeof(array)))
