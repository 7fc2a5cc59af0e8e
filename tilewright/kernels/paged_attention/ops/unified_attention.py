"""Unified attention: packed queries over pages, with vLLM's names and conventions."""

import dataclasses
import operator
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention.cases import ServingCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import UnifiedOptions
from tilewright.ops.utils.stable_ids import stable_id

_NAMES = {"logits_soft_cap": "softcap", "softmax_aux": "sinks", "key_scale": "k_descale", "value_scale": "v_descale"}


@dataclasses.dataclass(frozen=True, slots=True)
class UnifiedCase(ServingCase):
    """A call with vLLM's names."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), cache.key, cache.value, drawn.boundaries(), drawn.lengths(), drawn.table()
        )  # fmt: skip
        given = {**self.scales(cache), **self.options(drawn)}
        window = given.pop("sliding_window", None)
        if window is not None:
            left, right = window if isinstance(window, tuple) else (window, 0 if self.causal else window)
            given["window_size"] = (-1 if left is None else left, -1 if right is None else right)
        renamed = {_NAMES.get(name, name): value for name, value in given.items()}
        return positional, {"causal": self.causal, **renamed}


@stable_id(
    "tilewright/unified_attention.UnifiedAttention",
    formerly=("tilewright.kernels.unified_attention.op:UnifiedAttention",),
)
class UnifiedAttention(PagedAttentionKernel):
    """Packed queries over pages in vLLM's layout; see ``unified_attention`` for the arguments."""

    cases = serving_cases(UnifiedCase, packed=True)

    def __init__(self) -> None:
        super().__init__("unified_attention", packed=True)

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
        **options: Unpack[UnifiedOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        return self.canonical_blocks(
            query,
            key_cache,
            value_cache,
            block_table,
            lengths=("seqused_k", seqused_k),
            boundaries=("cu_seqlens_q", cu_seqlens_q),
            key_scale=k_descale,
            value_scale=v_descale,
            causal=causal,
            sliding_window=_window(window_size),
            # In vLLM 0 means no cap.
            logits_soft_cap=softcap or None,
            softmax_aux=sinks,
            **options,
        )


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """Returns (left, right) with ``None`` for a side without a bound, which vLLM writes as −1."""
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two integers, −1 for no bound, got {window_size!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"window_size must not be below −1, got {window_size=}")
    return None if left == -1 else left, None if right == -1 else right


_UNIFIED_ATTENTION = UnifiedAttention()


@public_function(UnifiedAttention.prepare)
@results(WITH_LSE)
def unified_attention(*args: Any, **kwargs: Any) -> Any:
    """``ragged_page_attention`` in the layout and with the names of vLLM's kernel of this name.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key_cache: ``[num_blocks, block_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_cache: ``[num_blocks, block_size, kv_heads, value_dim]`` in the same dtype.
      cu_seqlens_q: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      seqused_k: ``[sequences]`` integers: tokens in the cache, the new ones included.
      block_table: ``[sequences, blocks_per_sequence]`` integers; a block that does not exist holds nothing.
      causal: a query sees the keys up to its own position.
      window_size: (left, right), both ends inclusive, −1 for no bound.
      softcap: ``c · tanh(logits / c)`` after scale and slopes; 0 for none.
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits.
      sinks: extra logits without values, ``[heads]`` or ``[heads, n]``.
      k_descale: factor by which stored keys are multiplied: a number, or broadcastable to ``[num_blocks, block_size,
        kv_heads]`` with rank 3. int8 needs it.
      v_descale: the same for the values.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _UNIFIED_ATTENTION(*args, **kwargs)
