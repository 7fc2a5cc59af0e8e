"""Multi-head latent attention in its absorbed form: all heads read one latent, whose first part is also the value."""

import dataclasses
import math
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import integer
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
class MlaCase(LatentCase):
    """A call; ``q_lengths`` has one number, that of every sequence."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        latents, scales = self.latents(drawn)
        query = drawn.query(self.sequences, *self.q_lengths) if self.q_lengths != (1,) else drawn.query(self.sequences)
        given = {
            "kv_lora_rank": self.value_dim or self.head_dim,
            "causal": self.causal,
            **scales,
            **self.options(drawn),
        }
        return (query, latents, drawn.table(), drawn.lengths()), given


_GPU = {"heads": 128, "head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "page_size": 64, "ragged": False}
_OPTION = {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64}
CASES = serving_cases(
    MlaCase,
    cpu={
        "batch_8": {"sequences": 8, "kv_length": 512, "heads": 16, "head_dim": 144, "value_dim": 128},
        "two_tokens": {
            "sequences": 8, "kv_length": 512, "q_lengths": (2,), "heads": 16, "head_dim": 144, "value_dim": 128
        },
    },
    gpu={
        "64x4096": {"sequences": 64, "kv_length": 4096, **_GPU},
        "64x8192": {"sequences": 64, "kv_length": 8192, **_GPU},
        "64x8192_16_heads": {"sequences": 64, "kv_length": 8192, **_GPU, "heads": 16},
    },
    small={"sequences": 2, "kv_length": 128, "heads": 64, "head_dim": 576, "value_dim": 512, "page_size": 64},
    options={
        name: {**_OPTION, **fields}
        for name, fields in {
            **CACHE_OPTIONS, **LATENT_OPTIONS, "several tokens": {"q_lengths": (4,)}
        }.items()
    },
)  # fmt: skip


@stable_id("tilewright/mla_decode.MlaDecode", formerly=("tilewright.kernels.mla_decode.op:MlaDecode",))
class MlaDecode(PagedAttentionKernel):
    """Absorbed multi-head latent attention; see ``mla_decode`` for the arguments."""

    cases = CASES

    def __init__(self) -> None:
        super().__init__(
            "mla_decode",
            "tilewright.kernels.paged_attention.hopper.latent_backend:PallasGpuPagedAttention",
        )

    def prepare(
        self,
        query: ArrayLike,
        latent_pages: ArrayLike,
        page_table: ArrayLike,
        lengths: ArrayLike,
        *,
        kv_lora_rank: int = 512,
        causal: bool = True,
        scale: ArrayLike | None = None,
        **options: Unpack[LatentOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        layout = "[sequences, heads, head_dim] or [sequences, q_length, heads, head_dim]"
        queries = arguments.query_array(query, (3, 4), layout)
        keys = arguments.latent_array(latent_pages)
        kv_lora_rank = integer("kv_lora_rank", kv_lora_rank)
        if not 0 < kv_lora_rank <= keys.shape[3]:
            raise ValueError(f"{kv_lora_rank=} must be from 1 to the head dim, {keys.shape[3]}")
        sequences = queries.shape[0]
        return self.canonical(
            queries,
            keys,
            None,
            arguments.lengths_array("lengths", lengths, sequences),
            page_table=arguments.page_table_array(page_table, sequences),
            # 1, the empty product, if the query has one token of each sequence.
            q_length=math.prod(queries.shape[1:-2]),
            key_scale=scale,
            causal=causal,
            latent_dim=kv_lora_rank,
            row_format=arguments.latent_format(keys, queries.shape[-1], kv_lora_rank),
            **options,
        )


_MLA_DECODE = MlaDecode()


@public_function(MlaDecode.prepare)
@results(WITH_LSE)
def mla_decode(*args: Any, **kwargs: Any) -> Any:
    """Multi-head latent attention in its absorbed form, over pages of latents (DeepSeek-V2, arXiv 2405.04434).

    All heads read the same latent: as the key all of it, as the value its first ``kv_lora_rank`` elements. The caller
    has absorbed the up-projection of keys into the query, and applies that of values to the output.

    Args:
      query: ``[sequences, heads, head_dim]``, or ``[sequences, q_length, heads, head_dim]`` of several new tokens,
        whose rotary part comes last, as in the latents; float16, bfloat16, float32 or float64.
      latent_pages: ``[num_pages, page_size, head_dim]``, or with a head of 1 before the last dimension, in the query's
        dtype, int8, float8_e4m3fn or float8_e5m2; or ``[num_pages, page_size, 656]`` uint8, the rows of
        ``quantize_latents``.
      page_table: ``[sequences, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      lengths: ``[sequences]`` integers: tokens in the cache, the new ones included.
      kv_lora_rank: elements of the value; 512 in all published models.
      causal: a query sees the latents up to its own position.
      scale: factor of stored latents: a number, or broadcastable to ``[num_pages, page_size, 1]`` with
        rank 3. int8 needs it.
      softmax_scale: 1/√head_dim by default; models give that of their heads before the absorption.
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``, and ``(w, w)`` without ``causal``.

    Returns:
      The query's shape with ``kv_lora_rank`` instead of head_dim, in its dtype, with the log-sum-exp if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _MLA_DECODE(*args, **kwargs)
