"""The inputs of every serving backend: packed queries, a cache in pages, static options."""

import dataclasses
import functools
import math

from jaxtyping import Array, Float, Integer, Num, UInt32

from tilewright.kernels.heads import HeadInputs
from tilewright.kernels.op.inputs import array, static

FAR = 1 << 29
"""A bound beyond every position: windows, lengths and starts are clipped to it, so that sums of three fit int32."""

ELSEWHERE = -(1 << 31)
"""A page number in the table of one of several devices: another device has the page, so its absence is not an error."""


class PagedInputs(HeadInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks, the arrays' values are not checked.

    The layout of a call follows from which of the arrays of role "call" it has, and backends say which they take.

    Attributes:
      key: elements of ``head_dim``, or rows of bytes with a ``row_format``.
      value: ``None`` if the first ``latent_dim`` elements of a key are the value.
      page_table: ``None`` if sequence ``s`` has only page ``s``.
      kv_lengths: tokens of each sequence, the query's included, which are the last.
      kv_starts: the first visible positions.
      tree_mask: bit j of a token's words, the lowest of the first word first: the token sees new token j of its
        sequence, whichever comes first. What has no bit is masked. Tokens before the new ones have none and are seen.
      cum_q_lens: where the sequences' tokens begin and end; ``None`` if all have ``q_length``.
      new_key, new_value: what is written to the pages first (``Op.completed``); a backend gets neither.
      left, right: keys visible before and after the query's position, ``None`` for all; causality is part of ``right``.
      q_length: query tokens of every sequence, if all have the same number; ``None`` if ``cum_q_lens`` has them.
      latent_dim: number of leading elements of a key that are the value, if keys and values are one array.
      row_format: how the bytes of ``key`` hold latents, if they do: ``FLASH_MLA``.
      kv_dtype: the dtype in which pages are stored; in the oracle their arrays may have a wider one.
      leading: the leading shape of the caller's query, which the results have too.
      return_lse: the caller reads the log-sum-exp.
      written: ``new_key`` and ``new_value`` are in the pages.
    """

    query: Float[Array, "tokens heads head_dim"]
    key: Num[Array, "num_pages page_size kv_heads key_dim"]
    _: dataclasses.KW_ONLY
    value: Num[Array, "num_pages page_size kv_heads value_dim"] | None = array(default=None, role="call")
    page_table: Integer[Array, "sequences pages_per_sequence"] | None = array(default=None, role="call")
    kv_lengths: Integer[Array, " sequences"]
    kv_starts: Integer[Array, " sequences"] | None = None
    cum_q_lens: Integer[Array, " sequences+1"] | None = array(default=None, role="call")
    key_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    value_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    alibi_slopes: Float[Array, " heads"] | None = None
    softmax_aux: Float[Array, "heads sinks"] | None = None
    tree_mask: UInt32[Array, "tokens words"] | None = None
    new_key: Float[Array, "tokens kv_heads head_dim"] | None = array(default=None, role="call")
    new_value: Float[Array, "tokens kv_heads value_dim"] | None = array(default=None, role="call")
    softmax_scale: float = static()
    left: int | None = static(default=None)
    right: int | None = static(default=0)
    logits_soft_cap: float | None = static(default=None)
    q_length: int | None = static(default=1)
    latent_dim: int | None = static(default=None)
    row_format: str | None = static(default=None)
    kv_dtype: str = static(role="call")
    leading: tuple[int, ...] = static(role="call")
    return_lse: bool = static(default=False, role="call")
    written: bool = static(default=False, role="stage")

    @functools.cached_property
    def tokens(self) -> int:
        return self.query.shape[0]

    @functools.cached_property
    def num_pages(self) -> int:
        return self.key.shape[0]

    @functools.cached_property
    def page_size(self) -> int:
        return self.key.shape[1]

    @functools.cached_property
    def value_dim(self) -> int:
        if self.value is not None:
            return self.value.shape[3]
        return self.key.shape[3] if self.latent_dim is None else self.latent_dim

    @functools.cached_property
    def sequences(self) -> int:
        return self.kv_lengths.shape[0]

    @functools.cached_property
    def columns(self) -> int:
        """Pages per sequence."""
        return 1 if self.page_table is None else self.page_table.shape[1]

    @functools.cached_property
    def capacity(self) -> int:
        """The capacity of a sequence in tokens."""
        return self.page_size * self.columns

    @functools.cached_property
    def sinks(self) -> int:
        """The number of extra logits per head."""
        return 0 if self.softmax_aux is None else self.softmax_aux.shape[1]

    @functools.cached_property
    def longest_q(self) -> int:
        """The maximum number of query tokens of a sequence."""
        return self.tokens if self.q_length is None else self.q_length

    @functools.cached_property
    def visible(self) -> int:
        """The maximum number of keys that a query can see."""
        window = self.capacity if self.left is None or self.right is None else self.left + 1 + self.right
        return min(self.capacity, window)

    @functools.cached_property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys, values and scales, of all heads."""
        stored = self.key.shape[3] + (0 if self.value is None else self.value_dim)
        scales = (self.key_scale, self.value_scale)
        # Scales of pages, heads or whole arrays are few beside the tokens.
        scale_bytes = sum(4 * math.prod(s.shape[2:]) for s in scales if s is not None and s.shape[1] > 1)
        return self.kv_heads * stored * self.key.dtype.itemsize + scale_bytes

    @functools.cached_property
    def scales_constant_per_head(self) -> bool:
        """True if there are no scales, or all tokens of a head share one."""
        return all(scale is None or scale.shape[:2] == (1, 1) for scale in (self.key_scale, self.value_scale))

    @functools.cached_property
    def writes(self) -> bool:
        """True if new tokens are written, so that the new pages are among the outputs."""
        return self.written or self.new_key is not None

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if there is no query, or no key whatever the arrays hold."""
        return 0 in (*self.query.shape, *self.key.shape, self.sequences, self.capacity, self.value_dim)
