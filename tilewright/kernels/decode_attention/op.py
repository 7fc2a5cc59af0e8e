"""Decoding: one query token of each sequence, over a dense or a paged cache."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, Platforms


class DecodeAttention(PagedAttentionKernel):
    """One query token of each sequence; see ``decode_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("decode_attention")

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        lengths: ArrayLike,
        page_table: ArrayLike | None = None,
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
        queries = arguments.query_array(query, (3,), "[sequences, heads, head_dim]")
        layout = "[sequences, kv_length, kv_heads, head_dim], or pages"
        keys, values = arguments.cache_arrays(key, arguments.required("value", value), layout)
        sequences = queries.shape[0]
        table: Any = None
        if page_table is not None:
            table = arguments.page_table_array(page_table, sequences)
        elif keys.shape[0] != sequences:
            raise ValueError(
                f"without a page_table key and value hold one row of tokens for each query, got {queries.shape=}, "
                f"{keys.shape=}"
            )
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("lengths", lengths, sequences),
            page_table=table,
            key_scale=key_scale,
            value_scale=value_scale,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
            platform=platform,
        )
