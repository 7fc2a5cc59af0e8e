"""Paged attention in plain XLA: gathers pages in blocks into an online softmax, several query tiles at once.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention" (2023).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.core import min_dim  # also of symbolic dimensions
from jaxtyping import Array, Bool, Float, Int, UInt32

from tilewright.kernels.masks import Index
from tilewright.kernels.numerics.softmax import accumulation_dtype, finite_shift
from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.latent_rows import dequantized
from tilewright.kernels.paged_attention.results import Results, empty_forward, sinks_of
from tilewright.kernels.paged_attention.token_layout import boundaries, bounded, packed_tiles, packed_tokens

type State = tuple[jax.Array, jax.Array, jax.Array]
"""Row maximum, row sum of exponentials, and unnormalised output."""


class Tiles(NamedTuple):
    """Query tiles, each of one sequence: ``first`` is a tile's first position, ``rows`` its number of rows."""

    query: Float[Array, "tiles block_q kv_heads groups head_dim"]
    sequence: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]
    bits: "TileBits | None" = None


class TileBits(NamedTuple):
    """The rows' words of ``tree_mask``, and the position of the first new token of each tile's sequence."""

    words: UInt32[Array, "tiles block_q words"]
    first_new: Int[Array, " tiles"]


class Block(NamedTuple):
    """Keys and values of one block of positions for each tile."""

    key: Float[Array, "tiles block_k kv_heads head_dim"]
    value: Float[Array, "tiles block_k kv_heads value_dim"]
    key_scale: Any
    value_scale: Any
    position: Int[Array, "tiles block_k"]
    present: Bool[Array, "tiles block_k"]


def paged_forward(inputs: PagedInputs, block_q: int, block_k: int, tiles_at_once: int) -> Results:
    """``(out, lse)``; lse is float32, or float64 for float64 queries."""
    inputs = vary_over(varying_axes(inputs), inputs)
    tiles, token_rows = _tiles(inputs, block_q)
    count = tiles.rows.shape[0]
    at_once = min(tiles_at_once, count) if isinstance(count, int) else count
    if at_once == count:
        out, lse = _attend(inputs, tiles, block_k)
    else:
        # Padding tiles of the last step have no rows, and so no keys to read.
        padded = jax.tree.map(lambda x: _padded(x, -count % at_once), tiles)
        steps = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), padded)
        stacked = lax.map(lambda step: _attend(inputs, step, block_k), steps)
        out, lse = (x.reshape(-1, *x.shape[2:])[:count] for x in stacked)
    tokens, heads, _ = inputs.query.shape
    if token_rows is None:
        return out.reshape(tokens, heads, -1), lse.reshape(tokens, heads)
    row_of_token, owned = token_rows
    out, lse = (x.reshape(-1, heads, *x.shape[4:])[row_of_token] for x in (out, lse))
    empty_out, empty_lse = empty_forward(inputs)
    return jnp.where(owned[:, None, None], out, empty_out), jnp.where(owned[:, None], lse, empty_lse)


def _tiles(inputs: PagedInputs, block_q: int) -> tuple[Tiles, Any]:
    """The tiles, and for each token its row among the rows of all tiles; ``None`` if rows are tokens."""
    tokens, heads, head_dim = inputs.query.shape
    kv_heads, q_length = inputs.key.shape[2], inputs.q_length
    sequences, lengths = inputs.sequences, bounded(inputs.kv_lengths)
    shape = (block_q, kv_heads, heads // kv_heads, head_dim)
    if q_length is not None and q_length % block_q == 0:
        tiles_per_sequence = q_length // block_q
        tile = jnp.arange(sequences * tiles_per_sequence, dtype=jnp.int32)
        first = lengths[tile // tiles_per_sequence] - q_length + tile % tiles_per_sequence * block_q
        return Tiles(
            inputs.query.reshape(-1, *shape), tile // tiles_per_sequence, first, jnp.full_like(tile, block_q)
        ), None

    cum = inputs.cum_q_lens
    if cum is None:
        cum = jnp.arange(sequences + 1, dtype=jnp.int32) * (q_length or 0)
    cum = boundaries(cum, tokens)
    plan, starts = packed_tiles(cum, inputs.kv_lengths, tokens, block_q)
    token = plan.token[:, None] + jnp.arange(block_q)
    # A tile may reach beyond its sequence's tokens, into others or past the last: such rows are masked.
    token = jnp.clip(token, 0, tokens - 1)
    query = inputs.query[token].reshape(-1, *shape)
    bits = None
    if inputs.tree_mask is not None:
        bits = TileBits(inputs.tree_mask[token], plan.position - (plan.token - cum[plan.sequence]))
    at = packed_tokens(cum, tokens, sequences, None)
    row_of_token = (starts[at.sequence] + at.offset // block_q) * block_q + at.offset % block_q
    row_of_token = jnp.clip(row_of_token, 0, query.shape[0] * block_q - 1)
    return Tiles(query, plan.sequence, plan.position, plan.rows, bits), (row_of_token, at.owned)


def _padded(x: jax.Array, count: int) -> Any:
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))


def _attend(inputs: PagedInputs, tiles: Tiles, block_k: int) -> tuple[Any, Any]:
    """``(out [tiles, block_q, kv_heads, groups, value_dim], lse [...])`` of some tiles."""
    # The range of positions that any row sees: the first one, and the one after the last.
    low = jnp.zeros_like(tiles.first)
    if inputs.kv_starts is not None:
        low = bounded(inputs.kv_starts)[tiles.sequence]
    if inputs.left is not None:
        low = jnp.maximum(low, tiles.first - inputs.left)
    end = jnp.minimum(bounded(inputs.kv_lengths)[tiles.sequence], inputs.capacity)
    if inputs.right is not None:
        end = jnp.minimum(end, tiles.first + tiles.rows + inputs.right)
    end = jnp.where(tiles.rows > 0, end, 0)
    # Begins at a multiple of ``block_k``, so that the pieces of a block begin where pieces of pages do.
    start = low // block_k * block_k
    steps = jnp.max(-(-(end - start) // block_k), initial=0)
    source = Source.of(inputs, block_k)

    def step(index: Index, state: State) -> Any:
        position = start[:, None] + index * block_k + jnp.arange(source.block_k, dtype=jnp.int32)
        return _step(inputs, tiles, source.read(tiles.sequence, position, low, end), state)

    row_max, total, weighted = lax.fori_loop(0, steps, step, _initial(inputs, tiles))
    out = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    lse = row_max + jnp.log(total)
    # [tiles, kv_heads, groups, block_q] to the order of the tokens.
    return jnp.moveaxis(out, 3, 1).astype(inputs.query.dtype), jnp.moveaxis(lse, 3, 1)


def _initial(inputs: PagedInputs, tiles: Tiles) -> tuple[Any, Any, Any]:
    """Row maximum, row sum and unnormalised output before the first key: those of the sinks."""
    count, block_q, kv_heads, groups, _ = tiles.query.shape
    shape = (count, kv_heads, groups, block_q)
    sinks = sinks_of(inputs)
    weighted = jnp.zeros((*shape, inputs.value_dim), accumulation_dtype(inputs.query.dtype))
    row_max, total = (jnp.broadcast_to(part.reshape(1, kv_heads, groups, 1), shape) for part in sinks)
    return vary_over(varying_axes(inputs), (row_max, total, weighted))


def _step(inputs: PagedInputs, tiles: Tiles, block: Block, state: State) -> Any:
    dtype = accumulation_dtype(inputs.query.dtype)
    block_q = tiles.query.shape[1]
    query = tiles.query.astype(block.key.dtype)  # float32 beside rows of bytes, else its own dtype
    logits = jnp.einsum("tqhgd,tkhd->thgqk", query, block.key, preferred_element_type=dtype)
    logits = logits * jnp.asarray(inputs.softmax_scale, dtype)
    # A token's scale is the same for all elements of a head: one multiplication of a logit instead of one for each
    # element.
    if block.key_scale is not None:
        logits = logits * _by_head(block.key_scale)
    row = tiles.first[:, None] + jnp.arange(block_q)
    distance = block.position[:, None, :] - row[:, :, None]
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.astype(dtype).reshape(1, *logits.shape[1:3], 1, 1)
        logits = logits + slopes * distance[:, None, None].astype(dtype)
    if inputs.logits_soft_cap is not None:
        logits = inputs.logits_soft_cap * jnp.tanh(logits / inputs.logits_soft_cap)
    visible = block.present[:, None, :] & (jnp.arange(block_q)[:, None] < tiles.rows[:, None, None])
    if inputs.left is not None:
        visible &= distance >= -inputs.left
    if inputs.right is not None:
        visible &= distance <= inputs.right
    if tiles.bits is not None:
        visible &= _has_bit(tiles.bits, block.position)
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)

    row_max = jnp.maximum(state[0], jnp.max(logits, axis=-1))
    shift = finite_shift(row_max)
    probabilities, shrink = jnp.exp(logits - shift[..., None]), jnp.exp(state[0] - shift)
    total = state[1] * shrink + jnp.sum(probabilities, axis=-1)
    # After the sum: it is a factor of V, not of P.
    if block.value_scale is not None:
        probabilities = probabilities * _by_head(block.value_scale)
    block_out = jnp.einsum(
        "thgqk,tkhv->thgqv", probabilities.astype(block.value.dtype), block.value, preferred_element_type=dtype
    )
    return row_max, total, state[2] * shrink[..., None] + block_out


def _has_bit(bits: TileBits, position: jax.Array) -> Any:
    """True for keys before the new tokens, and for those whose bit a row has: ``[tiles, block_q, block_k]``."""
    new = position - bits.first_new[:, None]
    count = bits.words.shape[2]
    word = jnp.clip(new // 32, 0, count - 1)[:, None, :]
    bit = (jnp.take_along_axis(bits.words, word, axis=2) >> (new % 32).astype(jnp.uint32)[:, None, :]) & 1
    return (new < 0)[:, None, :] | ((new < 32 * count)[:, None, :] & (bit == 1))


def _by_head(scale: jax.Array) -> Any:
    """Reshapes ``[tiles, block_k, kv_heads | 1]`` to broadcast with the logits."""
    return jnp.swapaxes(scale, 1, 2)[:, :, None, None, :]


@dataclasses.dataclass(frozen=True)
class Source:
    """Reads blocks of a cache: pieces of pages, or slices of rows without a page table.

    Attributes:
      block_k: positions per block.
      piece: contiguous positions within a page; a block consists of such pieces.
    """

    inputs: PagedInputs
    block_k: int
    piece: int

    @classmethod
    def of(cls, inputs: PagedInputs, block_k: int) -> "Source":
        return cls(inputs, block_k, block_k if inputs.page_table is None else math.gcd(block_k, inputs.page_size))

    def read(self, sequence: jax.Array, position: jax.Array, low: jax.Array, end: jax.Array) -> Block:
        """The block of these positions; those from ``low`` to ``end`` that have a page are present."""
        inputs = self.inputs
        present = (position >= low[:, None]) & (position < end[:, None])
        if inputs.page_table is None:
            # JAX moves a slice that would exceed the row's end back, and its positions must move with it.
            size = min_dim(self.block_k, inputs.page_size)
            begin = jnp.clip(position[:, 0], 0, jnp.asarray(inputs.page_size - size, jnp.int32))
            moved = begin[:, None] + jnp.arange(size, dtype=jnp.int32)
            last = position[:, 0]
            present = (moved >= jnp.maximum(low, last)[:, None]) & (moved < end[:, None])
            position, take = moved, lambda array: _slices(array, sequence, begin, size)
        else:
            page, row, exists = self._pieces(inputs.page_table, sequence, position)
            present = present & jnp.repeat(exists, self.piece, axis=1)
            take = lambda array: self._gathered(array, page, row)  # noqa: E731
        key_scale, value_scale = (self._scale(scale, take, present) for scale in (inputs.key_scale, inputs.value_scale))
        key = self._keys(take(inputs.key))
        if inputs.value is None:
            value, value_scale = key[..., : inputs.value_dim], key_scale
        else:
            value = self._promoted(take(inputs.value))
        # An unwritten value may be NaN, and 0 · NaN is NaN.
        value = jnp.where(present[..., None, None], value, 0)
        return Block(key, value, key_scale, value_scale, position, present)

    def _pieces(self, table: Any, sequence: jax.Array, position: jax.Array) -> tuple[Any, Any, Any]:
        """Page, first row and presence of each piece, ``[tiles, pieces]``."""
        inputs = self.inputs
        columns, num_pages = table.shape[1], inputs.key.shape[0]
        first = position[:, :: self.piece]
        column = jnp.clip(first // inputs.page_size, 0, columns - 1)
        page = table[sequence[:, None], column]
        exists = (page >= 0) & (page < num_pages)
        return jnp.where(exists, page, 0), first % inputs.page_size, exists

    def _gathered(self, array: jax.Array, page: jax.Array, row: jax.Array) -> Any:
        """Gathers pieces of ``[num_pages, page_size, ...]``, contiguous in each tile."""
        num_pages, page_size = array.shape[:2]
        pieces = page_size // self.piece
        split = array.reshape(num_pages, pieces, self.piece, *array.shape[2:])
        found = split[page, row // self.piece]
        return found.reshape(page.shape[0], -1, *array.shape[2:])

    def _scale(self, scale: jax.Array | None, take: Callable[[jax.Array], jax.Array], present: jax.Array) -> Any:
        if scale is None:
            return None
        if scale.shape[:2] == (1, 1):
            return jnp.broadcast_to(scale[0], (present.shape[0], present.shape[1], scale.shape[2]))
        taken = take(jnp.broadcast_to(scale, (*self.inputs.key.shape[:2], scale.shape[2])))
        return jnp.where(present[..., None], taken, 0.0)

    def _keys(self, stored: jax.Array) -> Any:
        if self.inputs.row_format is None:
            return self._promoted(stored)
        # Not in a narrower dtype: the scales would be rounded to it.
        return dequantized(stored, accumulation_dtype(self.inputs.query.dtype))

    def _promoted(self, array: jax.Array) -> Any:
        return array if array.dtype == self.inputs.query.dtype else array.astype(self.inputs.query.dtype)


def _slices(array: jax.Array, sequence: jax.Array, begin: jax.Array, size: int) -> Any:
    def slice_row(sequence: jax.Array, begin: jax.Array) -> Any:
        start: list[Index] = [sequence, begin, *[0] * (array.ndim - 2)]
        return lax.dynamic_slice(array, start, (1, size, *array.shape[2:]))[0]

    return jax.vmap(slice_row)(sequence, begin)
