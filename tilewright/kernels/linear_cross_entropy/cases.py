"""Named calls of the vocabulary losses, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.linear_cross_entropy.inputs import Reduction
from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class VocabularyCase(Case):
    """The sizes and options of one call of any of the losses.

    Attributes:
      leading: dimensions of the tokens before the last.
      scale: standard deviation of the logits.
    """

    tokens: int = 1024
    d: int = 256
    vocab: int = 8192
    leading: tuple[int, ...] = ()
    vocab_first: bool = False
    token_weights: bool = False
    logits_soft_cap: float | None = None
    reduction: Reduction = "mean"
    scale: float = 1.0

    @property
    def token_shape(self) -> tuple[int, ...]:
        return (*self.leading, self.tokens)

    def head(self, random: np.random.Generator, d: int, weight_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The vectors of the tokens and their matrix."""
        x = normal(random, (*self.token_shape, d), self.dtype)
        shape = (self.vocab, d) if self.vocab_first else (d, self.vocab)
        return x, (self.scale / max(d, 1) ** 0.5 * normal(random, shape, "float32")).astype(weight_dtype)

    def options(self, random: np.random.Generator, *more: str) -> dict[str, Any]:
        """The keyword arguments of any of the losses, and more of them by name."""
        found = {name: getattr(self, name) for name in ("vocab_first", "logits_soft_cap", "reduction", *more)}
        if self.token_weights:
            found["token_weights"] = jnp.asarray(random.uniform(0.0, 2.0, self.token_shape), jnp.float32)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class LinearCrossEntropyCase(VocabularyCase):
    """A call of ``linear_cross_entropy``; ``ignored`` is the share of tokens that are ignored."""

    weight_dtype: str | None = None
    bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    return_lse: bool = False
    gradient_epsilon: float | None = None
    ignored: float = 0.0

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        x, weight = self.head(random, self.d, self.weight_dtype or self.dtype)
        labels = random.integers(0, self.vocab, self.token_shape)
        labels = jnp.asarray(np.where(random.random(self.token_shape) < self.ignored, -100, labels), jnp.int32)
        bias = {"bias": normal(random, (self.vocab,), self.weight_dtype or self.dtype)} if self.bias else {}
        options = self.options(random, "label_smoothing", "z_loss", "return_lse", "gradient_epsilon")
        return (x, weight, labels), options | bias


@dataclasses.dataclass(frozen=True, slots=True)
class LinearKlDivergenceCase(VocabularyCase):
    """A call of ``linear_kl_divergence``; ``teacher_d`` is d if it is ``None``."""

    teacher_d: int | None = None
    temperature: float = 1.0

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        student = self.head(random, self.d, self.dtype)
        teacher = self.head(random, self.d if self.teacher_d is None else self.teacher_d, self.dtype)
        return (*student, *teacher), self.options(random, "temperature")


def dense(case: LinearCrossEntropyCase) -> Peer | str:
    """The logits in memory, and ``jax.nn.log_softmax``; or the reason why that cannot do the case."""
    if case.label_smoothing or case.z_loss or case.logits_soft_cap or case.return_lse or case.gradient_epsilon:
        return "plain cross-entropy alone"

    def cross_entropy(
        x: jax.Array, weight: jax.Array, labels: jax.Array, *, vocab_first: bool, reduction: str,
        bias: jax.Array | None = None, token_weights: jax.Array | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        logits = jnp.matmul(x, weight.T if vocab_first else weight, preferred_element_type=jnp.float32)
        logits = logits if bias is None else logits + bias
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        valid = labels >= 0
        losses = -jnp.take_along_axis(log_probs, jnp.where(valid, labels, 0)[..., None], -1)[..., 0]
        weights = valid if token_weights is None else jnp.where(valid, token_weights, 0)
        losses = losses * weights
        if reduction == "none":
            return losses
        return losses.sum() / jnp.where(reduction == "mean", weights.sum(), 1)

    return cross_entropy


type _Fields = dict[str, dict[str, Any]]


def _cases[C: VocabularyCase](base: C, cpu: _Fields, gpu: _Fields, options: _Fields, **others: Any) -> OpCases[C]:
    small = dataclasses.replace(base, name="small", leading=(2,), tokens=5, d=24, vocab=24)
    dtypes: _Fields = {"float32": {"dtype": "float32"}, "bfloat16": {}, "float16": {"dtype": "float16"}}
    return OpCases(
        shape=("tokens", "d", "vocab"),
        small=small,
        large=dataclasses.replace(small, name="large", tokens=7),
        by_device={"cpu": variants(base, cpu), "gpu": variants(dataclasses.replace(base, dtype="bfloat16"), gpu)},
        options=variants(dataclasses.replace(base, tokens=256, d=128, vocab=1024, dtype="bfloat16"), dtypes | options),
        brief={"tokens": 16, "d": 16, "vocab": 64},
        **others,
    )


CASES = _cases(
    LinearCrossEntropyCase(""),
    {"8k": {}, "32k": {"tokens": 4096, "d": 512, "vocab": 32768}, "half": {"ignored": 0.5}},
    {
        "8k_128k": {"tokens": 8192, "d": 4096, "vocab": 131072},
        "32k_128k": {"tokens": 32768, "d": 2560, "vocab": 128256},
        "16k_257k": {"tokens": 16384, "d": 2304, "vocab": 256000, "vocab_first": True},
    },
    {
        "bfloat16 with weight in float32": {"weight_dtype": "float32"},
        "`vocab_first`": {"vocab_first": True},
        "`bias`": {"bias": True},
        "`token_weights`": {"token_weights": True},
        "`label_smoothing`": {"label_smoothing": 0.1},
        "`z_loss`": {"z_loss": 1e-4},
        "`logits_soft_cap`": {"logits_soft_cap": 30.0},
        '`reduction="none"`': {"reduction": "none"},
        "`return_lse`": {"return_lse": True},
        "`gradient_epsilon`": {"gradient_epsilon": 1e-6},
        "a vocabulary of no multiple of 8": {"vocab": 1021},
    },
    peers={"logits in memory": dense},
)

KL_CASES = _cases(
    LinearKlDivergenceCase(""),
    {"8k": {}},
    {"8k_128k": {"tokens": 8192, "d": 2048, "teacher_d": 4096, "vocab": 131072}},
    {
        "a teacher of another width": {"teacher_d": 256},
        "`temperature`": {"temperature": 2.0},
        "`vocab_first`": {"vocab_first": True},
        "`token_weights`": {"token_weights": True},
        "`logits_soft_cap`": {"logits_soft_cap": 30.0},
        '`reduction="none"`': {"reduction": "none"},
    },
)
