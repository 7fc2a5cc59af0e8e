"""The functions that most users call, and their kernels."""

import importlib
from typing import Any

from tilewright import kernels
from tilewright.kernels.experts.op import MoeMlp, moe_mlp
from tilewright.kernels.linear_cross_entropy.kl import LinearKlDivergence, linear_kl_divergence
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy, linear_cross_entropy, linear_log_probs
from tilewright.kernels.matmul.distributed.op import all_gather_matmul, matmul_reduce_scatter
from tilewright.kernels.matmul.ops.gated_grouped_matmul import GatedGroupedMatmul, gated_grouped_matmul
from tilewright.kernels.matmul.ops.glu import Glu, glu
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul, grouped_matmul
from tilewright.kernels.matmul.ops.matmul import Matmul, matmul
from tilewright.kernels.norms.op import LayerNorm, RmsNorm, layer_norm, rms_norm
from tilewright.kernels.permutation.ops.permute import Permute, permute
from tilewright.kernels.permutation.ops.unpermute import Unpermute, unpermute
from tilewright.kernels.rope.op import Rope, rope
from tilewright.kernels.rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
)
from tilewright.kernels.router.losses import load_balancing_loss, router_z_loss
from tilewright.kernels.router.op import TopKRouter, top_k_router
from tilewright.modules.attention import (
    FlashAttention,
    context_parallel_attention,
    dot_product_attention,
    flash_attention,
    unzigzag,
    zigzag,
)
from tilewright.modules.serving import (
    ChunkedPrefillPagedDecode,
    DecodeAttention,
    LinearSample,
    MlaDecode,
    MlaRaggedPageAttention,
    PageAttention,
    RaggedDecodeAttention,
    RaggedPageAttention,
    RopeUpdatePages,
    Sample,
    UnifiedAttention,
    UpdatePages,
    chunked_prefill_paged_decode,
    context_parallel_mla_decode,
    context_parallel_page_attention,
    context_parallel_update_pages,
    decode_attention,
    flash_mla,
    linear_sample,
    mla_decode,
    mla_ragged_page_attention,
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    rope_update_pages,
    sample,
    shared_prefix_page_attention,
    unified_attention,
    update_pages,
)

__all__ = [
    "ChunkedPrefillPagedDecode",
    "DecodeAttention",
    "FlashAttention",
    "GatedGroupedMatmul",
    "Glu",
    "GroupedMatmul",
    "LayerNorm",
    "LinearCrossEntropy",
    "LinearKlDivergence",
    "LinearSample",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Matmul",
    "MlaDecode",
    "MlaRaggedPageAttention",
    "MoeMlp",
    "NtkScaling",
    "PageAttention",
    "Permute",
    "RaggedDecodeAttention",
    "RaggedPageAttention",
    "RmsNorm",
    "Rope",
    "RopeScaling",
    "RopeUpdatePages",
    "Sample",
    "TopKRouter",
    "UnifiedAttention",
    "Unpermute",
    "UpdatePages",
    "YarnScaling",
    "all_gather_matmul",
    "base",
    "chunked_prefill_paged_decode",
    "context_parallel_attention",
    "context_parallel_mla_decode",
    "context_parallel_page_attention",
    "context_parallel_update_pages",
    "decode_attention",
    "dot_product_attention",
    "flash_attention",
    "flash_mla",
    "gated_grouped_matmul",
    "glu",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
    "linear_sample",
    "load_balancing_loss",
    "matmul",
    "matmul_reduce_scatter",
    "mla_decode",
    "mla_ragged_page_attention",
    "moe_mlp",
    "page_attention",
    "permute",
    "ragged_decode_attention",
    "ragged_page_attention",
    "rms_norm",
    "rope",
    "rope_update_pages",
    "router_z_loss",
    "sample",
    "shared_prefix_page_attention",
    "top_k_router",
    "unified_attention",
    "unpermute",
    "unzigzag",
    "update_pages",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    if name == "base":
        return importlib.import_module("tilewright.modules.base")
    if name in kernels.OPS:  # one that is registered for a time, or by another package
        return kernels.function(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
