"""Writes new keys and values into pages, quantising them if there are scales."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, Num

from tilewright.kernels.op.inputs import OpInputs, array, static
from tilewright.kernels.op.sharding import explicit_mesh, typed_axes
from tilewright.kernels.paged_attention.token_layout import bounded, packed_tokens

type Cache = tuple[Any, Any, Any, Any]
"""Pages of keys and of values, and the scales of both."""

COMPARED = 512
"""Up to so many tokens are compared with each other, in one kernel; a sort of more has fewer steps."""


class WriteInputs(OpInputs):
    """Pages and the tokens to write into them; values and scales may be absent.

    Attributes:
      key, value: packed.
      cum_q_lens: ``None`` if every sequence has one token.
      kv_dtype: the dtype in which pages are stored; in the oracle their arrays may have a wider one.
      headless: the caller's pages and tokens have no axis of heads; here it has size 1.
    """

    key_pages: Num[Array, "num_pages page_size kv_heads head_dim"]
    _: dataclasses.KW_ONLY
    value_pages: Num[Array, "num_pages page_size kv_heads value_dim"] | None = array(default=None, role="call")
    key_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    value_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    key: Num[Array, "tokens kv_heads head_dim"]
    value: Float[Array, "tokens kv_heads value_dim"] | None = array(default=None, role="call")
    page_table: Integer[Array, "sequences pages_per_sequence"]
    kv_lengths: Integer[Array, " sequences"]
    cum_q_lens: Integer[Array, " sequences+1"] | None = array(default=None, role="call")
    kv_dtype: str = static(role="call")
    headless: bool = static(default=False, role="call")

    @property
    def cache(self) -> Cache:
        """The arrays that are written to."""
        return self.key_pages, self.value_pages, self.key_scale, self.value_scale


def scaled_by_token(scale: jax.Array | None, pages: jax.Array) -> bool:
    """True if each token has scales of its own, which are computed when it is written."""
    return scale is not None and scale.shape[:2] == pages.shape[:2]


def max_finite(dtype: str) -> float:
    """The maximum number that a stored element may hold."""
    return 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)


def write_pages(inputs: WriteInputs) -> Cache:
    """The cache with the new tokens; tokens without a page are dropped, and the last token for a row wins."""
    if 0 in inputs.key.shape or 0 in inputs.key_pages.shape or 0 in inputs.page_table.shape:
        return inputs.cache
    inputs = _split_like_pages(inputs)
    page, row = page_rows(inputs)
    key_pages, key_scale = _written(inputs.key_pages, inputs.key_scale, inputs.key, page, row, inputs.kv_dtype)
    value_pages, value_scale = inputs.value_pages, inputs.value_scale
    if inputs.value is not None:
        value_pages, value_scale = _written(value_pages, value_scale, inputs.value, page, row, inputs.kv_dtype)
    return key_pages, value_pages, key_scale, value_scale


def check_split_by_heads(pages: jax.Array) -> None:
    """Raises if the type of pages splits anything but their heads."""
    spec = typed_axes(pages)
    if any(axes is not None for position, axes in enumerate(spec) if position != 2):
        raise ValueError(
            f"pages to write to can be split by heads alone (key_pages: {P(*spec)}); reshard them first, or give each "
            "device its own pages by jax.shard_map, inside of which context_parallel_update_pages writes to pages that "
            "are dealt out to the devices"
        )


def _split_like_pages(inputs: WriteInputs) -> WriteInputs:
    """The inputs split over explicit axes like the pages: tokens by heads, everything else replicated.

    Every device has all pages of its heads, so each needs the tokens of all sequences.
    """
    mesh = explicit_mesh(*(x for x in jax.tree.leaves(inputs) if not isinstance(x, jax.ShapeDtypeStruct)))
    if mesh is None:
        return inputs
    check_split_by_heads(inputs.key_pages)
    spec = typed_axes(inputs.key_pages)
    by_head, replicated = P(None, spec[2]), P()

    def placed(x: jax.Array | None, wanted: P) -> Any:
        return None if x is None else jax.reshard(x, NamedSharding(mesh, wanted))

    return inputs.replace(
        key=placed(inputs.key, by_head),
        value=placed(inputs.value, by_head),
        page_table=placed(inputs.page_table, replicated),
        kv_lengths=placed(inputs.kv_lengths, replicated),
        cum_q_lens=placed(inputs.cum_q_lens, replicated),
    )


def page_rows(inputs: WriteInputs) -> tuple[Any, Any]:
    """The page and the row to write each token to; page ``num_pages`` if it is dropped."""
    num_pages, page_size = inputs.key_pages.shape[:2]
    sequences, columns = inputs.page_table.shape
    tokens = packed_tokens(inputs.cum_q_lens, inputs.key.shape[0], sequences, 1 if inputs.cum_q_lens is None else None)
    position = bounded(inputs.kv_lengths)[tokens.sequence] - tokens.new + tokens.offset
    column = position // page_size
    page = inputs.page_table[tokens.sequence, jnp.clip(column, 0, columns - 1)]
    exists = tokens.owned & (position >= 0) & (column < columns) & (page >= 0) & (page < num_pages)
    page, row = jnp.where(exists, page, num_pages), position % page_size
    return jnp.where(is_last(page, row), page, num_pages), row


def is_last(page: jax.Array, row: jax.Array) -> jax.Array:
    """Marks tokens without a later one of the same page and row: a scatter with equal coordinates may mix two."""
    count = page.shape[0]
    if isinstance(count, int) and count <= COMPARED:
        same = (page[:, None] == page) & (row[:, None] == row)
        return ~(same & (jnp.arange(count)[:, None] < jnp.arange(count))).any(1)
    order = jnp.lexsort((row, page))  # stable: the last of a run is the last token
    coordinates = jnp.stack([page, row])[:, order]
    is_last = jnp.append((coordinates[:, :-1] != coordinates[:, 1:]).any(0), True)
    return jnp.zeros_like(is_last).at[order].set(is_last)


def _written(
    pages: Any, scale: jax.Array | None, new: jax.Array, page: jax.Array, row: jax.Array, dtype: str
) -> tuple[Any, Any]:
    if scale is not None:
        if scaled_by_token(scale, pages):
            token_scale = token_scales(new, dtype, per_head=scale.shape[2] > 1)
            scale = scale.at[page, row].set(token_scale, mode="drop")
        else:
            token_scale = given_scales(scale, page, row)
        new = new.astype(jnp.float32) / token_scale[..., None]
    # Page ``num_pages`` does not exist: "drop" leaves out the tokens that have it.
    return pages.at[page, row].set(stored(new, dtype).astype(pages.dtype), mode="drop"), scale


def given_scales(scale: jax.Array, page: jax.Array, row: jax.Array) -> Any:
    """The scales of the caller for new tokens at these places, ``[tokens, kv_heads | 1]``."""
    return scale[_index(page, scale.shape[0]), _index(row, scale.shape[1])]


def _index(indices: jax.Array, size: int) -> Any:
    return jnp.clip(indices, 0, size - 1)


def token_scales(new: jax.Array, dtype: str, *, per_head: bool) -> Any:
    """The scales of new tokens, ``[tokens, kv_heads | 1]``, float32."""
    max_abs = jnp.max(jnp.abs(new.astype(jnp.float32)), axis=2)
    max_abs = max_abs if per_head else jnp.max(max_abs, axis=1, keepdims=True)
    # Zeros stay zeros with any scale except 0, by which they would be divided.
    return jnp.where(max_abs == 0.0, 1.0, max_abs / max_finite(dtype))


def stored(new: jax.Array, dtype: str) -> Any:
    """Elements in a page's dtype: int8 is rounded to nearest even, values out of range saturate, bytes stay."""
    if dtype == "uint8":
        return new
    if dtype == "int8":
        return jnp.clip(jnp.round(new.astype(jnp.float32)), -127.0, 127.0).astype(jnp.int8)
    if jnp.dtype(dtype).itemsize == 1:
        # Out of range a conversion gives NaN in float8_e4m3fn, which has no infinity, and infinity in float8_e5m2.
        limit = max_finite(dtype)
        return jnp.clip(new.astype(jnp.float32), -limit, limit).astype(dtype)
    return new.astype(dtype)
