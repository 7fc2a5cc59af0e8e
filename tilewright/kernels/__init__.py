"""The operations, one folder each, and what they share."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.kernels.portfolio import Portfolio
from tilewright.ops.utils.serialize import resolve

OPS: Mapping[str, str] = MappingProxyType(
    {
        "flash_attention": "tilewright.kernels.flash_attention.op:FlashAttention",
        "decode_attention": "tilewright.kernels.decode_attention.op:DecodeAttention",
        "page_attention": "tilewright.kernels.page_attention.op:PageAttention",
        "ragged_decode_attention": "tilewright.kernels.ragged_decode_attention.op:RaggedDecodeAttention",
        "ragged_page_attention": "tilewright.kernels.ragged_page_attention.op:RaggedPageAttention",
        "unified_attention": "tilewright.kernels.unified_attention.op:UnifiedAttention",
        "chunked_prefill_paged_decode": "tilewright.kernels.chunked_prefill_paged_decode.op:ChunkedPrefillPagedDecode",
        "mla_decode": "tilewright.kernels.mla_decode.op:MlaDecode",
        "update_pages": "tilewright.kernels.update_pages.op:UpdatePages",
    }
)
"""Every op by name; adding one adds its line here."""

CUDA_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "flash_attention_hopper_forward": "tilewright.kernels.flash_attention.cuda_hopper_variants:FORWARD",
        "flash_attention_hopper_wide_forward": "tilewright.kernels.flash_attention.cuda_hopper_variants:WIDE_FORWARD",
        "flash_attention_hopper_backward": "tilewright.kernels.flash_attention.cuda_hopper_variants:BACKWARD",
        "packed_attention_hopper": "tilewright.kernels.paged_attention.cuda_packed:TABLE",
        "flash_attention_ampere_forward": "tilewright.kernels.flash_attention.cuda_ampere_variants:FORWARD",
        "flash_attention_ampere_backward": "tilewright.kernels.flash_attention.cuda_ampere_variants:BACKWARD",
        "flash_attention_forward": "tilewright.kernels.flash_attention.cuda_variants:FORWARD",
        "flash_attention_backward": "tilewright.kernels.flash_attention.cuda_variants:BACKWARD",
    }
)
"""Every table of CUDA variants by name, for ``tilewright build``; adding one adds its line here."""


@functools.cache
def kernel(name: str) -> Portfolio:
    """The kernel of an op.

    Raises:
      ValueError: there is no op of that name.
    """
    if name not in OPS:
        raise ValueError(f"there is no op {name!r}; there are {sorted(OPS)}")
    return resolve(OPS[name])()
