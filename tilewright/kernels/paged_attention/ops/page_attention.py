"""Page attention: one query token of each sequence, over pages."""

import dataclasses
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import ServingCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class PageCase(ServingCase):
    """A call over pages."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (drawn.query(self.sequences), cache.key, cache.value, drawn.table(), drawn.lengths())
        return positional, {**self.scales(cache), **self.options(drawn)}


@stable_id("tilewright/page_attention.PageAttention", formerly=("tilewright.kernels.page_attention.op:PageAttention",))
class PageAttention(PagedAttentionKernel):
    """One query token of each sequence over pages; see ``page_attention`` for the arguments."""

    cases = serving_cases(PageCase)

    def __init__(self) -> None:
        super().__init__("page_attention")

    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        page_table: ArrayLike,
        lengths: ArrayLike,
        starts: ArrayLike | None = None,
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        queries = arguments.query_array(query, (3,), "[sequences, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        sequences = queries.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("lengths", lengths, sequences),
            page_table=arguments.page_table_array(page_table, sequences),
            kv_starts=None if starts is None else arguments.lengths_array("starts", starts, sequences),
            **options,
        )


_PAGE_ATTENTION = PageAttention()


@public_function(PageAttention.prepare)
@results(WITH_LSE)
def page_attention(*args: Any, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence over pages (PagedAttention, arXiv 2309.06180).

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      lengths: ``[sequences]`` integers: tokens in the cache, the query's own included, which is the last of them.
      starts: ``[sequences]`` integers: the first visible position; all are by default.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A sequence without keys
      gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _PAGE_ATTENTION(*args, **kwargs)
