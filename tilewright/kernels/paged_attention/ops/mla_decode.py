"""Multi-head latent attention in its absorbed form: all heads read one latent, whose first part is the value too."""

import math
from typing import Any

from jax.typing import ArrayLike

from tilewright.kernels.arguments import as_array, integer, reshape
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.op import Call, PagedAttentionKernel, takes_options
from tilewright.kernels.portfolio import lazy


class MlaDecode(PagedAttentionKernel):
    """Absorbed multi-head latent attention; see ``mla_decode`` for the arguments."""

    def __init__(self) -> None:
        super().__init__(
            "mla_decode",
            lazy("tilewright.kernels.paged_attention.hopper.latent_backend:PallasGpuPagedAttention"),
        )

    @takes_options("key_scale", "value_scale")
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
        **options: Any,
    ) -> Call:
        """Checks a call and gives the core's problem."""
        layout = "[sequences, heads, head_dim] or [sequences, q_length, heads, head_dim]"
        queries = arguments.query_array(query, (3, 4), layout)
        latents = as_array("latent_pages", latent_pages)
        if len(latents.shape) == 3:
            latents = reshape(latents, (*latents.shape[:2], 1, latents.shape[2]))
        keys, _ = arguments.cache_arrays(latents, None, "[num_pages, page_size, head_dim]", ("latent_pages", ""))
        if keys.shape[2] != 1:
            raise ValueError(f"latent_pages hold one latent for all heads, got {latents.shape=}")
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
            q_length=math.prod(queries.shape[1:-2]),
            key_scale=scale,
            causal=causal,
            latent_dim=kv_lora_rank,
            **options,
        )
