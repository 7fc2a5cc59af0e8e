"""Chunked prefill with paged decode: new keys and values go into their blocks, then packed queries attend."""

import dataclasses
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import results
from tilewright.kernels.paged_attention.cases import ServingCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.kernels.paged_attention.results import WITH_PAGES
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkedCase(ServingCase):
    """A call that writes its tokens."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), *drawn.new(), cache.key, cache.value, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        return positional, {**self.scales(cache), **self.options(drawn)}


@stable_id(
    "tilewright/chunked_prefill_paged_decode.ChunkedPrefillPagedDecode",
    formerly=("tilewright.kernels.chunked_prefill_paged_decode.op:ChunkedPrefillPagedDecode",),
)
class ChunkedPrefillPagedDecode(PagedAttentionKernel):
    """Writes a chunk and attends to it; see ``chunked_prefill_paged_decode`` for the arguments."""

    cases = serving_cases(ChunkedCase, packed=True)

    def __init__(self) -> None:
        super().__init__("chunked_prefill_paged_decode", packed=True)

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
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        return self.canonical_blocks(
            query,
            key_cache,
            value_cache,
            block_table,
            lengths=("seq_lens", seq_lens),
            boundaries=("query_start_loc", query_start_loc),
            new=(key, value),
            **options,
        )


_CHUNKED_PREFILL_PAGED_DECODE = ChunkedPrefillPagedDecode()


@public_function(ChunkedPrefillPagedDecode.prepare)
@results(WITH_PAGES)
def chunked_prefill_paged_decode(*args: Any, **kwargs: Any) -> Any:
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

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, the log-sum-exp if asked for, the new caches of keys and of
      values, and their scales if there are any.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _CHUNKED_PREFILL_PAGED_DECODE(*args, **kwargs)
