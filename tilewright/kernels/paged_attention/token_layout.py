"""The coordinates of packed tokens: sequence, position, page and row, valid for any values in the arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from tilewright.kernels.paged_attention.inputs import FAR


class Tokens(NamedTuple):
    """The sequence of each packed token (any, if it has none), its offset among the new tokens, and their number."""

    sequence: Int[Array, " tokens"]
    offset: Int[Array, " tokens"]
    new: Int[Array, " tokens"]
    owned: Bool[Array, " tokens"]


def boundaries(cum_q_lens: Any, tokens: int) -> Any:
    """Boundaries made monotone and clipped to the tokens, so that no token has two sequences."""
    return jnp.clip(lax.cummax(cum_q_lens), 0, tokens)


def packed_tokens(cum_q_lens: Any, tokens: int, sequences: int, q_length: int | None) -> Tokens:
    token = jnp.arange(tokens, dtype=jnp.int32)
    if q_length is not None:
        all_owned = jnp.ones(tokens, bool)
        return Tokens(token // q_length, token % q_length, jnp.full_like(token, q_length), all_owned)
    cum = boundaries(cum_q_lens, tokens)
    owner = _ends_passed(cum[1:], token)
    sequence = jnp.minimum(owner, sequences - 1)
    owned = (owner < sequences) & (token >= cum[0])
    return Tokens(sequence, token - cum[sequence], cum[sequence + 1] - cum[sequence], owned)


def _ends_passed(ends: jax.Array, index: jax.Array) -> Any:
    """Counts the ascending ends up to each index; ``jnp.searchsorted`` takes no symbolic dimensions."""
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)


def bounded(lengths: jax.Array) -> Any:
    """Lengths or starts clipped to [0, FAR], so that their sums fit int32."""
    return jnp.clip(lengths, 0, FAR)


class TilePlan(NamedTuple):
    """Query tiles of packed tokens, each of one sequence; unused tiles have no rows.

    Attributes:
      token, rows: a tile's first token and its number of tokens.
      position: position of the first row in its sequence.
    """

    sequence: Int[Array, " tiles"]
    token: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]
    position: Int[Array, " tiles"]


def max_tiles(tokens: int, sequences: int, block_q: int) -> int:
    """The maximum number of tiles with rows, however the tokens are spread over the sequences."""
    # Σ ⌈nᵢ / b⌉ ≤ Σ (nᵢ + b − 1) / b, and a tile has a token at least.
    upper_bound = (tokens + sequences * (block_q - 1)) // block_q
    return min(tokens, upper_bound) if isinstance(upper_bound, int) else upper_bound


def packed_tiles(cum: jax.Array, lengths: jax.Array, tokens: int, block_q: int) -> tuple[TilePlan, Any]:
    """The tiles of ascending boundaries, and the first tile of each sequence."""
    sequences, counts = lengths.shape[0], jnp.diff(cum)
    ends = jnp.cumsum(-(-counts // block_q))
    starts = ends - -(-counts // block_q)
    tile = jnp.arange(max_tiles(tokens, sequences, block_q), dtype=jnp.int32)
    owner = _ends_passed(ends, tile)
    sequence = jnp.minimum(owner, sequences - 1)
    offset = (tile - starts[sequence]) * block_q
    # Tiles after those of the last sequence have no rows; their other values are not used.
    rows = jnp.where(owner < sequences, jnp.clip(counts[sequence] - offset, 0, block_q), 0)
    position = bounded(lengths)[sequence] - counts[sequence] + offset
    return TilePlan(sequence, cum[sequence] + offset, rows, position), starts
