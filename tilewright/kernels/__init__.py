"""The operations, one folder each, and what they share."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.kernels.portfolio import Portfolio
from tilewright.ops.utils.serialize import resolve
from tilewright.ops.utils.stable_ids import loaded_class

_PAGED = "tilewright.kernels.paged_attention.ops"

OPS: Mapping[str, str] = MappingProxyType(
    {
        "flash_attention": "tilewright.kernels.flash_attention.op:FlashAttention",
        "decode_attention": f"{_PAGED}.decode_attention:DecodeAttention",
        "page_attention": f"{_PAGED}.page_attention:PageAttention",
        "ragged_decode_attention": f"{_PAGED}.ragged_decode_attention:RaggedDecodeAttention",
        "ragged_page_attention": f"{_PAGED}.ragged_page_attention:RaggedPageAttention",
        "unified_attention": f"{_PAGED}.unified_attention:UnifiedAttention",
        "chunked_prefill_paged_decode": f"{_PAGED}.chunked_prefill_paged_decode:ChunkedPrefillPagedDecode",
        "mla_decode": f"{_PAGED}.mla_decode:MlaDecode",
        "update_pages": f"{_PAGED}.update_pages:UpdatePages",
    }
)
"""Every op by name; adding one adds its line here."""

CUDA_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "flash_attention_hopper_forward": "tilewright.kernels.flash_attention.cuda.hopper_variants:FORWARD",
        "flash_attention_hopper_wide_forward": "tilewright.kernels.flash_attention.cuda.hopper_variants:WIDE_FORWARD",
        "flash_attention_hopper_backward": "tilewright.kernels.flash_attention.cuda.hopper_variants:BACKWARD",
        "packed_attention_hopper": "tilewright.kernels.paged_attention.cuda.packed:TABLE",
        "flash_attention_ampere_forward": "tilewright.kernels.flash_attention.cuda.ampere_variants:FORWARD",
        "flash_attention_ampere_backward": "tilewright.kernels.flash_attention.cuda.ampere_variants:BACKWARD",
        "flash_attention_forward": "tilewright.kernels.flash_attention.cuda.cutlass_variants:FORWARD",
        "flash_attention_backward": "tilewright.kernels.flash_attention.cuda.cutlass_variants:BACKWARD",
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


def load_classes(name: str) -> None:
    """Imports the backend that defines the class of a stable id, or of a former name, of this package.

    The op whose name stands in it comes first, then those of its family and all others, until the class is known.
    """
    for op in sorted(OPS, key=lambda op: op not in name):
        if loaded_class(name) is None:
            [each.load() for each in kernel(op).implementations if not each.load_error]
