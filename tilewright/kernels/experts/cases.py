"""Named calls of the layer of experts, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.numerics.activations import ACTIVATIONS, SWIGLU_OAI
from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      zipf: exponent of the shares of experts: 0 if all are chosen alike, 1 for Zipf's law.
      biases: the call has all three.
    """

    tokens: int = 256
    d: int = 256
    n: int = 128
    num_experts: int = 8
    k: int = 2
    activation: str = "silu"
    biases: bool = False
    capacity: int | None = None
    zipf: float = 0.0

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        x = normal(random, (self.tokens, self.d), self.dtype)
        matrices = [self._matrix(random, *each) for each in ((self.d, self.n), (self.d, self.n), (self.n, self.d))]
        options: dict[str, Any] = {"activation": self.activation, "capacity": self.capacity}
        if self.biases:
            shapes = (self.num_experts, self.n), (self.num_experts, self.n), (self.num_experts, self.d)
            options["biases"] = tuple(normal(random, shape, self.dtype) for shape in shapes)
        return (x, *self.routing(random), *matrices), options

    def routing(self, random: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        """Weights and experts."""
        experts = drawn_experts(random, self.tokens, self.k, -self.zipf * np.log1p(np.arange(self.num_experts)))
        weights = jax.nn.softmax(normal(random, (self.tokens, self.k), "float32"))
        return weights, jnp.asarray(experts)

    def _matrix(self, random: np.random.Generator, k: int, n: int) -> jax.Array:
        # As a model has them: pre-activations are about 1, where activations are not linear.
        drawn = normal(random, (self.num_experts, k, n), "float32")
        return (max(k, 1) ** -0.5 * drawn).astype(self.dtype)


def drawn_experts(random: np.random.Generator, tokens: int, k: int, shares: np.ndarray) -> np.ndarray:
    """``[tokens, k]`` experts by the logarithms of their shares, different ones of a token as long as there are."""
    experts = shares.shape[0]
    order = np.argsort(-(random.gumbel(size=(tokens, experts)) + shares), axis=-1).astype(np.int32)
    return np.tile(order, (1, -(-k // experts)))[:, :k]


CASES = OpCases(
    shape=("tokens", "d", "n", "num_experts", "k"),
    small=ExpertsCase("small", tokens=6, d=16, n=12, num_experts=4),
    large=ExpertsCase("large", tokens=9, d=16, n=12, num_experts=4),
    by_device={
        "cpu": variants(ExpertsCase(""), {"256": {}, "fine": {"num_experts": 32, "n": 32, "k": 8}}),
        "gpu": variants(
            ExpertsCase("", dtype="bfloat16"),
            {
                "24k_1536x256_128_top8": {"tokens": 24576, "d": 1536, "n": 256, "num_experts": 128, "k": 8},
                "32k_4096x512_128_top8": {"tokens": 32768, "d": 4096, "n": 512, "num_experts": 128, "k": 8},
                "32k_4096x2048_64_top4": {"tokens": 32768, "d": 4096, "n": 2048, "num_experts": 64, "k": 4},
                "16k_2048x768_64_top8": {"tokens": 16384, "d": 2048, "n": 768, "num_experts": 64, "k": 8},
                "mixtral_8k": {"tokens": 8192, "d": 4096, "n": 14336, "num_experts": 8, "k": 2},
                "decode_64": {"tokens": 64, "d": 2048, "n": 768, "num_experts": 128, "k": 8},
            },
        ),
    },
    options=variants(
        ExpertsCase("", dtype="bfloat16", tokens=64),
        {"float32": {"dtype": "float32"}, "bfloat16": {}, "float16": {"dtype": "float16"}}
        | {f"`{name}`": {"activation": name} for name in (*ACTIVATIONS, SWIGLU_OAI)}
        | {"`biases`": {"biases": True}, "`capacity`": {"capacity": 2}},
    ),
    brief={"tokens": 16, "d": 128, "n": 128},
)
"""Layers of SonicMoE's figures (arXiv 2512.14080), of the training-step benchmark, and of Mixtral and Qwen3-MoE."""
