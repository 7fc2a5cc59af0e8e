"""Unified attention: packed queries over pages, with vLLM's names and conventions."""

import operator
from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, Platforms


class UnifiedAttention(PagedAttentionKernel):
    """Packed queries over pages in vLLM's layout; see ``unified_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("unified_attention")

    def prepare(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        cu_seqlens_q: ArrayLike,
        seqused_k: ArrayLike,
        block_table: ArrayLike,
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        k_descale: ArrayLike | None = None,
        v_descale: ArrayLike | None = None,
        return_lse: bool = False,
        platform: Platforms = None,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.cache_arrays(
            key_cache,
            arguments.required("value_cache", value_cache),
            "[num_blocks, block_size, kv_heads, head_dim]",
            ("key_cache", "value_cache"),
        )
        lengths = arguments.lengths_array("seqused_k", seqused_k, None)
        sequences = lengths.shape[0]
        layout = f"[sequences, blocks_per_sequence] with {sequences=}"
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.integers("block_table", block_table, (sequences, None), layout),
            cum_q_lens=arguments.boundaries_array("cu_seqlens_q", cu_seqlens_q, sequences),
            q_length=None,
            key_scale=k_descale,
            value_scale=v_descale,
            causal=causal,
            softmax_scale=softmax_scale,
            sliding_window=_window(window_size),
            logits_soft_cap=softcap or None,
            softmax_aux=sinks,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
            platform=platform,
        )


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with ``None`` for a side without a bound, which is −1 here."""
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two integers, −1 for no bound, got {window_size!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"window_size must not be below −1, got {window_size=}")
    return None if left == -1 else left, None if right == -1 else right
