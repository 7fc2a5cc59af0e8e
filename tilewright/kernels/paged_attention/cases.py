"""The shared cases of all serving ops: sizes and options, from which each op's class makes its arguments."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Case, OpCases, normal, variants
from tilewright.kernels.paged_attention.latent_rows import LATENT_DIM, quantize_latents

MAX_HOST_SHARE = 1 << 22
"""Elements up to which an array is drawn on the host, where nothing must be compiled first."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingCase(Case, abc.ABC):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      kv_length: the capacity of a sequence in tokens; the length of a full sequence.
      kv_dtype: dtype of the cache, the query's if ``None``.
      scale: the granularity of scales: "tensor", "head", "page" or "token"; ``None`` for no scales.
      ragged: draw lengths from 0 to ``kv_length``; otherwise all sequences are full.
      q_lengths: new tokens of each sequence, repeated over the sequences, for ops that take several.
    """

    sequences: int = 4
    kv_length: int = 512
    heads: int = 8
    head_dim: int = 64
    kv_heads: int | None = None
    value_dim: int | None = None
    page_size: int = 16
    kv_dtype: str | None = None
    scale: str | None = None
    ragged: bool = True
    q_lengths: tuple[int, ...] = (1,)
    causal: bool = True
    sliding_window: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    sinks: int = 0
    alibi: bool = False
    return_lse: bool = False

    @property
    def tolerance_factor(self) -> float:
        """The allowed error of a backend as a multiple of the oracle's error in the input dtype."""
        return 2.0 if self.logits_soft_cap is None else 3.0

    @property
    def flops(self) -> float:
        """FLOPs if all sequences are full and every query sees all keys before it."""
        counts = [self.q_lengths[s % len(self.q_lengths)] for s in range(self.sequences)]
        scores = sum(n * self.kv_length - n * (n - 1) / 2 for n in counts)
        return 2.0 * scores * self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    def drawn(self, seed: int) -> "Drawn":
        """The random arrays of a call."""
        return Drawn(self, np.random.default_rng(seed))

    def options(self, drawn: "Drawn") -> dict[str, Any]:
        """The keyword arguments that most of the ops share, if they are not the default."""
        given: dict[str, Any] = {}
        for field in ("sliding_window", "logits_soft_cap", "softmax_scale", "return_lse"):
            value = getattr(self, field)
            if value is not None and value is not False:  # 0 is a value
                given[field] = value
        if self.sinks:
            given["softmax_aux"] = drawn.normal((self.heads, self.sinks), self.dtype)
        if self.alibi:
            given["alibi_slopes"] = jnp.asarray(2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads), jnp.float32)
        return given

    def scales(self, cache: "DrawnCache") -> dict[str, Any]:
        return {} if self.scale is None else {"key_scale": cache.key_scale, "value_scale": cache.value_scale}


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCase(ServingCase, abc.ABC):
    """A call over latents; ``value_dim`` is their rank, and with ``rows`` they are bytes in FlashMLA's format."""

    kv_heads: int | None = 1
    rows: bool = False

    def latents(self, drawn: "Drawn") -> tuple[jax.Array, dict[str, Any]]:
        """Pages of latents, and their scale if they have one."""
        if self.rows:
            shape = (drawn.num_pages, self.page_size, drawn.kv_heads, LATENT_DIM)
            return quantize_latents(drawn.normal(shape, self.dtype)), {}
        cache = drawn.pages()
        return cache.key, {} if cache.key_scale is None else {"scale": cache.key_scale}


@dataclasses.dataclass(frozen=True)
class DrawnCache:
    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None
    value_scale: jax.Array | None


class Drawn:
    """Random arrays of a case, each drawn when it is requested."""

    def __init__(self, case: ServingCase, generator: np.random.Generator) -> None:
        self.case, self.generator = case, generator
        self.kv_heads = case.kv_heads or case.heads
        self.columns = math.ceil(case.kv_length / case.page_size)
        self.counts = np.array([case.q_lengths[s % len(case.q_lengths)] for s in range(case.sequences)], np.int64)

    def normal(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        if math.prod(shape) <= MAX_HOST_SHARE:
            return normal(self.generator, shape, dtype)
        key = jax.random.key(int(self.generator.integers(0, 1 << 31)))
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)

    def query(self, *leading: int) -> jax.Array:
        return self.normal(
            (*(leading or (int(self.counts.sum()),)), self.case.heads, self.case.head_dim), self.case.dtype
        )

    def boundaries(self) -> jax.Array:
        return jnp.asarray(np.append(0, np.cumsum(self.counts)), jnp.int32)

    def lengths(self) -> jax.Array:
        """Lengths of at least the new tokens, if there is room for them."""
        return jnp.asarray(self._lengths(), jnp.int32)

    def _lengths(self) -> np.ndarray[Any, Any]:
        full = np.full(self.case.sequences, self.case.kv_length)
        if self.case.ragged:
            full = np.maximum(self.generator.integers(0, self.case.kv_length + 1, self.case.sequences), self.counts)
        return np.minimum(full, self.case.kv_length)

    def ranges(self) -> tuple[jax.Array, jax.Array]:
        """Starts and ends of ranges; the starts are 0 if all sequences are full."""
        ends = self._lengths()
        starts = self.generator.integers(0, ends + 1) if self.case.ragged else np.zeros_like(ends)
        return jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32)

    def new(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the new tokens."""
        tokens, dims = int(self.counts.sum()), (self.case.head_dim, self.case.value_dim or self.case.head_dim)
        key, value = (self.normal((tokens, self.kv_heads, dim), self.case.dtype) for dim in dims)
        return key, value

    def tree_mask(self) -> jax.Array:
        """Bits of trees, in which each new token has a random earlier one of its sequence as its parent, or none."""
        most = max(int(self.counts.max(initial=0)), 1)
        seen = np.zeros((int(self.counts.sum()), 32 * math.ceil(most / 32)), bool)
        for first, count in zip(np.cumsum(self.counts) - self.counts, self.counts, strict=True):
            for index in range(count):
                parent = self.generator.integers(-1, index)
                if parent >= 0:
                    seen[first + index] = seen[first + parent]
                seen[first + index, index] = True
        words = np.packbits(seen, axis=1, bitorder="little").view("<u4")
        return jnp.asarray(words.astype(np.uint32))

    def table(self) -> jax.Array:
        """A page table with every page once, in random order."""
        order = self.generator.permutation(self.num_pages)[: self.case.sequences * self.columns]
        return jnp.asarray(order.reshape(self.case.sequences, self.columns), jnp.int32)

    @property
    def num_pages(self) -> int:
        return max(self.case.sequences * self.columns, 1)

    def pages(self) -> DrawnCache:
        return self._cache(self.num_pages, self.case.page_size)

    def dense(self) -> DrawnCache:
        return self._cache(self.case.sequences, self.case.kv_length)

    def _cache(self, rows: int, size: int) -> DrawnCache:
        case = self.case
        dims = (case.head_dim, case.value_dim or case.head_dim)
        key, value = (self._stored((rows, size, self.kv_heads, dim)) for dim in dims)
        key_scale, value_scale = (self._scale(rows, size) for _ in range(2))
        return DrawnCache(key, value, key_scale, value_scale)

    def _stored(self, shape: tuple[int, ...]) -> jax.Array:
        dtype = self.case.kv_dtype or self.case.dtype
        if dtype == "int8" and math.prod(shape) <= MAX_HOST_SHARE:
            return jnp.asarray(self.generator.integers(-127, 128, shape, np.int8))
        if dtype == "int8":
            key = jax.random.key(int(self.generator.integers(0, 1 << 31)))
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return self.normal(shape, dtype)

    def _scale(self, rows: int, size: int) -> jax.Array | None:
        shapes = {
            None: None,
            "tensor": (1, 1, 1),
            "head": (1, 1, self.kv_heads),
            "page": (rows, 1, self.kv_heads),
            "token": (rows, size, self.kv_heads),
        }
        shape = shapes[self.case.scale]
        if shape is None:
            return None
        small = 1 / 64 if self.case.kv_dtype == "int8" else 1.0
        return jnp.asarray(self.generator.uniform(0.5 * small, 2 * small, shape), jnp.float32)


_CPU = {"heads": 8, "kv_heads": 2, "head_dim": 64}
_CPU_SIZES: Mapping[str, Mapping[str, Any]] = {
    "batch_8": {"sequences": 8, "kv_length": 1024, **_CPU},
    "batch_8_int8": {"sequences": 8, "kv_length": 1024, "kv_dtype": "int8", "scale": "token", **_CPU},
    "long": {"sequences": 1, "kv_length": 8192, "ragged": False, **_CPU},
    "window": {"sequences": 8, "kv_length": 1024, "sliding_window": 127, **_CPU},
}
_GPU = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "ragged": False}
_GPU_SIZES: Mapping[str, Mapping[str, Any]] = {
    "64x8192": {"sequences": 64, "kv_length": 8192, **_GPU},
    "64x8192_page64": {"sequences": 64, "kv_length": 8192, "page_size": 64, **_GPU},
    "8x32768": {"sequences": 8, "kv_length": 32768, **_GPU},
    "1x131072": {"sequences": 1, "kv_length": 131072, **_GPU},
    "256x1024": {"sequences": 256, "kv_length": 1024, **_GPU},
    "64x8192_int8": {"sequences": 64, "kv_length": 8192, "kv_dtype": "int8", "scale": "token", **_GPU},
    "64x8192_fp8": {"sequences": 64, "kv_length": 8192, "kv_dtype": "float8_e4m3fn", "scale": "head", **_GPU},
}
_SMALL = {"sequences": 2, "kv_length": 64, "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
_LARGE = {"sequences": 5, "kv_length": 256}

STORED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "int8, a scale for each token": {"kv_dtype": "int8", "scale": "token"},
    "int8, a scale for each page": {"kv_dtype": "int8", "scale": "page"},
    "float8_e4m3fn": {"kv_dtype": "float8_e4m3fn", "scale": "head"},
    "float8_e5m2": {"kv_dtype": "float8_e5m2"},
    "pages of 1": {"page_size": 1},
}
"""Rows of the capability table of every op with pages: how they are stored."""

CACHE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **STORED_OPTIONS,
    "pages of 256": {"page_size": 256},
    "`sliding_window`": {"sliding_window": 15},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    "`softmax_aux` (sinks)": {"sinks": 1},
    "`alibi_slopes`": {"alibi": True},
    "`return_lse`": {"return_lse": True},
}
"""Rows of the capability table of every op over a cache."""

LATENT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "pages of 16": {"page_size": 16},
    "uint8 rows of `quantize_latents`": {"rows": True},
}
"""Further rows of the ops over latents."""


def serving_cases[C: ServingCase](
    kind: type[C],
    *,
    packed: bool = False,
    cpu: Mapping[str, Mapping[str, Any]] = _CPU_SIZES,
    gpu: Mapping[str, Mapping[str, Any]] = _GPU_SIZES,
    small: Mapping[str, Any] = _SMALL,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> OpCases[C]:
    """The cases of an op over a cache.

    Args:
      packed: the sequences have one or several new tokens.
      options: the rows of the op's capability table. Most ops over pages have none: they pose the same problem to the
        same backends as an op with a table, by another argument list.
    """

    def of(name: str, q_lengths: tuple[int, ...], fields: Mapping[str, Any]) -> C:
        case = kind(name=name, **fields)
        return dataclasses.replace(case, q_lengths=q_lengths) if packed else case

    return OpCases(
        shape=("sequences", "kv_length", "heads", "head_dim"),
        small=of("small", (1, 5), small),
        large=of("large", (1, 5, 3, 2, 2), {**small, **_LARGE}),
        by_device={
            "cpu": variants(of("", (1, 1, 1, 128), {}), cpu),
            "gpu": variants(of("", (*(1,) * 15, 512), {}), gpu),
        },
        options=variants(kind(name="", sequences=2, kv_length=64, kv_heads=8, dtype="bfloat16"), options or {}),
        brief={"sequences": 1, "kv_length": 128},
    )
