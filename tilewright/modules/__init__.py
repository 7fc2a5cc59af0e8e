"""The functions that most users call, and their kernels, each imported when it is first used.

A program pays for the ops that it calls: all of them take a second to import.
"""

import importlib
from typing import Any

from tilewright import kernels

_NAMES: dict[str, tuple[str, ...]] = {
    "tilewright.kernels.causal_conv1d.context_parallel": ("context_parallel_causal_conv1d",),
    "tilewright.kernels.causal_conv1d.op": ("CausalConv1d", "causal_conv1d"),
    "tilewright.kernels.causal_conv1d.step": ("CausalConv1dStep", "causal_conv1d_step"),
    "tilewright.kernels.experts.op": ("MoeMlp", "moe_mlp"),
    "tilewright.kernels.flash_attention.context_parallel": ("context_parallel_attention",),
    "tilewright.kernels.flash_attention.distributed.layout": ("unzigzag", "zigzag"),
    "tilewright.kernels.flash_attention.op": ("FlashAttention", "flash_attention"),
    "tilewright.kernels.linear_attention.context_parallel": ("context_parallel_linear_attention",),
    "tilewright.kernels.linear_attention.functions": (
        "delta_rule",
        "gated_delta_rule",
        "gated_linear_attention",
        "kimi_delta_attention",
        "lightning_attention",
        "retention",
        "rwkv6",
        "rwkv7",
        "ssd",
    ),
    "tilewright.kernels.linear_attention.op": ("LinearAttention", "linear_attention"),
    "tilewright.kernels.linear_attention.step": ("LinearAttentionStep", "linear_attention_step"),
    "tilewright.kernels.linear_attention.step_functions": (
        "delta_rule_step",
        "gated_delta_rule_step",
        "gated_linear_attention_step",
        "kimi_delta_attention_step",
        "lightning_attention_step",
        "retention_step",
        "rwkv6_step",
        "rwkv7_step",
        "ssd_step",
    ),
    "tilewright.kernels.linear_cross_entropy.kl": ("LinearKlDivergence", "linear_kl_divergence"),
    "tilewright.kernels.linear_cross_entropy.op": ("LinearCrossEntropy", "linear_cross_entropy", "linear_log_probs"),
    "tilewright.kernels.matmul.distributed.op": ("all_gather_matmul", "matmul_reduce_scatter"),
    "tilewright.kernels.matmul.ops.gated_grouped_matmul": ("GatedGroupedMatmul", "gated_grouped_matmul"),
    "tilewright.kernels.matmul.ops.glu": ("Glu", "glu"),
    "tilewright.kernels.matmul.ops.grouped_matmul": ("GroupedMatmul", "grouped_matmul"),
    "tilewright.kernels.matmul.ops.matmul": ("Matmul", "matmul"),
    "tilewright.kernels.norms.op": ("LayerNorm", "RmsNorm", "layer_norm", "rms_norm"),
    "tilewright.kernels.paged_attention.context_parallel": (
        "context_parallel_mla_decode",
        "context_parallel_page_attention",
        "context_parallel_update_pages",
    ),
    "tilewright.kernels.paged_attention.latent_rows": ("quantize_latents",),
    "tilewright.kernels.paged_attention.ops.chunked_prefill_paged_decode": (
        "ChunkedPrefillPagedDecode",
        "chunked_prefill_paged_decode",
    ),
    "tilewright.kernels.paged_attention.ops.decode_attention": ("DecodeAttention", "decode_attention"),
    "tilewright.kernels.paged_attention.ops.mla_decode": ("MlaDecode", "mla_decode"),
    "tilewright.kernels.paged_attention.ops.mla_ragged_page_attention": (
        "MlaRaggedPageAttention",
        "mla_ragged_page_attention",
    ),
    "tilewright.kernels.paged_attention.ops.page_attention": ("PageAttention", "page_attention"),
    "tilewright.kernels.paged_attention.ops.ragged_decode_attention": (
        "RaggedDecodeAttention",
        "ragged_decode_attention",
    ),
    "tilewright.kernels.paged_attention.ops.ragged_page_attention": ("RaggedPageAttention", "ragged_page_attention"),
    "tilewright.kernels.paged_attention.ops.rope_update_pages": ("RopeUpdatePages", "rope_update_pages"),
    "tilewright.kernels.paged_attention.ops.unified_attention": ("UnifiedAttention", "unified_attention"),
    "tilewright.kernels.paged_attention.ops.update_pages": ("UpdatePages", "update_pages"),
    "tilewright.kernels.paged_attention.shared_prefix": ("shared_prefix_page_attention",),
    "tilewright.kernels.permutation.ops.permute": ("Permute", "permute"),
    "tilewright.kernels.permutation.ops.unpermute": ("Unpermute", "unpermute"),
    "tilewright.kernels.quantize.op": ("Quantize", "quantize"),
    "tilewright.kernels.quantize.quantized": ("Quantized",),
    "tilewright.kernels.rope.op": ("Rope", "rope"),
    "tilewright.kernels.rope.scaling": (
        "LinearScaling",
        "Llama3Scaling",
        "LongRopeScaling",
        "NtkScaling",
        "RopeScaling",
        "YarnScaling",
    ),
    "tilewright.kernels.router.losses": ("load_balancing_loss", "router_z_loss"),
    "tilewright.kernels.router.op": ("TopKRouter", "top_k_router"),
    "tilewright.kernels.sampling.ops.linear_sample": ("LinearSample", "linear_sample"),
    "tilewright.kernels.sampling.ops.sample": ("Sample", "sample"),
    "tilewright.kernels.scaled_linear.linear": ("scaled_linear",),
    "tilewright.kernels.scaled_linear.recipe": ("Recipe",),
    "tilewright.kernels.selective_scan.ops.selective_scan": ("SelectiveScan", "selective_scan"),
    "tilewright.kernels.selective_scan.ops.selective_scan_step": ("SelectiveScanStep", "selective_scan_step"),
    "tilewright.kernels.weight_only.expanding": ("mxfp4_to_e4m3",),
    "tilewright.kernels.weight_only.op": ("WeightOnlyMatmul", "weight_only_matmul"),
    "tilewright.kernels.weight_only.readers": ("from_awq", "from_gptq", "from_mxfp4"),
    "tilewright.kernels.weight_only.weights": ("PackedWeight", "quantize_weight"),
    "tilewright.modules.attention": ("dot_product_attention",),
    "tilewright.modules.serving": ("flash_mla",),
}
"""The names in each module."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOMES, "base"])


def __getattr__(name: str) -> Any:
    if name == "base":
        return importlib.import_module("tilewright.modules.base")
    if name in _HOMES:
        globals()[name] = found = getattr(importlib.import_module(_HOMES[name]), name)
        return found
    if name in kernels.OPS:  # one that is registered for a time, or by another package
        return kernels.function(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
