"""Ragged decoding: one query token of each sequence, over the part of a dense cache between two ends."""

from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class RaggedDecodeAttention(PagedAttentionKernel):
    """One query token of each sequence over a range; see ``ragged_decode_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("ragged_decode_attention")

    @takes_options()
    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        starts: ArrayLike,
        ends: ArrayLike,
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[sequences, heads, head_dim]")
        layout = "[sequences, kv_length, kv_heads, head_dim]"
        keys, values = arguments.cache_arrays(key, arguments.required("value", value), layout)
        sequences = queries.shape[0]
        if keys.shape[0] != sequences:
            raise ValueError(f"query, key and value must have as many sequences, got {queries.shape=}, {keys.shape=}")
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("ends", ends, sequences),
            kv_starts=arguments.lengths_array("starts", starts, sequences),
            **options,
        )
