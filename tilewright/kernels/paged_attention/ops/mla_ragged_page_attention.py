"""Multi-head latent attention of packed queries: chunks of prefill and decoding together, over pages of latents."""

import dataclasses
from typing import Any, Unpack

import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import apply, as_array
from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import CACHE_OPTIONS, LATENT_OPTIONS, LatentCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import LatentOptions
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class MlaRaggedPageCase(LatentCase):
    """A call; the new tokens of a sequence are a tree with ``tree``."""

    tree: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        query, (latents, scales) = drawn.query(), self.latents(drawn)
        rank = self.value_dim or self.head_dim
        positional = (
            query[..., :rank], query[..., rank:], latents, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        given = {"causal": self.causal, **scales, **self.options(drawn)}
        if self.tree:
            given["tree_mask"] = drawn.tree_mask()
        return positional, given


_GPU = {"heads": 128, "head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "page_size": 64, "ragged": False}
_OPTION = {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64}
CASES = serving_cases(
    MlaRaggedPageCase,
    packed=True,
    cpu={"batch_8": {"sequences": 8, "kv_length": 512, "heads": 16, "head_dim": 144, "value_dim": 128}},
    gpu={
        "64x4096": {"sequences": 64, "kv_length": 4096, **_GPU},
        "64x4096_16_heads": {"sequences": 64, "kv_length": 4096, **_GPU, "heads": 16},
    },
    small={"sequences": 2, "kv_length": 128, "heads": 64, "head_dim": 576, "value_dim": 512, "page_size": 64},
    options={
        name: {**_OPTION, **fields}
        for name, fields in {
            **CACHE_OPTIONS,
            **LATENT_OPTIONS,
            "chunks of several tokens": {"q_lengths": (1, 40)},
            "`causal=False`": {"causal": False},
            "`tree_mask`": {"q_lengths": (8,), "tree": True},
        }.items()
    },
)


@stable_id("tilewright/mla_ragged_page_attention.MlaRaggedPageAttention")
class MlaRaggedPageAttention(PagedAttentionKernel):
    """Absorbed attention of packed queries; see ``mla_ragged_page_attention`` for the arguments."""

    cases = CASES

    def __init__(self) -> None:
        super().__init__(
            "mla_ragged_page_attention",
            "tilewright.kernels.paged_attention.hopper.packed_latent_backend:PallasGpuPackedLatents",
        )

    def prepare(
        self,
        q_nope: ArrayLike,
        q_rope: ArrayLike,
        latent_pages: ArrayLike,
        page_table: ArrayLike,
        kv_lengths: ArrayLike,
        cum_q_lens: ArrayLike,
        *,
        causal: bool = True,
        tree_mask: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        **options: Unpack[LatentOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        unrotated = arguments.query_array(q_nope, (3,), "[tokens, heads, kv_lora_rank]", "q_nope")
        query = _joined(unrotated, q_rope)
        latents = arguments.latent_array(latent_pages)
        row_format = arguments.latent_format(latents, query.shape[2], unrotated.shape[2])
        if row_format is None and latents.shape[3] != query.shape[2]:
            raise ValueError(
                f"a latent has the elements of a head of q_nope and of q_rope, {query.shape[2]} together, "
                f"got latent_pages.shape={latents.shape}"
            )
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, None)
        sequences = lengths.shape[0]
        return self.canonical(
            query,
            latents,
            None,
            lengths,
            page_table=arguments.page_table_array(page_table, sequences),
            cum_q_lens=arguments.boundaries_array("cum_q_lens", cum_q_lens, sequences),
            q_length=None,
            key_scale=scale,
            causal=causal,
            tree_mask=tree_mask,
            latent_dim=unrotated.shape[2],
            row_format=row_format,
            **options,
        )


def _joined(unrotated: Any, q_rope: object) -> Any:
    """Both parts of the queries as one array, in the order of a latent."""
    rotated = as_array("q_rope", q_rope)
    if len(rotated.shape) != 3 or rotated.shape[:2] != unrotated.shape[:2]:
        raise ValueError(
            "q_rope must be [tokens, heads, rope_dim] with the tokens and heads of q_nope, "
            f"got q_rope.shape={rotated.shape}, q_nope.shape={unrotated.shape}"
        )
    if rotated.dtype != unrotated.dtype:
        raise TypeError(f"q_nope and q_rope must have one dtype, got {unrotated.dtype} and {rotated.dtype}")
    return apply(lambda *parts: jnp.concatenate(parts, axis=2), unrotated, rotated)


_MLA_RAGGED_PAGE_ATTENTION = MlaRaggedPageAttention()


@public_function(MlaRaggedPageAttention.prepare)
@results(WITH_LSE)
def mla_ragged_page_attention(*args: Any, **kwargs: Any) -> Any:
    """Multi-head latent attention of packed queries in its absorbed form: prefill, chunks of it, and decoding.

    It is ``mla_decode`` (DeepSeek-V2, arXiv 2405.04434) for any number of new tokens of each sequence: all heads read
    the same latent, as the key all of it, as the value its first ``kv_lora_rank`` elements. The caller has absorbed the
    up-projection of keys into ``q_nope``, and applies that of values to the output.

    Args:
      q_nope: ``[tokens, heads, kv_lora_rank]``: the new tokens of all sequences, one sequence after the other, times
        the up-projection of keys; float16, bfloat16, float32 or float64.
      q_rope: ``[tokens, heads, rope_dim]``: the rotary part, rotated, in the same dtype.
      latent_pages: ``[num_pages, page_size, kv_lora_rank + rope_dim]``, or with a head of 1 before the last dimension,
        in the query's dtype, int8, float8_e4m3fn or float8_e5m2; the rotary part comes last. Or ``[num_pages,
        page_size, 656]`` uint8, the rows of ``quantize_latents``. The new tokens are there already: ``update_pages``
        writes them.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      kv_lengths: ``[sequences]`` integers: tokens in the cache, the new ones included, which are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end.
      causal: a query sees the latents up to its own position.
      tree_mask: ``[tokens, words]`` uint32, as in ``ragged_page_attention``: bits of the new tokens of its sequence
        that a token sees, in place of ``causal`` and of the window's right side.
      scale: factor of stored latents: a number, or broadcastable to ``[num_pages, page_size, 1]`` with
        rank 3. int8 needs it.
      softmax_scale: 1/√(kv_lora_rank + rope_dim) by default; models give that of their heads before the absorption.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``, and ``(w, w)`` without ``causal``.

    Returns:
      ``[tokens, heads, kv_lora_rank]`` in the query's dtype, with the log-sum-exp if asked for. A token that sees no
      latent or belongs to no sequence gives zeros and −inf (the log-sum-exp of its sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _MLA_RAGGED_PAGE_ATTENTION(*args, **kwargs)
