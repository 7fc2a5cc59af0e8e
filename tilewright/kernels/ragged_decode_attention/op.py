"""Ragged decoding: one query token of each sequence, over the part of a dense cache between two ends."""

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, Platforms


class RaggedDecodeAttention(PagedAttentionKernel):
    """One query token of each sequence over a range; see ``ragged_decode_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("ragged_decode_attention")

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        starts: ArrayLike,
        ends: ArrayLike,
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
