"""Named calls of the functions that draw tokens, for tests, tuning and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class DrawingCase(Case):
    """The options that all functions share; each row has a key."""

    temperature: float = 1.0

    def keys(self, random: np.random.Generator, rows: int) -> jax.Array:
        return jnp.asarray(random.integers(0, 1 << 32, (rows, 2), np.uint32))


@dataclasses.dataclass(frozen=True, slots=True)
class SampleCase(DrawingCase):
    """A call of ``sample``.

    Attributes:
      scale: standard deviation of the logits.
    """

    rows: int = 64
    vocab: int = 4096
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    return_log_probs: bool = False
    scale: float = 2.0

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        logits = (self.scale * normal(random, (self.rows, self.vocab), "float32")).astype(self.dtype)
        names = ("temperature", "top_k", "top_p", "min_p", "return_log_probs")
        return (logits, self.keys(random, self.rows)), {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class LinearSampleCase(DrawingCase):
    """A call of ``linear_sample``.

    Attributes:
      scale: standard deviation of the logits.
    """

    rows: int = 64
    d: int = 256
    vocab: int = 4096
    vocab_first: bool = False
    bias: bool = False
    logits_soft_cap: float | None = None
    scale: float = 2.0

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        x = normal(random, (self.rows, self.d), self.dtype)
        shape = (self.vocab, self.d) if self.vocab_first else (self.d, self.vocab)
        weight = (self.scale / max(self.d, 1) ** 0.5 * normal(random, shape, "float32")).astype(self.dtype)
        bias = {"bias": normal(random, (self.vocab,), self.dtype)} if self.bias else {}
        names = ("temperature", "vocab_first", "logits_soft_cap")
        return (x, weight, self.keys(random, self.rows)), {name: getattr(self, name) for name in names} | bias


def categorical(case: SampleCase) -> Peer | str:
    """``jax.random.categorical``, or the reason why it cannot do the case."""
    if (case.top_k, case.top_p, case.min_p) != (None, None, None) or case.return_log_probs or not case.temperature:
        return "draws from all tokens, without a log-probability"

    def draw(logits: jax.Array, key: jax.Array, *, temperature: float, **_: object) -> jax.Array:
        return jax.vmap(jax.random.categorical)(jax.random.wrap_key_data(key), logits / temperature)

    return draw


CASES = OpCases(
    shape=("rows", "vocab"),
    small=SampleCase("small", rows=6, vocab=200, temperature=0.7),
    large=SampleCase("large", rows=9, vocab=200, temperature=0.7),
    by_device={
        "cpu": variants(SampleCase(""), {"4k": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}}),
        "gpu": variants(
            SampleCase("", vocab=131072, scale=4.0),
            {
                "all": {},
                "top_k": {"top_k": 50},
                "top_k_top_p": {"top_k": 50, "top_p": 0.9},
                "top_p": {"top_p": 0.9},
                "min_p": {"min_p": 0.05},
                "one_row": {"rows": 1, "top_k": 50, "top_p": 0.9},
                "bfloat16": {"top_k": 50, "top_p": 0.9, "dtype": "bfloat16"},
            },
        ),
    },
    options=variants(
        SampleCase("", rows=4, vocab=200),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "`temperature`": {"temperature": 0.25},
            "`top_k`": {"top_k": 3},
            "`top_p`": {"top_p": 0.25},
            "`min_p`": {"min_p": 0.5},
            "`return_log_probs`": {"return_log_probs": True},
        },
    ),
    peers={"jax.random.categorical": categorical},
    brief={"rows": 4, "vocab": 200},
)


def logits_in_memory(case: LinearSampleCase) -> Peer | str:
    """``jax.random.categorical`` of logits in memory, or the reason why it cannot do the case."""
    if case.logits_soft_cap or case.bias or not case.temperature:
        return "a plain matmul, and a temperature above 0"

    def draw(
        x: jax.Array, weight: jax.Array, key: jax.Array, *, temperature: float, vocab_first: bool, **_: object
    ) -> tuple[jax.Array, jax.Array]:
        logits = jnp.matmul(x, weight.T if vocab_first else weight, preferred_element_type=jnp.float32) / temperature
        tokens = jax.vmap(jax.random.categorical)(jax.random.wrap_key_data(key), logits)
        return tokens, jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], -1)[:, 0]

    return draw


LINEAR_CASES = OpCases(
    shape=("rows", "d", "vocab"),
    small=LinearSampleCase("small", rows=6, d=24, vocab=24, temperature=0.7),
    large=LinearSampleCase("large", rows=9, d=24, vocab=24, temperature=0.7),
    by_device={
        "cpu": variants(LinearSampleCase(""), {"4k": {}, "32k": {"vocab": 32768}}),
        "gpu": variants(
            LinearSampleCase("", d=4096, vocab=128256, dtype="bfloat16"),
            {
                "llama": {},
                "one_row": {"rows": 1},
                "512_rows": {"rows": 512},
                "qwen": {"d": 2048, "vocab": 151936, "vocab_first": True},
                "gemma": {"d": 2304, "vocab": 256000, "vocab_first": True, "logits_soft_cap": 30.0},
            },
        ),
    },
    options=variants(
        LinearSampleCase("", rows=4, d=64, vocab=256, dtype="bfloat16"),
        {
            "float32": {"dtype": "float32"},
            "bfloat16, float16": {},
            "`temperature`": {"temperature": 0.25},
            "`vocab_first`": {"vocab_first": True},
            "`bias`": {"bias": True},
            "`logits_soft_cap`": {"logits_soft_cap": 1.0},
        },
    ),
    peers={"logits in memory": logits_in_memory},
    brief={"rows": 4, "d": 16, "vocab": 200},
)
