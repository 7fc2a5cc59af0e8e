"""Unified attention: packed queries over pages, with vLLM's names and conventions."""

import operator
from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options


class UnifiedAttention(PagedAttentionKernel):
    """Packed queries over pages in vLLM's layout; see ``unified_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__("unified_attention", packed=True)

    @takes_options("key_scale", "value_scale", "sliding_window", "logits_soft_cap", "softmax_aux")
    def prepare(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        cu_seqlens_q: ArrayLike,
        seqused_k: ArrayLike,
        block_table: ArrayLike,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: ArrayLike | None = None,
        k_descale: ArrayLike | None = None,
        v_descale: ArrayLike | None = None,
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.block_arrays(key_cache, value_cache)
        lengths = arguments.lengths_array("seqused_k", seqused_k, None)
        sequences = lengths.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.page_table_array(block_table, sequences, "block_table"),
            cum_q_lens=arguments.boundaries_array("cu_seqlens_q", cu_seqlens_q, sequences),
            q_length=None,
            key_scale=k_descale,
            value_scale=v_descale,
            causal=causal,
            sliding_window=_window(window_size),
            logits_soft_cap=softcap or None,
            softmax_aux=sinks,
            **options,
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
