"""Chunked prefill with paged decode: new keys and values go into their blocks, then packed queries attend."""

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, Platforms


class ChunkedPrefillPagedDecode(PagedAttentionKernel):
    """Writes a chunk and attends to it; see ``chunked_prefill_paged_decode`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("chunked_prefill_paged_decode")

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        block_table: ArrayLike,
        seq_lens: ArrayLike,
        query_start_loc: ArrayLike,
        *,
        key_scale: ArrayLike | None = None,
        value_scale: ArrayLike | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_aux: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        return_lse: bool = False,
        platform: Platforms = None,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.cache_arrays(
            key_cache,
            arguments.required("value_cache", value_cache),
            "[num_blocks, block_size, kv_heads, head_dim]",
            ("key_cache", "value_cache"),
        )
        lengths = arguments.lengths_array("seq_lens", seq_lens, None)
        sequences = lengths.shape[0]
        layout = f"[sequences, blocks_per_sequence] with {sequences=}"
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.integers("block_table", block_table, (sequences, None), layout),
            cum_q_lens=arguments.boundaries_array("query_start_loc", query_start_loc, sequences),
            q_length=None,
            key_scale=key_scale,
            value_scale=value_scale,
            new=(key, value),
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
            platform=platform,
        )
