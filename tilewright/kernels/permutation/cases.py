"""Named calls of ``permute`` and ``unpermute``, for tests, tuning and benchmarks."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class RowsCase(Case, abc.ABC):
    """The sizes of the rows of one call."""

    tokens: int = 1024
    d: int = 1024
    k: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class PermuteCase(RowsCase):
    experts: int = 64
    capacity: int | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        generator = np.random.default_rng(seed)
        experts = jnp.asarray(drawn_experts(generator, (self.tokens, self.k), self.experts))
        x = normal(generator, (self.tokens, self.d), self.dtype)
        return (x, experts, self.experts), {"capacity": self.capacity}


@dataclasses.dataclass(frozen=True, slots=True)
class UnpermuteCase(RowsCase):
    def arguments(self, seed: int = 0) -> Arguments:
        generator = np.random.default_rng(seed)
        choices = self.tokens * self.k
        rows = normal(generator, (choices, self.d), self.dtype)
        weights = normal(generator, (self.tokens, self.k), "float32")
        return (rows, jnp.asarray(drawn_source(generator, choices)), weights), {}


def drawn_experts(generator: np.random.Generator, shape: tuple[int, ...], num_experts: int) -> np.ndarray:
    return generator.integers(0, num_experts, shape, np.int32)


def drawn_source(generator: np.random.Generator, choices: int) -> np.ndarray:
    """The source of rows that have all choices."""
    return generator.permutation(choices).astype(np.int32)


def _cases[C: RowsCase](kind: type[C], fields: tuple[str, ...], options: Mapping[str, Mapping[str, Any]]) -> OpCases[C]:
    models = {
        "mixtral": {"d": 4096, "k": 2, "experts": 8},
        "qwen3": {"d": 2048, "k": 8, "experts": 128},
        "deepseek_v3": {"d": 7168, "k": 8, "experts": 256},
        "gpt_oss": {"d": 2880, "k": 4, "experts": 128},
        "decode": {"tokens": 64, "d": 2048, "k": 8, "experts": 128},
    }
    kept = {name: {key: value for key, value in sizes.items() if key in fields} for name, sizes in models.items()}
    return OpCases(
        shape=fields,
        small=kind("small", tokens=6, d=16, k=2),
        large=kind("large", tokens=9, d=16, k=2),
        by_device={
            "cpu": variants(kind(""), {"1k": {}}),
            "gpu": variants(kind("", tokens=8192, dtype="bfloat16"), kept),
        },
        options=variants(
            kind("", tokens=16, d=64, k=3), {"float32": {}, "bfloat16, float16": {"dtype": "bfloat16"}, **options}
        ),
        brief={"tokens": 8, "d": 64},
    )


PERMUTE_CASES = _cases(PermuteCase, ("tokens", "d", "k", "experts"), {"`capacity`": {"capacity": 2, "experts": 4}})
UNPERMUTE_CASES = _cases(UnpermuteCase, ("tokens", "d", "k"), {})
