"""Page attention: one query token of each sequence, over pages."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class PageAttention(PagedAttentionKernel):
    """One query token of each sequence over pages; see ``page_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("page_attention")

    @takes_options()
    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        page_table: ArrayLike,
        lengths: ArrayLike,
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[sequences, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        sequences = queries.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("lengths", lengths, sequences),
            page_table=arguments.page_table_array(page_table, sequences),
            **options,
        )
