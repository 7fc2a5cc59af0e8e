"""Where packed tokens stand: sequence, position, page and row, whatever the arrays hold."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from tilewright.kernels.paged_attention.inputs import FAR


class Tokens(NamedTuple):
    """Of every packed token: its sequence (any, where it has none), its place among the new ones, their number."""

    sequence: Int[Array, " tokens"]
    offset: Int[Array, " tokens"]
    new: Int[Array, " tokens"]
    owned: Bool[Array, " tokens"]


def boundaries(cum_q_lens: Any, tokens: int) -> Any:
    """Boundaries that rise within the tokens, so that no token has two sequences."""
    return jnp.clip(lax.cummax(cum_q_lens), 0, tokens)


def packed_tokens(cum_q_lens: Any, tokens: int, sequences: int, q_length: int | None) -> Tokens:
    token = jnp.arange(tokens, dtype=jnp.int32)
    if q_length is not None:
        everything = jnp.ones(tokens, bool)
        return Tokens(token // q_length, token % q_length, jnp.full_like(token, q_length), everything)
    cum = boundaries(cum_q_lens, tokens)
    owner = _ends_passed(cum[1:], token)
    sequence = jnp.minimum(owner, sequences - 1)
    owned = (owner < sequences) & (token >= cum[0])
    return Tokens(sequence, token - cum[sequence], cum[sequence + 1] - cum[sequence], owned)


def _ends_passed(ends: jax.Array, index: jax.Array) -> Any:
    """How many of the rising ends are not above each index; ``jnp.searchsorted`` takes no symbolic dimensions."""
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)


def bounded(lengths: jax.Array) -> Any:
    """Lengths or starts that are not negative and leave room for sums in int32."""
    return jnp.clip(lengths, 0, FAR)


class TilePlan(NamedTuple):
    """Query tiles of packed tokens, each of one sequence; those that are left over have no rows.

    Attributes:
      token, rows: a tile's first token and how many it has.
      position: of the first row in its sequence.
    """

    sequence: Int[Array, " tiles"]
    token: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]
    position: Int[Array, " tiles"]


def max_tiles(tokens: int, sequences: int, block_q: int) -> int:
    """How many tiles can have rows, however the tokens are spread over the sequences."""
    most = (tokens + sequences * (block_q - 1)) // block_q
    return min(tokens, most) if isinstance(most, int) else most


def packed_tiles(cum: jax.Array, lengths: jax.Array, tokens: int, block_q: int) -> tuple[TilePlan, Any]:
    """The tiles of rising boundaries, and the first tile of each sequence."""
    sequences, counts = lengths.shape[0], jnp.diff(cum)
    ends = jnp.cumsum(-(-counts // block_q))
    starts = ends - -(-counts // block_q)
    tile = jnp.arange(max_tiles(tokens, sequences, block_q), dtype=jnp.int32)
    owner = _ends_passed(ends, tile)
    sequence = jnp.minimum(owner, sequences - 1)
    offset = (tile - starts[sequence]) * block_q
    rows = jnp.where(owner < sequences, jnp.clip(counts[sequence] - offset, 0, block_q), 0)
    position = bounded(lengths)[sequence] - counts[sequence] + offset
    return TilePlan(sequence, cum[sequence] + offset, rows, position), starts
