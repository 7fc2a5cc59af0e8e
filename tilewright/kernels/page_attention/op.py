"""Page attention: one query token of each sequence, over pages."""

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, Platforms


class PageAttention(PagedAttentionKernel):
    """One query token of each sequence over pages; see ``page_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("page_attention")

    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        page_table: ArrayLike,
        lengths: ArrayLike,
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
        keys, values = arguments.page_arrays(key_pages, value_pages)
        sequences = queries.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("lengths", lengths, sequences),
            page_table=arguments.page_table_array(page_table, sequences),
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
