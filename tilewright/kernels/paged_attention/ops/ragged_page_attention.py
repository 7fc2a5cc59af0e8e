"""Ragged page attention: packed queries of prefill and decode together, over pages."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class RaggedPageAttention(PagedAttentionKernel):
    """Packed queries over pages; see ``ragged_page_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("ragged_page_attention", packed=True)

    @takes_options()
    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        page_table: ArrayLike,
        kv_lengths: ArrayLike,
        cum_q_lens: ArrayLike,
        *,
        new_key: ArrayLike | None = None,
        new_value: ArrayLike | None = None,
        causal: bool = True,
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        if (new_key is None) != (new_value is None):
            raise TypeError("new_key and new_value go together: give both or none")
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, None)
        sequences = lengths.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.page_table_array(page_table, sequences),
            cum_q_lens=arguments.boundaries_array("cum_q_lens", cum_q_lens, sequences),
            q_length=None,
            new=None if new_key is None else (new_key, new_value),
            causal=causal,
            **options,
        )
