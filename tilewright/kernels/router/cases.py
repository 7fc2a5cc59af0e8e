"""Named calls of the router, for tests, tuning and benchmarks."""

import dataclasses

import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants
from tilewright.kernels.router.inputs import Scoring


@dataclasses.dataclass(frozen=True, slots=True)
class RouterCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      bias: the call has a bias, in float32.
    """

    tokens: int = 1024
    experts: int = 64
    k: int = 4
    scoring: Scoring = "softmax"
    normalize: bool = True
    bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def arguments(self, seed: int = 0) -> Arguments:
        generator = np.random.default_rng(seed)
        logits = normal(generator, (self.tokens, self.experts), self.dtype)
        bias = normal(generator, (self.experts,), "float32") if self.bias else None
        names = ("scoring", "normalize", "num_groups", "top_groups", "scale")
        return (logits, self.k), {"bias": bias, **{name: getattr(self, name) for name in names}}


_DEEPSEEK = {"scoring": "sigmoid", "bias": True, "num_groups": 8, "top_groups": 4, "scale": 2.5}

CASES = OpCases(
    shape=("tokens", "experts", "k"),
    small=RouterCase("small", tokens=6, experts=8, k=2),
    large=RouterCase("large", tokens=9, experts=8, k=2),
    by_device={
        "cpu": variants(RouterCase(""), {"1k": {}, "deepseek_1k": {"experts": 256, "k": 8, **_DEEPSEEK}}),
        "gpu": variants(
            RouterCase("", tokens=8192),
            {
                "mixtral": {"experts": 8, "k": 2},
                "qwen3": {"experts": 128, "k": 8},
                "deepseek_v3": {"experts": 256, "k": 8, **_DEEPSEEK},
                "gpt_oss": {"experts": 128, "scoring": "softmax_after", "dtype": "bfloat16"},
                "decode": {"tokens": 64, "experts": 128, "k": 8},
            },
        ),
    },
    options=variants(
        RouterCase("", tokens=16, experts=16, k=3),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "without `normalize`": {"normalize": False},
            "`softmax_after`": {"scoring": "softmax_after"},
            "`sigmoid`": {"scoring": "sigmoid"},
            "`bias`": {"scoring": "sigmoid", "bias": True},
            "groups": {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2},
            "`scale`": {"scale": 2.5},
        },
    ),
    brief={"tokens": 8},
)
"""Routers of published models, over the tokens of a step of training and over one token of each sequence."""
