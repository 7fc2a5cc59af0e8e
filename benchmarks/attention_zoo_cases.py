"""The problems of ``benchmarks.attention_zoo``: attention as published models run it, at their own lengths.

Sizes come from each model's published configuration; ``source`` says which, and how a length follows from an image, a
sound or a text. The scale of the logits is always 1/√head_dim, which changes no time. More than half of the problems
have a length that no tile of 64 divides.

Two rules, by position in the list sorted by name (0, 1, 2, 0, 1, 2, ...), say what a problem is for: the third ones
(2) are held out: heuristics must not be tuned by them; the first ones (0) are also measured after tuning.
"""

import dataclasses
from typing import Any, Literal

from tilewright.kernels.flash_attention.cases import AttentionCase

type Family = Literal["language", "code", "embeddings", "speech", "vision", "diffusion", "proteins", "smoke"]

TILE = 64
"""The smallest tile of rows or keys that GPU kernels have."""


@dataclasses.dataclass(frozen=True, slots=True)
class ZooProblem:
    """A call of attention with the model that makes it.

    Attributes:
      source: where the sizes come from.
      held_out: kept from whoever tunes heuristics.
      tuned: also measured with the winner of a tuning.
    """

    case: AttentionCase
    family: Family
    model: str
    source: str
    held_out: bool = False
    tuned: bool = False

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def is_ragged(self) -> bool:
        """True if no tile of 64 divides the queries or the keys."""
        _, _, q_length, kv_length = self.case.score_shape
        return bool(q_length % TILE or kv_length % TILE)


def _problem(
    family: Family,
    name: str,
    model: str,
    source: str,
    sizes: tuple[int, int, int, int],
    *,
    kv_heads: int | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> ZooProblem:
    """A problem of ``sizes`` (batch, length, heads, head_dim)."""
    batch, length, heads, head_dim = sizes
    case = AttentionCase(
        name,
        batch=batch,
        q_length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        **options,
    )
    return ZooProblem(case, family, model, source)


_LANGUAGE = (
    _problem(
        "language", "llama3_8b_8k", "Llama 3 8B", "config: 32/8 heads of 128, context 8192",
        (1, 8192, 32, 128), kv_heads=8, causal=True,
    ),
    _problem(
        "language", "llama3_8b_prompt_3333", "Llama 3 8B", "config: 32/8 heads of 128; a prompt of 3333 tokens",
        (2, 3333, 32, 128), kv_heads=8, causal=True,
    ),
    _problem(
        "language", "llama3_70b_4k", "Llama 3 70B", "config: 64/8 heads of 128; half of its context",
        (1, 4096, 64, 128), kv_heads=8, causal=True,
    ),
    _problem(
        "language", "llama32_1b_prompt_999", "Llama 3.2 1B", "config: 32/8 heads of 64; prompts of 999 tokens",
        (8, 999, 32, 64), kv_heads=8, causal=True,
    ),
    _problem(
        "language", "mistral_7b_window_8k", "Mistral 7B v0.1", "config: 32/8 heads of 128, sliding_window 4096",
        (1, 8192, 32, 128), kv_heads=8, causal=True, sliding_window=(4095, 0),
    ),
    _problem(
        "language", "gemma2_9b_local_8k", "Gemma 2 9B", "config: 16/8 heads of 256, soft cap 50, window 4096, 8192",
        (1, 8192, 16, 256), kv_heads=8, causal=True, sliding_window=(4095, 0), logits_soft_cap=50.0,
    ),
    _problem(
        "language", "gemma2_2b_global_4250", "Gemma 2 2B", "config: 8/4 heads of 256, soft cap 50; a prompt of 4250",
        (2, 4250, 8, 256), kv_heads=4, causal=True, logits_soft_cap=50.0,
    ),
    _problem(
        "language", "gemma3_4b_local_4k", "Gemma 3 4B", "config: 8/4 heads of 256, sliding_window 1024",
        (4, 4096, 8, 256), kv_heads=4, causal=True, sliding_window=(1023, 0),
    ),
    _problem(
        "language", "qwen25_7b_4k", "Qwen2.5 7B", "config: 28/4 heads of 128; pre-training length 4096",
        (2, 4096, 28, 128), kv_heads=4, causal=True,
    ),
    _problem(
        "language", "qwen25_05b_prompt_1500", "Qwen2.5 0.5B", "config: 14/2 heads of 64; prompts of 1500 tokens",
        (8, 1500, 14, 64), kv_heads=2, causal=True,
    ),
    _problem(
        "language", "deepseek_v3_mla_2k", "DeepSeek-V3", "config: 128 heads, 128 + 64 rope for keys, 128 for values",
        (1, 2048, 128, 192), value_dim=128, causal=True,
    ),
    _problem(
        "language", "deepseek_v2_lite_mla_3333", "DeepSeek-V2-Lite", "config: 16 heads of 192, values of 128; prompts",
        (2, 3333, 16, 192), value_dim=128, causal=True,
    ),
    _problem(
        "language", "falcon_7b_mqa_2k", "Falcon 7B", "config: 71 heads of 64, multi_query, trained at 2048",
        (2, 2048, 71, 64), kv_heads=1, causal=True,
    ),
    _problem(
        "language", "palm_8b_mqa_2047", "PaLM 8B", "paper: 16 heads of 256, multi-query, 2048 less the shifted token",
        (4, 2047, 16, 256), kv_heads=1, causal=True,
    ),
    _problem(
        "language", "gpt_oss_20b_local_4k", "GPT-OSS 20B", "config: 64/8 heads of 64, sinks, sliding_window 128",
        (2, 4096, 64, 64), kv_heads=8, causal=True, sliding_window=(127, 0), sinks=1,
    ),
    _problem(
        "language", "gpt_oss_20b_full_3000", "GPT-OSS 20B", "config: 64/8 heads of 64, sinks; a prompt of 3000 tokens",
        (1, 3000, 64, 64), kv_heads=8, causal=True, sinks=1,
    ),
    _problem(
        "language", "gpt2_dropout_1k", "GPT-2", "config: 12 heads of 64, n_ctx 1024, attn_pdrop 0.1",
        (16, 1024, 12, 64), causal=True, dropout_prob=0.1,
    ),
    _problem(
        "language", "phi3_mini_4k", "Phi-3-mini 128k", "config: 32 heads of 96; pre-training length 4096",
        (2, 4096, 32, 96), causal=True,
    ),
    _problem(
        "language", "gpt_neox_20b_2047", "GPT-NeoX 20B", "config: 64 heads of 96, 2048 less the shifted token",
        (2, 2047, 64, 96), causal=True, dtype="float16",
    ),
    _problem(
        "language", "mpt_7b_alibi_2k", "MPT 7B", "config: 32 heads of 128, max_seq_len 2048, ALiBi as a dense bias",
        (1, 2048, 32, 128), causal=True, bias="hqk",
    ),
    _problem(
        "language", "granite3_2b_4k", "Granite 3.0 2B", "config: 32/8 heads of 64, context 4096",
        (2, 4096, 32, 64), kv_heads=8, causal=True,
    ),
    _problem(
        "language", "t5_base_512", "T5 base", "config: 12 heads of 64, 512 tokens, relative position bias",
        (32, 512, 12, 64), bias="hqk",
    ),
    _problem(
        "language", "flan_t5_xl_700", "Flan-T5 XL", "config: 32 heads of 64, relative position bias; texts of 700",
        (8, 700, 32, 64), bias="hqk",
    ),
    _problem(
        "language", "bert_base_512", "BERT base", "config: 12 heads of 64, 512 positions",
        (32, 512, 12, 64), dtype="float16",
    ),
    _problem(
        "language", "bert_large_dropout_384", "BERT large", "config: 16 heads of 64, dropout 0.1; SQuAD's length 384",
        (32, 384, 16, 64), dropout_prob=0.1,
    ),
)  # fmt: skip

_CODE_AND_EMBEDDINGS = (
    _problem(
        "code", "starcoder_mqa_2k", "StarCoder 15B", "config: 48 heads of 128, multi_query; a quarter of its context",
        (2, 2048, 48, 128), kv_heads=1, causal=True,
    ),
    _problem(
        "code", "starcoderbase_1b_mqa_4000", "StarCoderBase 1B", "config: 16 heads of 128, multi_query; a file of 4000",
        (2, 4000, 16, 128), kv_heads=1, causal=True,
    ),
    _problem(
        "embeddings", "modernbert_local_8k", "ModernBERT base", "config: 12 heads of 64, local_attention 128, 8192",
        (4, 8192, 12, 64), sliding_window=(64, 64),
    ),
    _problem(
        "embeddings", "modernbert_global_1500", "ModernBERT base", "config: 12 heads of 64; texts of 1500 tokens",
        (8, 1500, 12, 64),
    ),
    _problem(
        "embeddings", "qwen3_embedding_06b_511", "Qwen3-Embedding 0.6B", "config: 16/8 heads of 128, causal; texts",
        (16, 511, 16, 128), kv_heads=8, causal=True,
    ),
)  # fmt: skip

_SPEECH = (
    _problem(
        "speech", "whisper_large_encoder_1500", "Whisper large v3", "config: 20 heads of 64; 30 s are 1500 frames",
        (8, 1500, 20, 64), dtype="float16",
    ),
    _problem(
        "speech", "whisper_large_cross_1500", "Whisper large v3", "config: 448 tokens of text to 1500 frames",
        (16, 448, 20, 64), kv_length=1500, dtype="float16",
    ),
    _problem(
        "speech", "wav2vec2_large_999", "wav2vec 2.0 large", "config: 16 heads of 64; 20 s at 16 kHz are 999 frames",
        (8, 999, 16, 64),
    ),
)  # fmt: skip

_VISION = (
    _problem(
        "vision", "vit_l16_224", "ViT-L/16", "paper: 16 heads of 64; 14² patches and a token",
        (64, 197, 16, 64),
    ),
    _problem(
        "vision", "vit_l16_384", "ViT-L/16", "paper: 16 heads of 64; 24² patches and a token",
        (32, 577, 16, 64),
    ),
    _problem(
        "vision", "dinov2_l14_518", "DINOv2 ViT-L/14", "config: 16 heads of 64; 37² patches and a token",
        (8, 1370, 16, 64),
    ),
    _problem(
        "vision", "clip_l14_224", "CLIP ViT-L/14", "config: 16 heads of 64; 16² patches and a token",
        (64, 257, 16, 64), dtype="float16",
    ),
    _problem(
        "vision", "clip_text_77", "CLIP ViT-L/14, text", "config: 12 heads of 64, 77 tokens, causal",
        (256, 77, 12, 64), causal=True, dtype="float16",
    ),
    _problem(
        "vision", "siglip_so400m_384", "SigLIP SO400M/14", "config: 16 heads of 72; 27² patches",
        (16, 729, 16, 72),
    ),
    _problem(
        "vision", "sam_h_windows_196", "SAM ViT-H", "config: 16 heads of 80; 25 windows of 14² an image, 4 images",
        (100, 196, 16, 80), bias="bhqk",
    ),
    _problem(
        "vision", "sam_h_global_4096", "SAM ViT-H", "config: 16 heads of 80; 64² patches, relative positions as a bias",
        (1, 4096, 16, 80), bias="bhqk",
    ),
    _problem(
        "vision", "swin_b_stage3_49", "Swin-B", "config: 16 heads of 32; 4 windows of 7² an image, 128 images, a bias",
        (512, 49, 16, 32), bias="hqk",
    ),
)  # fmt: skip

_DIFFUSION = (
    _problem(
        "diffusion", "sd15_self_4096", "Stable Diffusion 1.5", "U-Net at 64²: 320 channels, 8 heads of 40",
        (4, 4096, 8, 40), dtype="float16",
    ),
    _problem(
        "diffusion", "sd15_self_1024", "Stable Diffusion 1.5", "U-Net at 32²: 640 channels, 8 heads of 80",
        (16, 1024, 8, 80), dtype="float16",
    ),
    _problem(
        "diffusion", "sd15_self_256", "Stable Diffusion 1.5", "U-Net at 16²: 1280 channels, 8 heads of 160",
        (64, 256, 8, 160), dtype="float16",
    ),
    _problem(
        "diffusion", "sd15_middle_64", "Stable Diffusion 1.5", "U-Net at 8²: 1280 channels, 8 heads of 160",
        (128, 64, 8, 160), dtype="float16",
    ),
    _problem(
        "diffusion", "sd15_cross_77", "Stable Diffusion 1.5", "U-Net at 64²: 8 heads of 40 to 77 tokens of text",
        (16, 4096, 8, 40), kv_length=77, dtype="float16",
    ),
    _problem(
        "diffusion", "sdxl_self_4096", "SDXL", "U-Net at 64²: 640 channels, 10 heads of 64",
        (4, 4096, 10, 64),
    ),
    _problem(
        "diffusion", "sdxl_cross_77", "SDXL", "U-Net at 32²: 1280 channels, 20 heads of 64 to 77 tokens of text",
        (32, 1024, 20, 64), kv_length=77,
    ),
    _problem(
        "diffusion", "sd3_medium_4429", "Stable Diffusion 3 medium", "config: 24 heads of 64; 64² patches and 77 + 256",
        (2, 4429, 24, 64),
    ),
    _problem(
        "diffusion", "flux_1024_4608", "FLUX.1 dev", "config: 24 heads of 128; 1024²: 64² patches and 512 tokens",
        (1, 4608, 24, 128),
    ),
    _problem(
        "diffusion", "flux_992_4356", "FLUX.1 dev", "config: 24 heads of 128; 992²: 62² patches and 512 tokens",
        (1, 4356, 24, 128),
    ),
    _problem(
        "diffusion", "dit_xl2_256", "DiT-XL/2", "paper: 16 heads of 72; 256²: 16² patches",
        (64, 256, 16, 72),
    ),
    _problem(
        "diffusion", "pixart_cross_120", "PixArt-α XL/2", "config: 16 heads of 72; 64² patches to 120 tokens of text",
        (8, 4096, 16, 72), kv_length=120,
    ),
    _problem(
        "diffusion", "hunyuan_video_6376", "HunyuanVideo", "config: 24 heads of 128; 9 frames: 3 × 34 × 60, 256 tokens",
        (1, 6376, 24, 128),
    ),
    _problem(
        "diffusion", "wan21_13b_14040", "Wan 2.1 1.3B", "config: 12 heads of 128; 33 frames of 480p: 9 × 30 × 52",
        (1, 14040, 12, 128),
    ),
    _problem(
        "diffusion", "cogvideox_2b_9676", "CogVideoX 2B", "config: 30 heads of 64; 25 frames: 7 × 30 × 45, 226 tokens",
        (1, 9676, 30, 64),
    ),
)  # fmt: skip

_PROTEINS = (
    _problem(
        "proteins", "alphafold2_triangle_384", "AlphaFold 2", "triangle attention: 4 heads of 32, crop 384, pair bias",
        (384, 384, 4, 32), bias="hqk",
    ),
    _problem(
        "proteins", "alphafold2_triangle_701", "AlphaFold 2", "triangle attention: 4 heads of 32; 256 rows of 701",
        (256, 701, 4, 32), bias="hqk",
    ),
    _problem(
        "proteins", "alphafold3_diffusion_384", "AlphaFold 3", "token transformer: 16 heads of 48, crop 384, 48 times",
        (48, 384, 16, 48), bias="hqk",
    ),
    _problem(
        "proteins", "esm2_3b_702", "ESM-2 3B", "config: 40 heads of 64; a protein of 700 residues and 2 tokens",
        (8, 702, 40, 64),
    ),
)  # fmt: skip


def with_rules(problems: tuple[ZooProblem, ...]) -> dict[str, ZooProblem]:
    """The problems by name, sorted, each marked by its position."""
    ordered = sorted(problems, key=lambda problem: problem.name)
    return {
        problem.name: dataclasses.replace(problem, held_out=position % 3 == 2, tuned=position % 3 == 0)
        for position, problem in enumerate(ordered)
    }


ZOO = with_rules((*_LANGUAGE, *_CODE_AND_EMBEDDINGS, *_SPEECH, *_VISION, *_DIFFUSION, *_PROTEINS))

SMOKE = {
    problem.name: problem
    for problem in (
        _problem("smoke", "smoke_causal", "none", "small enough for a CPU", (1, 24, 2, 8), kv_heads=1, causal=True),
        _problem("smoke", "smoke_cross", "none", "small enough for a CPU", (2, 16, 2, 8), kv_length=21),
    )
}
"""Whether everything runs, not how fast."""

GROUPS = {
    "all": ZOO,
    "dev": {name: problem for name, problem in ZOO.items() if not problem.held_out},
    "held": {name: problem for name, problem in ZOO.items() if problem.held_out},
    "tuned": {name: problem for name, problem in ZOO.items() if problem.tuned},
    "smoke": SMOKE,
}
