"""Ragged page attention: packed queries of prefill and decode together, over pages."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import CACHE_OPTIONS, ServingCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.kernels.paged_attention.results import WITH_PAGES
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedPageCase(ServingCase):
    """A call over pages, which writes the new tokens first with ``write``; those of a sequence are a tree."""

    write: bool = False
    tree: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), cache.key, cache.value, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        new = dict(zip(("new_key", "new_value"), drawn.new(), strict=True)) if self.write else {}
        if self.tree:
            new["tree_mask"] = drawn.tree_mask()
        return positional, {"causal": self.causal, **new, **self.scales(cache), **self.options(drawn)}


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **CACHE_OPTIONS,
    "GQA, MQA": {"kv_heads": 1},
    "head_dim 80": {"head_dim": 80},
    "head_dim 256": {"head_dim": 256},
    "value head_dim of its own": {"value_dim": 128},
    "chunks of several tokens": {"q_lengths": (1, 40)},
    "`causal=False`": {"causal": False},
    "`new_key`, `new_value`": {"write": True},
    "`tree_mask`": {"q_lengths": (8,), "tree": True},
}


@stable_id(
    "tilewright/ragged_page_attention.RaggedPageAttention",
    formerly=("tilewright.kernels.ragged_page_attention.op:RaggedPageAttention",),
)
class RaggedPageAttention(PagedAttentionKernel):
    """Packed queries over pages; see ``ragged_page_attention`` for the arguments."""

    cases = serving_cases(RaggedPageCase, packed=True, options=_OPTIONS)

    def __init__(self) -> None:
        super().__init__("ragged_page_attention", packed=True)

    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        page_table: ArrayLike,
        kv_lengths: ArrayLike,
        cum_q_lens: ArrayLike,
        *,
        new_key: ArrayLike | None = None,
        new_value: ArrayLike | None = None,
        causal: bool = True,
        tree_mask: ArrayLike | None = None,
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        if (new_key is None) != (new_value is None):
            raise TypeError("new_key and new_value go together: give both or none")
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, None)
        sequences = lengths.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            lengths,
            page_table=arguments.page_table_array(page_table, sequences),
            cum_q_lens=arguments.boundaries_array("cum_q_lens", cum_q_lens, sequences),
            q_length=None,
            new=None if new_key is None else (new_key, new_value),
            causal=causal,
            tree_mask=tree_mask,
            **options,
        )


_RAGGED_PAGE_ATTENTION = RaggedPageAttention()
_WRITTEN = {f"new_key new_value {names}": kind for names, kind in WITH_PAGES.items()}
_READ = {f"{names} ?key_scale ?value_scale": kind for names, kind in WITH_LSE.items()}


@public_function(RaggedPageAttention.prepare)
@results(_READ | _WRITTEN)
def ragged_page_attention(*args: Any, **kwargs: Any) -> Any:
    """Attention of packed queries over pages: prefill, chunks of it, and decoding, in one call.

    Args:
      query: ``[tokens, heads, head_dim]``: the new tokens of all sequences, one sequence after the other; float16,
        bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or
        float8_e5m2; ``kv_heads`` divides ``heads``.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      kv_lengths: ``[sequences]`` integers: tokens in the cache, the new ones included, which are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      new_key: ``[tokens, kv_heads, head_dim]``: keys of the new tokens, to be written into their pages first.
      new_value: ``[tokens, kv_heads, value_dim]``.
      causal: a query sees the keys up to its own position.
      tree_mask: ``[tokens, words]`` uint32, for drafts of speculative decoding: bit ``j % 32`` of word ``j // 32`` says
        that the token sees new token j of its sequence, itself and later ones included. It takes the place of
        ``causal`` and of the window's right side; what was in the cache before is seen as without it. New tokens
        without a bit, 32 · words and beyond, are masked.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``, and ``(w, w)`` without ``causal``.

    Returns:
      ``[tokens, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for; where new tokens were
      written, then also the new pages of keys and of values, and their scales if there are any. A token that sees no
      key or belongs to no sequence gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _RAGGED_PAGE_ATTENTION(*args, **kwargs)
