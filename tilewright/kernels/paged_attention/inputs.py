"""The inputs of every serving backend: packed queries, a cache in pages, static options."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Array, Float, Integer, Num

FAR = 1 << 29
"""A bound beyond every position: windows, lengths and starts are clipped to it, so that sums of three fit int32."""

ELSEWHERE = -(1 << 31)
"""A page number in the table of one of several devices: the page is another's, so that its absence is no fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedOptions:
    """The options of a call that are static values, not arrays.

    Attributes:
      left, right: keys visible before and after the query's position, ``None`` for all; causality is part of ``right``.
      q_length: query tokens of every sequence, if all have the same number; ``None`` if ``cum_q_lens`` has them.
      latent_dim: number of leading elements of a key that are the value, if keys and values are one array.
    """

    softmax_scale: float
    left: int | None = None
    right: int | None = 0
    logits_soft_cap: float | None = None
    q_length: int | None = 1
    latent_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class PagedInputs:
    """A call after ``prepare``; shapes and dtypes are checked, the arrays' values are not.

    Without ``page_table`` sequence ``s`` has page ``s`` alone. Without ``value`` the keys contain the values
    (``options.latent_dim``). ``kv_starts`` are the first visible positions.
    """

    query: Float[Array, "tokens heads head_dim"]
    key: Num[Array, "num_pages page_size kv_heads head_dim"]
    value: Num[Array, "num_pages page_size kv_heads value_dim"] | None
    page_table: Integer[Array, "sequences pages_per_sequence"] | None
    kv_lengths: Integer[Array, " sequences"]
    kv_starts: Integer[Array, " sequences"] | None
    cum_q_lens: Integer[Array, " sequences+1"] | None
    key_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None
    value_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None
    alibi_slopes: Float[Array, " heads"] | None
    softmax_aux: Float[Array, "heads sinks"] | None
    options: PagedOptions

    @property
    def sequences(self) -> int:
        return self.kv_lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.key.shape[1]

    @property
    def capacity(self) -> int:
        """The capacity of a sequence in tokens."""
        return self.page_size * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[2]

    @property
    def value_dim(self) -> int:
        if self.value is not None:
            return self.value.shape[3]
        return self.key.shape[3] if self.options.latent_dim is None else self.options.latent_dim

    @property
    def is_empty(self) -> bool:
        """True if there is no query, or no key whatever the arrays hold."""
        return 0 in (*self.query.shape, *self.key.shape, self.sequences, self.capacity, self.value_dim)


jax.tree_util.register_dataclass(
    PagedInputs,
    data_fields=[
        "query", "key", "value", "page_table", "kv_lengths", "kv_starts", "cum_q_lens", "key_scale", "value_scale",
        "alibi_slopes", "softmax_aux",
    ],
    meta_fields=["options"],
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class PagedProblem:
    """The sizes of one call, for support reasons and params.

    Attributes:
      paged: True if there is a page table.
      kv_bytes: bytes of one token's keys, values and scales, of all heads.
      packed: True if sequences have different numbers of query tokens.
    """

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    num_pages: int
    page_size: int
    capacity: int
    paged: bool
    packed: bool
    starts: bool
    dtype: Any
    kv_dtype: Any
    kv_bytes: int
    scale_shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    alibi: bool
    sinks: int
    options: PagedOptions

    @property
    def scales_constant_per_head(self) -> bool:
        """True if there are no scales, or all tokens of a head share one."""
        return all(shape is None or shape[:2] == (1, 1) for shape in self.scale_shapes)

    @classmethod
    def of(cls, inputs: PagedInputs) -> "PagedProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        tokens, heads, head_dim = inputs.query.shape
        num_pages, page_size, kv_heads, _ = inputs.key.shape
        stored = head_dim + (0 if inputs.value is None else inputs.value_dim)
        scales = (inputs.key_scale, inputs.value_scale)
        # Scales of pages, heads or whole arrays are few beside the tokens.
        scale_bytes = sum(4 * math.prod(s.shape[2:]) for s in scales if s is not None and s.shape[1] > 1)
        return cls(
            tokens=tokens,
            sequences=inputs.sequences,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=inputs.value_dim,
            num_pages=num_pages,
            page_size=page_size,
            capacity=inputs.capacity,
            paged=inputs.page_table is not None,
            packed=inputs.cum_q_lens is not None,
            starts=inputs.kv_starts is not None,
            dtype=inputs.query.dtype,
            kv_dtype=inputs.key.dtype,
            kv_bytes=kv_heads * stored * inputs.key.dtype.itemsize + scale_bytes,
            scale_shapes=(_shape(inputs.key_scale), _shape(inputs.value_scale)),
            alibi=inputs.alibi_slopes is not None,
            sinks=0 if inputs.softmax_aux is None else inputs.softmax_aux.shape[1],
            options=inputs.options,
        )

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def longest_q(self) -> int:
        """The maximum number of query tokens of a sequence."""
        return self.tokens if self.options.q_length is None else self.options.q_length

    @property
    def visible(self) -> int:
        """The maximum number of keys that a query can see."""
        left, right = self.options.left, self.options.right
        window = self.capacity if left is None or right is None else left + 1 + right
        return min(self.capacity, window)


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
