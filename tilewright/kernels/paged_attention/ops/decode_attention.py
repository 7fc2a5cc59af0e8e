"""Decoding: one query token of each sequence, over a dense or a paged cache."""

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
class DecodeCase(ServingCase):
    """A call over a dense cache, or over pages with ``paged``."""

    paged: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        if self.paged:
            cache = drawn.pages()
            table = {"page_table": drawn.table()}
        else:
            cache, table = drawn.dense(), {}
        positional = (drawn.query(self.sequences), cache.key, cache.value, drawn.lengths())
        return positional, {**table, **self.scales(cache), **self.options(drawn)}


@stable_id(
    "tilewright/decode_attention.DecodeAttention", formerly=("tilewright.kernels.decode_attention.op:DecodeAttention",)
)
class DecodeAttention(PagedAttentionKernel):
    """One query token of each sequence; see ``decode_attention`` for the arguments."""

    cases = serving_cases(DecodeCase)

    def __init__(self) -> None:
        super().__init__("decode_attention")

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        lengths: ArrayLike,
        page_table: ArrayLike | None = None,
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
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


_DECODE_ATTENTION = DecodeAttention()


@public_function(DecodeAttention.prepare)
@results(WITH_LSE)
def decode_attention(*args: Any, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence, over a dense cache or, given a page table, over pages.

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key: ``[sequences, kv_length, kv_heads, head_dim]``, or pages ``[num_pages, page_size, kv_heads, head_dim]``, in
        the query's dtype, int8, float8_e4m3fn or float8_e5m2; ``kv_heads`` divides ``heads``.
      value: likewise, with a head dim of its own.
      lengths: ``[sequences]`` integers: tokens in the cache, the query's own included, which is the last of them.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A sequence without keys
      gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.

    The algorithm is that of Flash-Decoding (Dao et al., 2023) and PagedAttention (arXiv 2309.06180).
    """
    return _DECODE_ATTENTION(*args, **kwargs)
