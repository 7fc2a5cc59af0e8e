"""Named calls of flash attention, for tests, tuning and benchmarks."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention.arguments import CausalAlignment
from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants

MAX_SEQUENCES = 4
"""Sequences in a packed case, and segments in a segmented one."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      bias, mask: the dimensions of "bhqk" that the array has, such as "hqk"; None for no array.
      bias_dtype: the bias's dtype, the query's if ``None``.
      position_bias: a bias that is computed from positions, in the place of ``bias``; "relative of all heads" has one
        row of values for all of them.
      sinks: extra logits per head.
      segments, lengths: True if the batch has segment ids, or per-element lengths.
      packed: True if the row holds several sequences laid end to end, with a rest that belongs to none.
    """

    batch: int = 1
    q_length: int = 1024
    kv_length: int | None = None
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    sliding_window: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    position_bias: Literal["alibi", "relative", "relative of all heads"] | None = None
    mask: str | None = None
    sinks: int = 0
    segments: bool = False
    lengths: bool = False
    packed: bool = False
    dropout_prob: float = 0.0
    return_lse: bool = False

    def __post_init__(self) -> None:
        if self.packed and (self.batch != 1 or self.segments or self.lengths):
            raise ValueError(
                f"{self.packed=} wants one row of its own, got {self.batch=}, {self.segments=}, {self.lengths=}"
            )
        if self.position_bias is not None and self.bias is not None:
            raise ValueError(f"a call has one bias, got {self.bias=}, {self.position_bias=}")
        if not set(self.bias or "") | set(self.mask or "") <= set("bhqk"):
            raise ValueError(f"an array has dimensions of 'bhqk', such as 'hqk', got {self.bias=}, {self.mask=}")

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        kv_length = self.q_length if self.kv_length is None else self.kv_length
        return self.batch, self.heads, self.q_length, kv_length

    @property
    def tolerance_factor(self) -> float:
        """The allowed error of a backend as a multiple of the oracle's error in the input dtype."""
        return 2.0 if self.logits_soft_cap is None else 3.0

    def arguments(self, seed: int = 0) -> Arguments:
        """Makes ``(query, key, value)`` and the keywords of ``flash_attention``; a tenth of a mask is False."""
        random = np.random.default_rng(seed)
        batch, heads, q_length, kv_length = self.score_shape
        kv_heads = self.kv_heads or heads
        shapes = [
            (batch, q_length, heads, self.head_dim),
            (batch, kv_length, kv_heads, self.head_dim),
            (batch, kv_length, kv_heads, self.value_dim or self.head_dim),
        ]
        arrays = tuple(normal(random, shape, self.dtype) for shape in shapes)
        kwargs: dict[str, Any] = {}
        # An option that is not named here is not passed on.
        for field in ("causal", "causal_alignment", "sliding_window", "logits_soft_cap", "softmax_scale", "return_lse"):
            if getattr(self, field) != getattr(AttentionCase("default"), field):
                kwargs[field] = getattr(self, field)
        if self.bias is not None:
            kwargs["bias"] = normal(random, self._partial_shape(self.bias), self.bias_dtype or self.dtype)
        if self.position_bias is not None:
            kwargs["bias"] = self._position_bias(random)
        if self.mask is not None:
            kwargs["mask"] = jnp.asarray(random.random(self._partial_shape(self.mask)) < 0.9)
        if self.sinks:
            kwargs["softmax_aux"] = normal(random, (heads, self.sinks), self.dtype)
        if self.segments:
            kwargs["q_segment_ids"], kwargs["kv_segment_ids"] = self._segment_ids(random)
        if self.lengths:
            kwargs["query_seq_lengths"] = jnp.asarray(random.integers(0, q_length + 1, batch), jnp.int32)
            kwargs["key_value_seq_lengths"] = jnp.asarray(random.integers(0, kv_length + 1, batch), jnp.int32)
        if self.packed:
            kwargs["cum_seqlens_q"] = _boundaries(random, q_length)
            self_attention = q_length == kv_length
            kwargs["cum_seqlens_k"] = kwargs["cum_seqlens_q"] if self_attention else _boundaries(random, kv_length)
        if self.dropout_prob:
            kwargs["dropout_prob"] = self.dropout_prob
            kwargs["dropout_seed"] = int(random.integers(1 << 62))
        return arrays, kwargs

    def _partial_shape(self, dimensions: str) -> tuple[int, ...]:
        return tuple(size if name in dimensions else 1 for name, size in zip("bhqk", self.score_shape, strict=True))

    def _position_bias(self, random: np.random.Generator) -> AlibiBias | RelativeBias:
        """Slopes of both signs, such that a bias goes to about 8; normal values."""
        dtype, (_, heads, q_length, kv_length) = self.bias_dtype or self.dtype, self.score_shape
        if self.position_bias == "alibi":
            slopes = random.standard_normal(heads) * 8 / max(q_length, kv_length, 1)
            return AlibiBias(jnp.asarray(slopes, jnp.dtype(dtype)))
        rows = heads if self.position_bias == "relative" else 1
        return RelativeBias(normal(random, (rows, max(q_length + kv_length - 1, 0)), dtype))

    def _segment_ids(self, random: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        cuts = np.sort(random.random((self.batch, MAX_SEQUENCES - 1, 1)), axis=1)
        rows, columns = ((np.arange(length) >= np.round(cuts * length)).sum(1) for length in self.score_shape[2:])
        return jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)


def _boundaries(random: np.random.Generator, length: int) -> jax.Array:
    """Boundaries of sequences that leave up to an eighth of the row unassigned."""
    covered = length - int(random.integers(math.ceil(length / 8) + 1)) if length else 0
    inner = np.sort(random.integers(0, covered + 1, MAX_SEQUENCES - 1))
    return jnp.asarray([0, *inner, covered], jnp.int32)


def _named(*cases: AttentionCase) -> dict[str, AttentionCase]:
    return {case.name: case for case in cases}


CPU_CASES = _named(
    AttentionCase("causal_4k", q_length=4096, causal=True),
    AttentionCase("full_4k", q_length=4096),
    AttentionCase("causal_16k", q_length=16384, causal=True),
    AttentionCase("causal_gqa_window_4k", q_length=4096, kv_heads=2, causal=True, sliding_window=511),
    AttentionCase("causal_bfloat16_2k", q_length=2048, dtype="bfloat16", causal=True),
    AttentionCase("causal_soft_cap_2k", q_length=2048, causal=True, logits_soft_cap=30.0),
    AttentionCase("bias_2k", q_length=2048, bias="hqk"),
    AttentionCase("padded_2k", batch=2, q_length=2048, lengths=True),
    AttentionCase("packed_4k", q_length=4096, packed=True, causal=True),
    AttentionCase("causal_short", batch=8, q_length=256, causal=True),
    AttentionCase("decode", batch=8, q_length=1, kv_length=2048, kv_heads=2),
)
"""The cases that a benchmark runs on a CPU, each in seconds."""


def _hopper(name: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> AttentionCase:
    return AttentionCase(
        name,
        batch=batch,
        q_length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
        causal=name.startswith("causal"),
    )


HOPPER_CASES = _named(
    _hopper("full_4k_d128", 4, 4096, 16, 16, 128),
    _hopper("causal_4k_d128", 4, 4096, 16, 16, 128),
    _hopper("causal_16k_d128", 1, 16384, 16, 16, 128),
    _hopper("full_16k_d128", 1, 16384, 16, 16, 128),
    _hopper("causal_gqa_8k_d128", 2, 8192, 32, 8, 128),
    _hopper("causal_1k_d128", 16, 1024, 16, 16, 128),
    _hopper("full_4k_d64", 4, 4096, 32, 32, 64),
    _hopper("causal_4k_d64", 4, 4096, 32, 32, 64),
    _hopper("causal_4k_d256", 4, 4096, 8, 8, 256),
)
"""The cases measured on a Hopper GPU, each against its fastest peers."""

# The fields of a case that jax.nn.dot_product_attention supports, and its names for them.
_EXPRESSIBLE = {
    "name", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "dtype", "causal", "sliding_window",
    "softmax_scale", "bias", "mask", "lengths",
}  # fmt: skip
_RENAMED = {"causal": "is_causal", "softmax_scale": "scale", "sliding_window": "local_window_size"}


def jax_attention(case: AttentionCase) -> Peer | str:
    """``jax.nn.dot_product_attention`` with our argument names, or the reason why it cannot run the case."""
    changed = [
        field.name
        for field in dataclasses.fields(case)
        if field.name not in _EXPRESSIBLE and getattr(case, field.name) != field.default
    ]
    if changed:
        return f"jax.nn.dot_product_attention has no {', '.join(changed)}"
    window = case.sliding_window
    if isinstance(window, tuple) and None in window:
        return "jax.nn.dot_product_attention has no window that is open to one side"

    def attention(*args: Any, **kwargs: Any) -> Any:
        renamed = {_RENAMED.get(name, name): value for name, value in kwargs.items()}
        if isinstance(window, int):  # with causal our int window looks back only; JAX's always looks both ways
            renamed["local_window_size"] = (window, 0 if case.causal else window)
        return jax.nn.dot_product_attention(*args, **renamed)

    return attention


_SMALL = AttentionCase("small", batch=2, q_length=128, heads=4, kv_heads=2, head_dim=64, causal=True)
# A dtype and size that models use: some backends support nothing else.
_OPTION = AttentionCase("", batch=2, q_length=256, heads=4, dtype="bfloat16")

CASES = OpCases(
    shape=("batch", "q_length", "heads", "head_dim"),
    small=_SMALL,
    large=dataclasses.replace(_SMALL, name="large", batch=3, q_length=200),
    by_device={"cpu": CPU_CASES, "gpu": HOPPER_CASES},
    options=variants(
        _OPTION,
        {
            "float32": {"dtype": "float32"},
            "bfloat16": {},
            "float16": {"dtype": "float16"},
            "GQA, MQA": {"kv_heads": 1},
            "head_dim 80": {"head_dim": 80},
            "head_dim 256": {"head_dim": 256},
            "head_dim 512": {"head_dim": 512},
            "value head_dim of its own": {"value_dim": 128},
            "key length of its own": {"kv_length": 384},
            "`causal`": {"causal": True},
            '`causal_alignment="bottom_right"`': {
                "causal": True, "causal_alignment": "bottom_right", "kv_length": 384
            },
            "`sliding_window`": {"causal": True, "sliding_window": 64},
            "`mask`, an array": {"mask": "bqk"},
            "`bias`": {"bias": "hqk", "bias_dtype": "float32"},
            "`bias` of the query's dtype": {"bias": "hqk"},
            "`AlibiBias`": {"position_bias": "alibi", "bias_dtype": "float32", "causal": True},
            "`RelativeBias`": {"position_bias": "relative", "bias_dtype": "float32"},
            "`logits_soft_cap`": {"logits_soft_cap": 30.0},
            "`softmax_aux` (sinks)": {"sinks": 1},
            "segment ids": {"segments": True},
            "sequence lengths": {"lengths": True},
            "packed sequences": {"packed": True, "batch": 1},
            "`dropout_prob`": {"dropout_prob": 0.1},
            "`return_lse`": {"return_lse": True},
        },
    ),
    peers={"jax.nn.dot_product_attention": jax_attention},
    brief={"batch": 1, "q_length": 128, "kv_length": 128},
)  # fmt: skip
