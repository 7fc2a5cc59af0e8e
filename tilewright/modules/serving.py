"""Serving attention as functions: decoding and chunked prefill over a cache of keys and values, paged or dense.

All are inference alone, run on the default executor, eagerly and under ``jit``, ``scan`` and ``vmap``, and read nothing
on the host. What bad lengths and page tables do is the same for all and stands in docs/serving.md: they never reach
memory that is not the call's own.
"""

from typing import Any

from tilewright.kernels.paged_attention.ops.chunked_prefill_paged_decode import ChunkedPrefillPagedDecode
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeAttention
from tilewright.kernels.paged_attention.ops.mla_decode import MlaDecode
from tilewright.kernels.paged_attention.ops.page_attention import PageAttention
from tilewright.kernels.paged_attention.ops.ragged_decode_attention import RaggedDecodeAttention
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageAttention
from tilewright.kernels.paged_attention.ops.unified_attention import UnifiedAttention
from tilewright.kernels.paged_attention.ops.update_pages import UpdatePages
from tilewright.modules.public import public_function

_DECODE_ATTENTION = DecodeAttention()


@public_function(DecodeAttention.prepare)
def decode_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence, over a dense cache or, given a page table, over pages.

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key: ``[sequences, kv_length, kv_heads, head_dim]``, or pages ``[num_pages, page_size, kv_heads, head_dim]``, in
        the query's dtype, int8, float8_e4m3fn or float8_e5m2; ``kv_heads`` divides ``heads``.
      value: likewise, with a head dim of its own.
      lengths: ``[sequences]`` integers: tokens in the cache, the query's own included, which is the last of them.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      key_scale: what stored keys are multiplied by: a number, or broadcastable to ``[num_pages, page_size, kv_heads]``
        (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: likewise, of the values.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A sequence without keys
      gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.

    The algorithm is that of Flash-Decoding (Dao et al., 2023) and PagedAttention (arXiv 2309.06180).
    """
    return _DECODE_ATTENTION(*args, cfg=cfg, **kwargs)


_PAGE_ATTENTION = PageAttention()


@public_function(PageAttention.prepare)
def page_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence over pages (PagedAttention, arXiv 2309.06180).

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      lengths: ``[sequences]`` integers: tokens in the cache, the query's own included, which is the last of them.
      key_scale: what stored keys are multiplied by: a number, or broadcastable to ``[num_pages, page_size, kv_heads]``
        (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: likewise, of the values.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A sequence without keys
      gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _PAGE_ATTENTION(*args, cfg=cfg, **kwargs)


_RAGGED_DECODE_ATTENTION = RaggedDecodeAttention()


@public_function(RaggedDecodeAttention.prepare)
def ragged_decode_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence over the part of a dense cache between two ends.

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key: ``[sequences, kv_length, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or float8_e5m2;
        ``kv_heads`` divides ``heads``.
      value: ``[sequences, kv_length, kv_heads, value_dim]`` in the same dtype.
      starts: ``[sequences]`` integers: the first visible position.
      ends: ``[sequences]``: the position after the last visible one, which is the query's.
      key_scale: what stored keys are multiplied by: a number, or broadcastable to ``[num_pages, page_size, kv_heads]``
        (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: likewise, of the values.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. An empty range gives
      zeros and −inf (the log-sum-exp of the sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _RAGGED_DECODE_ATTENTION(*args, cfg=cfg, **kwargs)


_RAGGED_PAGE_ATTENTION = RaggedPageAttention()


@public_function(RaggedPageAttention.prepare)
def ragged_page_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Attention of packed queries over pages: prefill, chunks of it, and decoding, in one call.

    Args:
      query: ``[tokens, heads, head_dim]``: the new tokens of all sequences, one sequence after the other; float16,
        bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      kv_lengths: ``[sequences]`` integers: tokens in the cache, the new ones included, which are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      new_key: ``[tokens, kv_heads, head_dim]``: keys of the new tokens, to be written into their pages first.
      new_value: ``[tokens, kv_heads, value_dim]``.
      key_scale: what stored keys are multiplied by: a number, or broadcastable to ``[num_pages, page_size, kv_heads]``
        (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: likewise, of the values.
      causal: a query sees the keys up to its own position.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``, and ``(w, w)`` without ``causal``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for; where new tokens were
      written, then also the new pages of keys and of values, and their scales if there are any. A token that sees no
      key or belongs to no sequence gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _RAGGED_PAGE_ATTENTION(*args, cfg=cfg, **kwargs)


_UNIFIED_ATTENTION = UnifiedAttention()


@public_function(UnifiedAttention.prepare)
def unified_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """``ragged_page_attention`` in the layout and with the names of vLLM's kernel of this name.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key_cache: ``[num_blocks, block_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_cache: ``[num_blocks, block_size, kv_heads, value_dim]`` in the same dtype.
      cu_seqlens_q: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      seqused_k: ``[sequences]`` integers: tokens in the cache, the new ones included.
      block_table: ``[sequences, blocks_per_sequence]`` integers; a block that does not exist holds nothing.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      causal: a query sees the keys up to its own position.
      window_size: (left, right), both ends inclusive, −1 for no bound.
      softcap: ``c · tanh(logits / c)`` after scale and slopes; 0 for none.
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits.
      sinks: extra logits without values, ``[heads]`` or ``[heads, n]``.
      k_descale: what stored keys are multiplied by: a number, or broadcastable to ``[num_blocks, block_size,
        kv_heads]`` with rank 3. int8 needs it.
      v_descale: likewise, of the values.
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _UNIFIED_ATTENTION(*args, cfg=cfg, **kwargs)


_CHUNKED_PREFILL_PAGED_DECODE = ChunkedPrefillPagedDecode()


@public_function(ChunkedPrefillPagedDecode.prepare)
def chunked_prefill_paged_decode(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Writes the new tokens of packed sequences into their blocks and attends to them and all before, causally.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key: ``[tokens, kv_heads, head_dim]``: keys of the new tokens; ``kv_heads`` divides ``heads``.
      value: ``[tokens, kv_heads, value_dim]``.
      key_cache: ``[num_blocks, block_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2.
      value_cache: ``[num_blocks, block_size, kv_heads, value_dim]`` in the same dtype.
      block_table: ``[sequences, blocks_per_sequence]`` integers; a block that does not exist holds nothing.
      seq_lens: ``[sequences]`` integers: tokens in the cache, the new ones included.
      query_start_loc: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      key_scale: what stored keys are multiplied by: a number, or broadcastable to ``[num_pages, page_size, kv_heads]``
        (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: likewise, of the values.
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, the log-sum-exp if asked for, the new caches of keys and of
      values, and their scales if there are any.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _CHUNKED_PREFILL_PAGED_DECODE(*args, cfg=cfg, **kwargs)


_MLA_DECODE = MlaDecode()


@public_function(MlaDecode.prepare)
def mla_decode(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Multi-head latent attention in its absorbed form, over pages of latents (DeepSeek-V2, arXiv 2405.04434).

    All heads read the same latent: as the key all of it, as the value its first ``kv_lora_rank`` elements. The caller
    has absorbed the up-projection of keys into the query, and applies that of values to the output.

    Args:
      query: ``[sequences, heads, head_dim]``, or ``[sequences, q_length, heads, head_dim]`` of several new tokens,
        whose rotary part stands last as in the latents; float16, bfloat16, float32 or float64.
      latent_pages: ``[num_pages, page_size, head_dim]``, or with a head of 1 before the last dimension, in the query's
        dtype, int8, float8_e4m3fn or float8_e5m2.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      lengths: ``[sequences]`` integers: tokens in the cache, the new ones included.
      kv_lora_rank: elements of the value; 512 in all published models.
      causal: a query sees the latents up to its own position.
      scale: what stored latents are multiplied by: a number, or broadcastable to ``[num_pages, page_size, 1]`` with
        rank 3. int8 needs it.
      softmax_scale: 1/√head_dim by default; models give that of their heads before the absorption.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``, and ``(w, w)`` without ``causal``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      The query's shape with ``kv_lora_rank`` in the place of head_dim, in its dtype, with the log-sum-exp if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _MLA_DECODE(*args, cfg=cfg, **kwargs)


flash_mla = mla_decode
"""``mla_decode`` by the name of DeepSeek's kernel."""


_UPDATE_PAGES = UpdatePages()


@public_function(UpdatePages.prepare)
def update_pages(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """Writes new keys and values into pages, quantised if those are.

    Args:
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]``; latents may be ``[num_pages, page_size, head_dim]``.
        Floating-point or int8. Donate them to the ``jit`` around, or they are copied.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype; None where there are no values.
      key: ``[tokens, kv_heads, head_dim]``, packed, without heads if the pages have none.
      value: ``[tokens, kv_heads, value_dim]``; None where there are no values.
      page_table: ``[sequences, pages_per_sequence]`` integers.
      kv_lengths: ``[sequences]`` integers: tokens in the cache when this is done; the new ones are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      key_scale: a number, or broadcastable to ``[num_pages, page_size, kv_heads]`` with rank 3. Where it has a scale
        for each token, those of the new tokens are computed and stored; else it is what tokens are divided by.
      value_scale: likewise.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      New pages of keys, of values if there are any, and their scales if there are any. A token whose place does not
      exist is dropped; of several for one place the last stays.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _UPDATE_PAGES(*args, cfg=cfg, **kwargs)
