"""Named calls of the rotary embedding, for tests, tuning and benchmarks."""

import dataclasses
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants
from tilewright.kernels.rope.scaling import Llama3Scaling, NtkScaling, RopeScaling, YarnScaling

type ScalingName = Literal["ntk", "yarn", "llama3"]

SCALINGS = MappingProxyType[str, RopeScaling](
    {"ntk": NtkScaling(4.0), "yarn": YarnScaling(4.0, 2048), "llama3": Llama3Scaling(8.0, 1.0, 4.0, 8192)}
)


@dataclasses.dataclass(frozen=True, slots=True)
class RopeCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      by_row: each row of the batch has positions of its own, which start anew within the row.
      scaling: the name of an entry of ``SCALINGS``.
    """

    batch: int = 2
    tokens: int = 1024
    heads: int = 8
    head_dim: int = 64
    by_row: bool = False
    base: float = 10000.0
    scaling: ScalingName | None = None
    interleaved: bool = False
    fraction: float = 1.0
    inverse: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        x = normal(seed, (self.batch, self.tokens, self.heads, self.head_dim), self.dtype)
        positions = np.arange(self.tokens, dtype=np.int32)
        if self.by_row:
            starts = np.random.default_rng(seed).integers(1, 2 + self.tokens // 2, (self.batch, 1))
            positions = (positions % starts).astype(np.int32)
        options = {name: getattr(self, name) for name in ("base", "interleaved", "fraction", "inverse")}
        scaling = None if self.scaling is None else SCALINGS[self.scaling]
        return (x, jnp.asarray(positions)), {"scaling": scaling, **options}


_LLAMA = RopeCase("", dtype="bfloat16", tokens=8192, heads=32, head_dim=128, base=500000.0, scaling="llama3")

CASES = OpCases(
    shape=("batch", "tokens", "heads", "head_dim"),
    small=RopeCase("small", tokens=6, heads=2, head_dim=16),
    large=RopeCase("large", batch=4, tokens=9, heads=3, head_dim=16),
    by_device={
        "cpu": variants(RopeCase(""), {"1k": {}, "by_row": {"by_row": True}}),
        "gpu": variants(
            _LLAMA,
            {
                "llama3_8k": {},
                "llama3_8k_keys": {"heads": 8},
                "halves_64": {"head_dim": 64, "base": 10000.0, "scaling": None},
                "interleaved_64": {"head_dim": 64, "base": 10000.0, "scaling": None, "interleaved": True},
                "half_of_128": {"fraction": 0.5},
                "decode": {"batch": 64, "tokens": 1, "by_row": True},
                "float32_4k": {"dtype": "float32", "tokens": 4096},
            },
        ),
    },
    options=variants(
        RopeCase("", tokens=16, head_dim=32),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "positions by row": {"by_row": True},
            "`base`": {"base": 500000.0},
            "`scaling`": {"scaling": "yarn"},
            "`interleaved`": {"interleaved": True},
            "`fraction`": {"fraction": 0.5},
            "`inverse`": {"inverse": True},
        },
    ),
    brief={"batch": 2, "tokens": 8, "heads": 2},
)
"""Queries and keys of training, and one token of each sequence of a batch."""
