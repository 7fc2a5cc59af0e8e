"""Decoding: one query token of each sequence, over a dense or a paged cache."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class DecodeAttention(PagedAttentionKernel):
    """One query token of each sequence; see ``decode_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("decode_attention")

    @takes_options()
    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        lengths: ArrayLike,
        page_table: ArrayLike | None = None,
        **options: Any,
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
            **options,
        )
