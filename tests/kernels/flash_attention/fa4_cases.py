"""Calls that FlashAttention-4 serves; run where its kernels are emulated, and where they are."""

from collections.abc import Sequence
from typing import Any

from tests.kernels.flash_attention.conformance import as_case, pairwise
from tests.kernels.flash_attention.cudnn_cases import case_of
from tilewright.kernels.flash_attention.fa4.backend import Fa4FlashAttention

BACKEND = Fa4FlashAttention()

CASES = {
    "plain": case_of(),
    "causal": case_of(causal=True, dtype="float16", softmax_scale=-0.4),
    "wide values": case_of(head_dim=20, value_dim=50, kv_length=64),
    "more queries": case_of(kv_length=26, causal=True),
    "more queries from the end": case_of(kv_length=26, causal=True, causal_alignment="bottom_right"),
    "more keys": case_of(kv_length=90, causal=True),
    "more keys from the end": case_of(kv_length=90, causal=True, causal_alignment="bottom_right", heads=2),
    "window": case_of(causal=True, sliding_window=5, kv_length=48, dtype="float16"),
    "window to both sides": case_of(sliding_window=(7, 3), kv_length=48),
    "window without a left": case_of(sliding_window=(None, 4), heads=2),
    "window that ends": case_of(sliding_window=(3, 1), kv_length=20),
    "soft cap": case_of(causal=True, logits_soft_cap=5.0, softmax_scale=0.7),
    "soft cap in float16": case_of(logits_soft_cap=20.0, dtype="float16", kv_length=64),
    "lengths": case_of(lengths=True, kv_length=70),
    "lengths for each head": case_of(lengths=True, kv_length=70, heads=2, dtype="float16"),
}

FACTORS: dict[str, Sequence[Any]] = {
    "lengths": [(64, 64), (33, 33), (48, 80), (40, 17), (1, 37), (29, 0)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (24, 8), (5, 20)],
    "dtype": ["bfloat16", "float16"],
    "causality": [None, "top_left", "bottom_right"],
    "window": [None, 6, (3, None), (None, 2), (0, 9)],
    "soft_cap": [None, 4.0],
    "scale": [None, 0.7, -0.2],
}
ABSENT = {"sinks": 0, "mask": None, "bias": None, "dropout": 0.0, "variable": ""}
PAIRWISE = [as_case(index, ABSENT | row) for index, row in enumerate(pairwise(FACTORS))]
