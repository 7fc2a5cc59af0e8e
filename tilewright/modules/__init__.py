"""The functions that most users call, and their kernels."""

import importlib
from typing import Any

from tilewright.modules.attention import FlashAttention, dot_product_attention, flash_attention

__all__ = ["FlashAttention", "base", "dot_product_attention", "flash_attention"]


def __getattr__(name: str) -> Any:
    if name == "base":
        return importlib.import_module("tilewright.modules.base")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
