"""The operations, in folders by the problem that they share, and the code that all share."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.kernels.op.portfolio import Portfolio

_PAGED = "tilewright.kernels.paged_attention.ops"

_OPS = {
    "flash_attention": "tilewright.kernels.flash_attention.op:FlashAttention",
    "decode_attention": f"{_PAGED}.decode_attention:DecodeAttention",
    "page_attention": f"{_PAGED}.page_attention:PageAttention",
    "ragged_decode_attention": f"{_PAGED}.ragged_decode_attention:RaggedDecodeAttention",
    "ragged_page_attention": f"{_PAGED}.ragged_page_attention:RaggedPageAttention",
    "unified_attention": f"{_PAGED}.unified_attention:UnifiedAttention",
    "chunked_prefill_paged_decode": f"{_PAGED}.chunked_prefill_paged_decode:ChunkedPrefillPagedDecode",
    "mla_decode": f"{_PAGED}.mla_decode:MlaDecode",
    "mla_ragged_page_attention": f"{_PAGED}.mla_ragged_page_attention:MlaRaggedPageAttention",
    "update_pages": f"{_PAGED}.update_pages:UpdatePages",
    "rope_update_pages": f"{_PAGED}.rope_update_pages:RopeUpdatePages",
    "sample": "tilewright.kernels.sampling.ops.sample:Sample",
    "linear_sample": "tilewright.kernels.sampling.ops.linear_sample:LinearSample",
    "rms_norm": "tilewright.kernels.norms.op:RmsNorm",
    "layer_norm": "tilewright.kernels.norms.op:LayerNorm",
    "rope": "tilewright.kernels.rope.op:Rope",
    "linear_attention": "tilewright.kernels.linear_attention.op:LinearAttention",
    "causal_conv1d": "tilewright.kernels.causal_conv1d.op:CausalConv1d",
    "causal_conv1d_step": "tilewright.kernels.causal_conv1d.step:CausalConv1dStep",
    "moe_mlp": "tilewright.kernels.experts.op:MoeMlp",
    "top_k_router": "tilewright.kernels.router.op:TopKRouter",
    "permute": "tilewright.kernels.permutation.ops.permute:Permute",
    "unpermute": "tilewright.kernels.permutation.ops.unpermute:Unpermute",
    "matmul": "tilewright.kernels.matmul.ops.matmul:Matmul",
    "glu": "tilewright.kernels.matmul.ops.glu:Glu",
    "grouped_matmul": "tilewright.kernels.matmul.ops.grouped_matmul:GroupedMatmul",
    "gated_grouped_matmul": "tilewright.kernels.matmul.ops.gated_grouped_matmul:GatedGroupedMatmul",
    "quantize": "tilewright.kernels.quantize.op:Quantize",
    "weight_only_matmul": "tilewright.kernels.weight_only.op:WeightOnlyMatmul",
    "linear_attention_step": "tilewright.kernels.linear_attention.step:LinearAttentionStep",
    "selective_scan": "tilewright.kernels.selective_scan.ops.selective_scan:SelectiveScan",
    "selective_scan_step": "tilewright.kernels.selective_scan.ops.selective_scan_step:SelectiveScanStep",
    "linear_cross_entropy": "tilewright.kernels.linear_cross_entropy.op:LinearCrossEntropy",
    "linear_kl_divergence": "tilewright.kernels.linear_cross_entropy.kl:LinearKlDivergence",
}

OPS: Mapping[str, str] = MappingProxyType(_OPS)
"""Every op by name, with the class of its kernel; a new op needs one line above.

The module of the class also has the public function, under the op's name, which ``tilewright.modules`` imports. Neither
the op nor JAX is imported before it is used: the shell completes words from this table.
"""


@contextlib.contextmanager
def registered(name: str, where: str) -> Iterator[None]:
    """Context manager: registers an op of another package under its name, like the ops above.

    Args:
      where: ``"module:Class"``.

    Raises:
      ValueError: there is an op of that name already.
    """
    if name in _OPS:
        raise ValueError(f"there is an op {name!r} already, {_OPS[name]}")
    _OPS[name] = where
    try:
        yield
    finally:
        del _OPS[name]
        # The name may be given to another op.
        kernel.cache_clear()


@functools.cache
def kernel(name: str) -> "Portfolio[Any, Any]":
    """The kernel of an op.

    Raises:
      ValueError: there is no op of that name.
    """
    module, _, kind = _location(name).partition(":")
    return getattr(importlib.import_module(module), kind)()


def function(name: str) -> Callable[..., Any]:
    """The public function of an op.

    Raises:
      ValueError: there is no op of that name.
    """
    return getattr(importlib.import_module(_location(name).partition(":")[0]), name)


def cuda_tables() -> dict[str, str]:
    """Every table of CUDA variants by name, as ``"module:NAME"``, as declared by the ops."""
    return {table: where for op in OPS for table, where in kernel(op).cuda_tables.items()}


def _location(name: str) -> str:
    if name not in OPS:
        raise ValueError(f"there is no op {name!r}; there are {sorted(OPS)}")
    return OPS[name]


def load_classes(name: str) -> None:
    """Imports the backend that defines the class with a stable id, or a former name, in this package.

    Ops whose name or room is part of it come first, and then those in use; until the class is known.
    """
    from tilewright.ops.utils.stable_ids import loaded_class  # imports JAX, which completion must not

    def order(op: str) -> tuple[bool, bool, bool]:
        module = OPS[op].partition(":")[0]
        return op not in name, room not in module.split("."), module not in sys.modules

    room = name.rpartition("/")[2].partition(".")[0]
    for op in sorted(OPS, key=order):
        for _ in kernel(op).backends:
            if loaded_class(name) is not None:
                return
