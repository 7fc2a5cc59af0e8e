"""Chunked prefill with paged decode: new keys and values go into their blocks, then packed queries attend."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class ChunkedPrefillPagedDecode(PagedAttentionKernel):
    """Writes a chunk and attends to it; see ``chunked_prefill_paged_decode`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("chunked_prefill_paged_decode", packed=True)

    @takes_options()
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
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.block_arrays(key_cache, value_cache)
        lengths = arguments.lengths_array("seq_lens", seq_lens, None)
        sequences = lengths.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.page_table_array(block_table, sequences, "block_table"),
            cum_q_lens=arguments.boundaries_array("query_start_loc", query_start_loc, sequences),
            q_length=None,
            new=(key, value),
            **options,
        )
