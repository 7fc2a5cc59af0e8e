"""Serving as functions: decoding and chunked prefill over a cache of keys and values, paged or dense, and sampling.

All are only for inference, run on the default executor, eagerly and under ``jit``, ``scan`` and ``vmap``, and read
nothing on the host. What bad lengths and page tables do is the same for all and is described in docs/serving.md: they
never reach memory that is not the call's own.
"""

from tilewright.kernels.paged_attention.context_parallel import (
    context_parallel_mla_decode,
    context_parallel_page_attention,
    context_parallel_update_pages,
)
from tilewright.kernels.paged_attention.latent_rows import quantize_latents
from tilewright.kernels.paged_attention.ops.chunked_prefill_paged_decode import (
    ChunkedPrefillPagedDecode,
    chunked_prefill_paged_decode,
)
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeAttention, decode_attention
from tilewright.kernels.paged_attention.ops.mla_decode import MlaDecode, mla_decode
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import (
    MlaRaggedPageAttention,
    mla_ragged_page_attention,
)
from tilewright.kernels.paged_attention.ops.page_attention import PageAttention, page_attention
from tilewright.kernels.paged_attention.ops.ragged_decode_attention import (
    RaggedDecodeAttention,
    ragged_decode_attention,
)
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageAttention, ragged_page_attention
from tilewright.kernels.paged_attention.ops.rope_update_pages import RopeUpdatePages, rope_update_pages
from tilewright.kernels.paged_attention.ops.unified_attention import UnifiedAttention, unified_attention
from tilewright.kernels.paged_attention.ops.update_pages import UpdatePages, update_pages
from tilewright.kernels.paged_attention.shared_prefix import shared_prefix_page_attention
from tilewright.kernels.sampling.ops.linear_sample import LinearSample, linear_sample
from tilewright.kernels.sampling.ops.sample import Sample, sample

__all__ = [
    "ChunkedPrefillPagedDecode",
    "DecodeAttention",
    "LinearSample",
    "MlaDecode",
    "MlaRaggedPageAttention",
    "PageAttention",
    "RaggedDecodeAttention",
    "RaggedPageAttention",
    "RopeUpdatePages",
    "Sample",
    "UnifiedAttention",
    "UpdatePages",
    "chunked_prefill_paged_decode",
    "context_parallel_mla_decode",
    "context_parallel_page_attention",
    "context_parallel_update_pages",
    "decode_attention",
    "flash_mla",
    "linear_sample",
    "mla_decode",
    "mla_ragged_page_attention",
    "page_attention",
    "quantize_latents",
    "ragged_decode_attention",
    "ragged_page_attention",
    "rope_update_pages",
    "sample",
    "shared_prefix_page_attention",
    "unified_attention",
    "update_pages",
]

flash_mla = mla_decode
"""Another name of ``mla_decode``, that of DeepSeek's kernel."""
