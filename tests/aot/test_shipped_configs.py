"""Every config that selection or tuning can take on a GPU compiles: its kernels neither spill nor serialise wgmmas."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest

pytest.importorskip("triton")

from tests.aot.compilations import Compilation, Reports, Shipped
from tests.aot.compiler import missing_packages
from tests.kernels.paged_attention.latent_conformance import SIZES
from tests.kernels.paged_attention.test_conformance_triton import SHIPPED
from tilewright.kernels.causal_conv1d.cases import ConvCase
from tilewright.kernels.causal_conv1d.op import CausalConv1d
from tilewright.kernels.causal_conv1d.step import CausalConv1dStep
from tilewright.kernels.causal_conv1d.triton.backend import TritonConv, TritonConvStep
from tilewright.kernels.flash_attention.cases import HOPPER_CASES, AttentionCase
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.hopper.backend import HopperLinearAttention
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.linear_attention.triton.backend import TritonLinearAttention
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.hopper.backend import HopperLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.backend import TritonLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.params import TritonLossParams
from tilewright.kernels.matmul.cases import GatedGroupedMatmulCase, GluCase, GroupedMatmulCase, MatmulCase
from tilewright.kernels.matmul.hopper.backend import (
    HopperGatedGroupedMatmul,
    HopperGlu,
    HopperGroupedMatmul,
    HopperMatmul,
)
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul, TritonGroupedMatmul
from tilewright.kernels.op.cases import Case, variants
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.hopper.latent_backend import PallasGpuPagedAttention
from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase, MlaDecode
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageAttention, MlaRaggedPageCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention
from tilewright.kernels.quantize.op import Quantize
from tilewright.kernels.quantize.triton.backend import TritonQuantize
from tilewright.kernels.router.cases import RouterCase
from tilewright.kernels.router.op import TopKRouter
from tilewright.kernels.router.triton.backend import TritonRouter
from tilewright.kernels.sampling.cases import LinearSampleCase, SampleCase
from tilewright.kernels.sampling.ops.linear_sample import LinearSample
from tilewright.kernels.sampling.ops.sample import Sample
from tilewright.kernels.sampling.triton.linear_sample import TritonLinearSample
from tilewright.kernels.sampling.triton.sample import TritonSample
from tilewright.kernels.selective_scan.cases import SelectiveScanCase, SelectiveScanStepCase
from tilewright.kernels.selective_scan.triton.selective_scan import TritonSelectiveScan
from tilewright.kernels.selective_scan.triton.selective_scan_step import TritonSelectiveScanStep
from tilewright.kernels.weight_only.cases import WeightOnlyCase
from tilewright.kernels.weight_only.triton.backend import TritonWeightOnly
from tilewright.ops.types import Direction

# Attention on Hopper GPUs.


def case(name: str, **options: Any) -> AttentionCase:
    sizes: dict[str, Any] = {"batch": 2, "q_length": 1024, "heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return AttentionCase(name, **sizes | options)


# What takes registers for each score: with every tile that a head dim has.
SCORE_OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {"causal": True, "logits_soft_cap": 30.0},
    "bias": {"bias": "bhqk"},
    "alibi": {"position_bias": "alibi", "bias_dtype": "float32"},
    "alibi_causal": {"position_bias": "alibi", "bias_dtype": "float32", "causal": True},
    "relative_bias": {"position_bias": "relative", "bias_dtype": "float32"},
    "relative_bias_masks": {"position_bias": "relative", "segments": True, "logits_soft_cap": 30.0, "causal": True},
    "mask": {"mask": "bhqk"},
    "segments": {"segments": True, "causal": True},
    "dropout": {"dropout_prob": 0.1},
    "dropout_causal": {"dropout_prob": 0.1, "causal": True},
    "dropout_segments": {"dropout_prob": 0.1, "segments": True},
    "dropout_masks": {"dropout_prob": 0.1, "segments": True, "mask": "bk", "causal": True},
    "everything": {
        "causal": True,
        "sliding_window": (256, 64),
        "logits_soft_cap": 30.0,
        "bias": "hqk",
        "mask": "bk",
        "segments": True,
        "lengths": True,
        "sinks": 2,
        "dropout_prob": 0.1,
        "kv_heads": 2,
    },
}
SCORE_CASES = [
    case(f"{name}_d{head_dim}", head_dim=head_dim, **options)
    for head_dim in (64, 128, 256)
    for name, options in SCORE_OPTIONS.items()
]
OTHER_CASES = [
    case("window", causal=True, sliding_window=255),
    case("window_both_sides", sliding_window=(128, 64)),
    case("lengths", lengths=True),
    case("packed", batch=1, packed=True, causal=True),
    case("bias_of_heads", bias="hqk"),
    case("bias_of_keys", bias="bk"),
    case("mask_of_keys", mask="bk"),
    case("sinks", causal=True, sinks=1),
    case("grouped", causal=True, kv_heads=2),
    case("one_kv_head", kv_heads=1),
    case("d96", head_dim=96, causal=True),
    case("d192", head_dim=192, causal=True),
    case("d192_v128", head_dim=192, value_dim=128, causal=True),
    case("d192_full", head_dim=192),
    case("d192_soft_cap", head_dim=192, causal=True, logits_soft_cap=30.0),
    case("d192_dropout", head_dim=192, dropout_prob=0.1),
    case("d192_segments_bias", head_dim=192, segments=True, bias="hqk", causal=True),
    case("d192_masks", head_dim=192, segments=True, mask="bhqk", lengths=True, causal=True),
    case("d192_v128_full", head_dim=192, value_dim=128),
    case("d192_v128_grouped", head_dim=192, value_dim=128, kv_heads=2, causal=True),
    case("d192_v128_window", head_dim=192, value_dim=128, causal=True, sliding_window=255),
    case("d192_v128_bias", head_dim=192, value_dim=128, bias="hqk", causal=True),
    case("d192_v128_mask", head_dim=192, value_dim=128, mask="bhqk", bias="bhqk"),
    case("d192_v128_ragged", head_dim=192, value_dim=128, q_length=1000, kv_length=777),
    case("d192_v128_soft_cap", head_dim=192, value_dim=128, segments=True, logits_soft_cap=30.0),
    case("d192_v128_dropout", head_dim=192, value_dim=128, segments=True, dropout_prob=0.1),
    case("d256_v64", head_dim=256, value_dim=64, kv_heads=1, causal=True),
    case("d192_packed", head_dim=192, batch=1, packed=True, dropout_prob=0.1),
    case("d128_v256", value_dim=256, kv_heads=2, causal=True),
    case("d256_window", head_dim=256, causal=True, sliding_window=255),
    case("d256_soft_cap_segments", head_dim=256, logits_soft_cap=30.0, segments=True),
    case("d64_v128", head_dim=64, value_dim=128),
    case("d128_v64", head_dim=128, value_dim=64),
    case("d40", head_dim=40),
    case("float16_d64", dtype="float16", head_dim=64),
    case("float16", dtype="float16", causal=True),
    case("ragged", q_length=1000, kv_length=777, causal=True, causal_alignment="bottom_right"),
    case("one_query", q_length=1, kv_length=2048, kv_heads=2),
    case("short", q_length=20, kv_length=30),
    case("d64_197", head_dim=64, q_length=197),
    case("d64_256", head_dim=64, q_length=256),
    case("d64_cross_77", head_dim=64, kv_length=77),
    case("d64_512", head_dim=64, q_length=512),
    case("d128_256", q_length=256),
    case("d72", head_dim=72),
    case("d72_257", head_dim=72, q_length=257),
    case("d72_everything", head_dim=72, **SCORE_OPTIONS["everything"]),
    case("d80_256_causal", head_dim=80, q_length=256, causal=True),
    case("d160", head_dim=160),
    case("d160_256", head_dim=160, q_length=256),
    case("d160_64", head_dim=160, q_length=64),
    case("d160_bias", head_dim=160, bias="bhqk", causal=True),
    case("d160_dropout_masks", head_dim=160, **SCORE_OPTIONS["dropout_masks"]),
    case("d160_everything", head_dim=160, **SCORE_OPTIONS["everything"]),
]


SPILLED_ADDRESSES = 48
"""Bytes that the fused backward kernel up to head_dim 128 may spill: addresses of shared memory that it computes once
and reloads once or twice in a step, of some 600 instructions. Computing the next scores beside dK is worth it: 2 %."""

SPILLED_BY_CALL = {
    "one_kv_head-backward": 52,  # as much as SPILLED_ADDRESSES, and an address of dK and dV, in halves of float32
    "dropout_causal_d128-forward": 12,  # an address, reloaded three times; of 96 keys none, but slower
    "relative_bias_masks_d128-backward": 132,  # 68 without the bias, 108 with one that is an array, which no row has
    "d192_v128_bias-backward": 32,  # its tile beside dK and dV; not compared with the kernels split by role
    "everything_d128-backward": 124,
    "everything_d256-forward": 8,
    "everything_d256-backward": 228,  # the gradient of the bias on its way through shared memory
}
"""Bytes that kernels spill, by call and direction, the most of jax 0.11.2 and 0.12."""


def attention_spills(compilation: Compilation) -> int:
    params = compilation.params
    fused = isinstance(params, HopperBackwardParams) and not params.deterministic
    known = SPILLED_BY_CALL.get(f"{compilation.call}-{compilation.direction}", 0)
    return max(SPILLED_ADDRESSES if fused else 0, known)


def with_lse(call: str, direction: Direction, inputs: Any) -> Any:
    """With a cotangent of lse, which takes registers, too."""
    return inputs.replace(return_lse=True)


# Attention in Triton.

PLAIN: dict[str, dict[str, Any]] = {
    f"{name}_d{dim}": {"head_dim": dim} | options
    for dim in (64, 128, 256)
    for name, options in {"full": dict[str, Any](), "causal": {"causal": True}}.items()
}
SPILLED_BY_TRITON = {"everything": 900, "d256": 200, "a100": 24, "rtx4090": 24, "h100": 0, "b200": 24, "rtx5090": 24}
"""Bytes that a kernel may spill: with every option at once, at the widest heads, and otherwise by card."""

SPILLED_BY_TRITON_3_9 = {
    "soft_cap_d64-h100-forward": 8,
    "lengths_d64-h100-forward": 216,
    "packed_d64-h100-forward": 204,
    "dropout_d128-h100-backward": 20,
    "dropout_d256-h100-backward": 204,
    "soft_cap_d256-h100-backward": 212,
}
"""Bytes that first choices for these calls spill with Triton 3.9. On an H100 no call takes Triton for them unless it
is asked to."""

# Compiled with the first choice; every other candidate is compiled only for the most common calls.
TRITON_OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {"causal": True, "logits_soft_cap": 30.0},
    "window": {"causal": True, "sliding_window": 255},
    "bias": {"bias": "hqk"},
    "mask": {"mask": "bhqk"},
    "lengths": {"lengths": True, "causal": True},
    "packed": {"batch": 1, "packed": True, "causal": True},
    "dropout": {"dropout_prob": 0.1},
    "grouped": {"causal": True, "kv_heads": 2, "sinks": 1},
    "ragged": {"q_length": 1000, "kv_length": 777, "causal": True, "causal_alignment": "bottom_right"},
}
TRITON_OTHERS: dict[str, dict[str, Any]] = {
    "d80": {"head_dim": 80, "causal": True},
    "d192_v128": {"head_dim": 192, "value_dim": 128, "causal": True},
    "float16": {"dtype": "float16", "causal": True},
    "float32": {"dtype": "float32", "causal": True},
    "float32_d256": {"dtype": "float32", "head_dim": 256},
    "everything": SCORE_OPTIONS["everything"],
}  # fmt: skip
TRITON_CASES = PLAIN | {
    f"{name}_d{dim}": {"head_dim": dim} | options for dim in (64, 128, 256) for name, options in TRITON_OPTIONS.items()
} | TRITON_OTHERS  # fmt: skip


def triton_attention_spills(compilation: Compilation) -> int:
    name = f"{compilation.call}-{compilation.card}-{compilation.direction}"
    allowed = next(size for part, size in SPILLED_BY_TRITON.items() if part in name)
    return max(allowed, SPILLED_BY_TRITON_3_9.get(name, 0))


def attention_kernels(compilation: Compilation, reports: Reports) -> bool:
    if compilation.direction == "forward":
        return len(reports) == 1
    return len(reports) == (3 if compilation.params.deterministic else 2)


# Matmuls.

_MATRIX: dict[str, Any] = {"rows": 8192, "k": 1024, "n": 2048}
TRITON_PRODUCTS: dict[str, dict[str, Any]] = {
    "large": {"rows": 8192, "k": 4096, "n": 14336},
    "decode": {"rows": 64, "k": 4096, "n": 14336},
    "float32": {**_MATRIX, "dtype": "float32"},
    "float32_decode": {**_MATRIX, "rows": 64, "dtype": "float32"},
    "odd": {"rows": 1000, "k": 130, "n": 77, "dtype": "float16"},
    "odd_decode": {"rows": 64, "k": 130, "n": 77},
}
GROUPED = GroupedMatmulCase("", dtype="bfloat16")
GATED = GatedGroupedMatmulCase("", dtype="bfloat16")
GATED_CASES = variants(
    GATED, TRITON_PRODUCTS | {name: {**_MATRIX, "activation": name} for name in ("gelu", "gelu_tanh")}
)
_FLOAT8: dict[str, Any] = {
    "rows": 8192, "k": 4096, "n": 2048, "transpose_rhs": True, "dtype": "float8_e4m3fn",
    "preferred_element_type": "bfloat16",
}  # fmt: skip


def exactly(call: str, direction: Direction, inputs: Any) -> Any:
    return inputs.replace(precision=jax.lax.Precision.HIGHEST) if call == "exact" else inputs


def with_indexed_rows(call: str, direction: Direction, inputs: Any) -> Any:
    """Rows of as many tokens in the order of an index."""
    return inputs.replace(row_index=jax.ShapeDtypeStruct((inputs.rows,), "int32"))


def with_indexed_cotangents(call: str, direction: Direction, inputs: Any) -> Any:
    """The same of the cotangents."""
    return inputs.replace(cotangent_index=jax.ShapeDtypeStruct((inputs.rows,), "int32"))


def without_pre_activations(call: str, direction: Direction, inputs: Any) -> Any:
    return inputs.replace(keeps=False)


def product_kernels(compilation: Compilation, reports: Reports) -> bool:
    return len(reports) == (1 if compilation.direction == "forward" else 2)


# Losses.

LOSS = LinearCrossEntropyCase("", tokens=8192, d=4096, vocab=131072, dtype="bfloat16")
TRITON_LOSSES: dict[str, dict[str, Any]] = {
    "large": {},
    "tied_with_cap": {"d": 2304, "vocab": 256000, "vocab_first": True, "logits_soft_cap": 30.0},
    "cap": {"logits_soft_cap": 30.0},
    "smoothing": {"bias": True, "label_smoothing": 0.1, "vocab_first": True},
    "all": {"bias": True, "label_smoothing": 0.1, "logits_soft_cap": 30.0, "gradient_epsilon": 1e-6},
    "float32": {"d": 1024, "vocab": 32768, "dtype": "float32", "bias": True},
    "float16": {"d": 1024, "vocab": 32768, "dtype": "float16", "vocab_first": True},
    "odd": {"tokens": 1000, "d": 130, "vocab": 50257},
    "odd_tied": {"d": 1056, "vocab": 50257, "vocab_first": True, "logits_soft_cap": 30.0},
    "masked": {"vocab": 151936, "vocab_first": True},
    "masked_smoothing": {"vocab": 151936, "bias": True, "label_smoothing": 0.1},
    "few_tokens": {"tokens": 20},
}
HOPPER_LOSSES: dict[str, dict[str, Any]] = {
    "kept": {},
    "kept, soft cap": {"d": 2304, "vocab": 256000, "vocab_first": True, "logits_soft_cap": 30.0},
    "recomputed": {},
    "all options": {
        "tokens": 4096, "d": 768, "vocab": 50257, "bias": True, "vocab_first": True, "logits_soft_cap": 30.0,
        "z_loss": 1e-4, "label_smoothing": 0.1, "gradient_epsilon": 1e-6,
    },
}  # fmt: skip
LOSS_SPILLS = {"all options": 96}
"""Bytes of the statistics with a bias, a soft cap and the sum of the logits of a vocabulary that no tile divides."""


def keeping_gradients(call: str, direction: Direction, inputs: Any) -> Any:
    """The kernels of gradients run in the backward pass where they are recomputed."""
    return inputs.replace(keeps_gradients=direction == "forward" and call != "recomputed")


def loss_tile(params: Any) -> Any:
    """Other block sizes give no other kernels worth compiling."""
    return params.statistics if isinstance(params, TritonLossParams) else params.gradient


def loss_kernels(compilation: Compilation, reports: Reports) -> bool:
    names = {each.name for each in reports}
    if compilation.direction == "backward":
        return names == {"tile_gradient"}
    return names == ({"tile_statistics"} if compilation.params.keep else {"tile_statistics", "tile_gradient"})


# Attention over a cache.

LATENTS = MlaCase("", **SIZES | {"sequences": 64, "kv_length": 8192})
_LATENTS = MlaRaggedPageCase("", **SIZES | {"heads": 128, "sequences": 8, "kv_length": 4096})
PACKED_LATENTS = MlaRaggedPageAttention.cases.by_device["gpu"] | variants(
    _LATENTS,
    {
        "decoding": {"q_lengths": (1,)},
        "decoding, 16 heads": {"q_lengths": (1,), "heads": 16},
        "a chunk": {"q_lengths": (2048,), "kv_length": 8192, "sequences": 1},
        "a chunk, 16 heads": {"q_lengths": (2048,), "kv_length": 8192, "sequences": 1, "heads": 16},
        "pages of 16": {"q_lengths": (1, 512), "page_size": 16},
    },
)
LATENT_ROWS = variants(
    dataclasses.replace(_LATENTS, rows=True),
    {
        "rows": {},
        "rows, 16 heads": {"heads": 16},
        "rows, chunks": {"q_lengths": (1, 512)},
        "rows, chunks, 16 heads": {"q_lengths": (1, 512), "heads": 16},
    },
)
PACKED = RaggedPageCase(
    "", sequences=64, kv_length=8192, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", q_lengths=(1, 1, 512)
)
FEW_HEADS: dict[str, dict[str, Any]] = {
    "a head per key head, pages of 16": {"heads": 8},
    "groups of two": {"heads": 16},
    "groups of three": {"heads": 24},
}
"""At most four scalars are spilled, outside of the loop over keys."""


def prefetched_or_in_clusters(params: Any) -> Any:
    """How many ranges there are, and how far ahead is prefetched, are constants."""
    return bool(params.prefetched), params.cluster


def latent_spills(compilation: Compilation) -> int:
    """Bytes. What the masks of all items need is computed before the first, and spilled there and read in branches."""
    return 104 if compilation.inputs.q_length > 1 else 64


def copies_overlap(compilation: Compilation, reports: Any) -> bool:
    """Keys and values come by 16-byte copies that overlap with products."""
    return bool(reports) and all("cp.async.cg" in each.texts["ptx"] for each in reports if each.name == "attend")


def in_triton(cases: Mapping[str, Case], cards: Sequence[str]) -> Shipped:
    """Packed queries over latents. 64 rows of O are half of a thread's registers: what only stores need is spilled."""
    op, backend, spills = "mla_ragged_page_attention", TritonPagedAttention(), lambda compilation: 80
    return Shipped(op, backend, cases, cards, ("forward",), (), expected=copies_overlap, spills=spills)


def packed_spills(compilation: Compilation) -> int:
    """Bytes. What a CTA needs from item to item is spilled around an item, not in its steps."""
    if compilation.call.startswith("trees") and compilation.params.items == 16:
        return 80
    return 16 if compilation.call in FEW_HEADS and compilation.params.items == 1 else 64


def named(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


# The router in Triton.

ROUTERS = TopKRouter.cases.by_device["gpu"] | variants(
    RouterCase("", tokens=300, k=32, scoring="sigmoid"),
    {
        "most experts": {"experts": 1024},
        "odd groups": {"experts": 1023, "bias": True, "num_groups": 11, "top_groups": 4},
        "groups that are wider in registers": {"experts": 1023, "num_groups": 33, "top_groups": 4},
    },
)

# Linear attention in Triton and on Hopper.

RECURRENCES = LinearAttention.cases.by_device["gpu"]
# Backward the producer of two consumers spills an address, and the gradients of tokens pairs of them beside those of
# states: once for each chunk and head.
HOPPER_RECURRENCES = variants(
    LinearAttentionCase("", batch=2, length=4096, heads=4, key_dim=128, value_heads=8, dtype="bfloat16", state=True),
    {
        "gated delta rule": {"qk_l2norm": True},
        "gated delta rule, packed": {"qk_l2norm": True, "batch": 1, "sequences": "cum_seqlens"},
        "delta rule, lengths": {"gate": "none", "sequences": "seq_lengths"},
        "narrow": {"key_dim": 64, "value_dim": 64},
        "three blocks": {"value_dim": 192, "gate": "head"},
        "one sequence": {"qk_l2norm": True, "batch": 1, "length": 32768, "heads": 2},
        "one sequence, sums": {"update": "add", "batch": 1, "length": 32768, "heads": 2},
        "ssd": {"update": "add", "heads": 1, "value_heads": 80, "value_dim": 64},
        "retention": {"update": "add", "gate": "head", "value_heads": 4, "state": False},
    },
)


def only_inverses_spill(_: Compilation, reports: Any) -> bool:
    """True if the kernel with states has all in registers; that of the inverse, one warp a chunk, need not."""
    return bool(reports) and all(
        "prepare_chunk" in each.name or not each.spill_stores + each.spill_loads for each in reports
    )


# The causal convolution in Triton.

CONVOLUTIONS = CausalConv1d.cases.by_device["gpu"] | variants(
    ConvCase("", dtype="bfloat16", length=4096, channels=2048, packing="cum_seqlens", initial_state=True),
    {
        "states": {"return_state": True},
        "width 8, states": {"width": 8, "return_state": True},
        "width 8, float32": {"width": 8, "dtype": "float32", "packing": None, "initial_state": False},
        "odd": {"channels": 1001, "length": 77, "width": 2},
    },
)

# Sampling in Triton.

SAMPLES = Sample.cases.by_device["gpu"] | variants(
    SampleCase("", rows=64, vocab=128256, return_log_probs=True),
    {
        "probabilities": {},
        "every limit": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
        "largest": {"vocab": 1 << 20, "top_k": 50, "top_p": 0.9, "dtype": "float16"},
        "small": {"vocab": 50, "top_p": 0.9},
    },
)
LINEAR_SAMPLES = LinearSample.cases.by_device["gpu"] | variants(
    LinearSampleCase("", rows=64, d=1024, vocab=32000),
    {"float32": {}, "bias and odd": {"bias": True, "d": 1000, "vocab": 50257, "dtype": "float16"}},
)


EVERY_CARD = ("a100", "rtx4090", "h100")
BLACKWELL = ("b200", "rtx5090")
BOTH: tuple[Direction, ...] = ("forward", "backward")
SCANS = {
    "mamba": SelectiveScanCase("", batch=8, length=4096, channels=5120, dtype="bfloat16"),
    "one row": SelectiveScanCase("", length=32768, channels=5120, dtype="bfloat16"),
    "packed": SelectiveScanCase(
        "", length=8192, channels=2048, packed=9, initial_state=True, return_state=True, dtype="bfloat16"
    ),
    "segments": SelectiveScanCase("", batch=2, length=4096, channels=1024, segments=5),
    "groups": SelectiveScanCase("", batch=8, length=2048, channels=4096, groups=8, state=64, dtype="bfloat16"),
}
SCAN_STEPS = {
    "mamba": SelectiveScanStepCase("", rows=64, slots=128, channels=5120, dtype="bfloat16"),
    "groups": SelectiveScanStepCase("", rows=8, channels=4096, groups=8, state=128, state_dtype="bfloat16"),
}

EVERY = (
    Shipped(
        "flash_attention",
        PallasGpuFlashAttention(),
        named(*HOPPER_CASES.values(), *SCORE_CASES, *OTHER_CASES),
        changed=with_lse,
        spills=attention_spills,
        counted="spill_loads",
    ),
    Shipped(
        "flash_attention",
        TritonFlashAttention(),
        variants(case(""), TRITON_CASES),
        EVERY_CARD,
        tuned=tuple(PLAIN),
        changed=with_lse,
        spills=triton_attention_spills,
        counted="spill_loads",
        expected=attention_kernels,
    ),
    Shipped(
        "flash_attention",
        TritonFlashAttention(),
        variants(case(""), PLAIN),
        BLACKWELL,
        tuned=(),
        changed=with_lse,
        spills=triton_attention_spills,
        counted="spill_loads",
        expected=attention_kernels,
    ),
    Shipped(
        "grouped_matmul",
        HopperGroupedMatmul(),
        variants(
            GROUPED,
            {
                "grouped": {"rows": 8192, "k": 4096, "n": 14336},
                "transposed": {"rows": 8192, "k": 4096, "n": 2048, "transpose_rhs": True},
                "decode": {"rows": 64, "k": 7168, "n": 2048},
                "odd": {"rows": 1000, "k": 136, "n": 1096, "dtype": "float16"},
                "float8 blocks": {**_FLOAT8, "lhs_scale": "blocks", "rhs_scale": "blocks"},
                "float8 numbers": {**_FLOAT8, "lhs_scale": "number", "rhs_scale": "number"},
            },
        ),
    ),
    Shipped(
        "grouped_matmul",
        TritonGroupedMatmul(),
        variants(
            GROUPED,
            TRITON_PRODUCTS
            | {"exact": {**_MATRIX, "dtype": "float32"}, "transposed": {**_MATRIX, "transpose_rhs": True}},
        ),
        EVERY_CARD,
        tuned=("large", "decode", "float32", "odd", "odd_decode"),
        changed=exactly,
        expected=product_kernels,
    ),
    Shipped(
        "grouped_matmul",
        TritonGroupedMatmul(),
        variants(GROUPED, TRITON_PRODUCTS | {"transposed": {**_MATRIX, "transpose_rhs": True}}),
        BLACKWELL,
        tuned=(),
        expected=product_kernels,
    ),
    Shipped(
        "gated_grouped_matmul",
        HopperGatedGroupedMatmul(),
        # The exact GELU may take 16 bytes where a consumer has two accumulators of 128 rows.
        variants(GATED, {"gated": {"rows": 8192, "k": 4096, "n": 14336, "activation": "gelu"}}),
        spills=lambda _: 16,
    ),
    *(
        Shipped(
            op,
            backend,
            variants(case, {name: {"rows": 8192, "k": 4096, "n": 2048}}),
            directions=directions,
            changed=changed,
        )
        for op, backend, case, name, directions, changed in (
            ("grouped_matmul", HopperGroupedMatmul(), GROUPED, "indexed", BOTH, with_indexed_rows),
            ("gated_grouped_matmul", HopperGatedGroupedMatmul(), GATED, "indexed", BOTH, with_indexed_rows),
            ("grouped_matmul", HopperGroupedMatmul(), GROUPED, "cotangents", ("backward",), with_indexed_cotangents),
        )
    ),
    Shipped("gated_grouped_matmul", TritonGatedGroupedMatmul(), GATED_CASES, EVERY_CARD, tuned=tuple(TRITON_PRODUCTS)),
    Shipped("gated_grouped_matmul", TritonGatedGroupedMatmul(), GATED_CASES, ("rtx5090",), tuned=()),
    Shipped(
        "gated_grouped_matmul",
        TritonGatedGroupedMatmul(),
        {f"{name}_not_kept": each for name, each in GATED_CASES.items()},
        EVERY_CARD,
        ("forward",),
        tuned=tuple(f"{name}_not_kept" for name in TRITON_PRODUCTS),
        changed=without_pre_activations,
    ),
    Shipped(
        "weight_only_matmul",
        TritonWeightOnly(),
        variants(
            WeightOnlyCase("", dtype="bfloat16", rows=8, k=8192, n=8192),
            {
                "8": {},
                "zeros": {"zeros": True, "dtype": "float16"},
                "int8": {"format": "int8", "group": None},
                "mxfp4": {"format": "mxfp4", "group": 32},
                "odd": {"k": 8200, "n": 8200, "group": None},
                "64": {"rows": 64},
                "512": {"rows": 512},
                "512_mxfp4": {"rows": 512, "format": "mxfp4", "group": 32, "dtype": "float16"},
            },
        ),
        EVERY_CARD,
        ("forward",),
        tuned=("8", "64", "512"),
    ),
    Shipped(
        "matmul",
        HopperMatmul(),
        variants(
            MatmulCase("", dtype="bfloat16"),
            {
                "NN": {"rows": 4096, "k": 4096, "n": 4096},
                "TT": {"rows": 4000, "k": 4088, "n": 4096, "transpose_lhs": True, "transpose_rhs": True},
            },
        ),
    ),
    Shipped("glu", HopperGlu(), named(GluCase("glu", dtype="bfloat16", rows=8192, k=4096, n=14336))),
    Shipped(
        "linear_cross_entropy",
        HopperLinearCrossEntropy(),
        variants(LOSS, HOPPER_LOSSES),
        changed=keeping_gradients,
        spills=lambda compilation: LOSS_SPILLS.get(compilation.call, 0),
    ),
    Shipped(
        "linear_cross_entropy",
        TritonLinearCrossEntropy(),
        variants(LOSS, TRITON_LOSSES),
        EVERY_CARD,
        tuned=("large", "float32", "odd"),
        changed=keeping_gradients,
        distinct=loss_tile,
        expected=loss_kernels,
    ),
    Shipped(
        "linear_cross_entropy",
        TritonLinearCrossEntropy(),
        variants(LOSS, TRITON_LOSSES),
        ("rtx5090",),
        tuned=(),
        changed=keeping_gradients,
        distinct=loss_tile,
        expected=loss_kernels,
    ),
    Shipped(
        "mla_decode",
        PallasGpuPagedAttention(),
        {
            **MlaDecode.cases.by_device["gpu"],
            **variants(
                LATENTS,
                {
                    "two tokens": {"heads": 128, "q_lengths": (2,)},
                    "many tokens": {"heads": 5, "q_lengths": (40,)},
                    "not causal": {"heads": 64, "q_lengths": (3,), "causal": False},
                    "large pages": {"heads": 32, "page_size": 256},
                    "sinks": {"heads": 128, "sinks": 1, "dtype": "float16"},
                    "negative scale": {"softmax_scale": -1.0},
                },
            ),
        },
        directions=("forward",),
        distinct=prefetched_or_in_clusters,
        spills=latent_spills,
    ),
    Shipped(
        "ragged_page_attention",
        PallasGpuPackedAttention(),
        variants(
            PACKED,
            {
                "pages of 16": {},
                "pages of 64": {"page_size": 64},
                "pages of two tiles": {"page_size": 256},
                "head dim 64": {"head_dim": 64, "page_size": 64},
                "head dim 64, pages of 16": {"head_dim": 64},
                "float16, groups of five": {"heads": 40, "dtype": "float16", "page_size": 128},
                "not causal": {"causal": False},
                "not causal, large pages": {"causal": False, "page_size": 128},
                "a head per key head": {"heads": 8, "page_size": 64},
                "a window": {"sliding_window": 200},
                "a window, large pages": {"sliding_window": 200, "page_size": 256},
                "negative scale": {"softmax_scale": -1.0},
                "trees": {"q_lengths": (16,), "tree": True},
                "trees, a window": {"q_lengths": (16,), "tree": True, "page_size": 64, "sliding_window": 200},
                **FEW_HEADS,
            },
        ),
        directions=("forward",),
        spills=packed_spills,
    ),
    in_triton(PACKED_LATENTS, EVERY_CARD),
    in_triton(LATENT_ROWS, ("h100", "rtx4090")),
    Shipped("top_k_router", TritonRouter(), ROUTERS, EVERY_CARD, tuned=("qwen3", "odd groups")),
    # A few of the accumulators that the gradients of tokens sum over value heads, once for each of these.
    Shipped("linear_attention", TritonLinearAttention(), RECURRENCES, tuned=(), spills=lambda _: 128),
    Shipped(
        "linear_attention",
        HopperLinearAttention(),
        HOPPER_RECURRENCES,
        tuned=(),
        spills=lambda compilation: (
            160
            if compilation.direction == "backward"
            else 0
            if HOPPER_RECURRENCES[compilation.call].update == "add"
            else 300
        ),
        expected=lambda compilation, report: (
            compilation.direction == "backward" or only_inverses_spill(compilation, report)
        ),
    ),
    Shipped("causal_conv1d", TritonConv(), CONVOLUTIONS, EVERY_CARD, tuned=("gdn_32k", "states")),
    Shipped("causal_conv1d_step", TritonConvStep(), CausalConv1dStep.cases.by_device["gpu"], EVERY_CARD, ("forward",)),
    Shipped("selective_scan", TritonSelectiveScan(), SCANS, tuned=()),
    Shipped("selective_scan_step", TritonSelectiveScanStep(), SCAN_STEPS, directions=("forward",), tuned=()),
    Shipped(
        "quantize", TritonQuantize(), Quantize.cases.by_device["gpu"], EVERY_CARD, ("forward",), tuned=("block", "both")
    ),
    Shipped("linear_sample", TritonLinearSample(), LINEAR_SAMPLES, EVERY_CARD, ("forward",), tuned=("llama",)),
    Shipped("sample", TritonSample(), SAMPLES, EVERY_CARD, ("forward",), tuned=("all", "top_k_top_p", "every limit")),
    *(
        Shipped(
            op,
            TritonPagedAttention(),
            {name: each for name, (of, each) in SHIPPED.items() if of == op},
            directions=("forward",),
            tuned=(),
            expected=copies_overlap,
        )
        for op in ("page_attention", "mla_decode", "ragged_page_attention")
    ),
)
COMPILATIONS = {each.name: (shipped, each) for shipped in EVERY for each in shipped.compilations()}


@pytest.mark.parametrize("name", COMPILATIONS)
def test_compiles_without_spills(name: str) -> None:
    shipped, compilation = COMPILATIONS[name]
    if compilation.backend.platform is Platform.PALLAS and missing_packages():
        pytest.skip(missing_packages())
    assert shipped.faults(compilation) == [], compilation.params
