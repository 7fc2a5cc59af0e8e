"""The places of tokens in chunks: a chunk belongs to one row, and for ``cum_seqlens`` to one sequence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.xla.params import XlaLinearAttentionParams
from tilewright.kernels.sequences import PADDING, begins, number_up_to, sequence_ids, without_padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """Chunks ``[chunks, batch, chunk, ...]`` of the tokens ``[batch, length, ...]`` of a call.

    Attributes:
      chunks: their number in a row, a multiple of those of a segment.
      ids: of each token its sequence, as ``sequence_ids`` has them.
      source: for ``cum_seqlens`` the token at each place of all chunks, or one beyond the last where there is none.
      places: the other way around.
      sequence: of each chunk its sequence, for ``cum_seqlens``; that of chunks behind all others does not exist.
      is_first: True for the first chunk of a sequence of ``cum_seqlens``.
      last: the last chunk of each sequence of ``cum_seqlens``.
    """

    batch: int
    length: int
    chunk: int
    chunks: Any
    ids: jax.Array | None
    source: jax.Array | None = None
    places: jax.Array | None = None
    sequence: jax.Array | None = None
    is_first: jax.Array | None = None
    last: jax.Array | None = None

    @classmethod
    def of(cls, inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> "Layout":
        batch, length, cum = inputs.batch, inputs.length, inputs.cum_seqlens
        ids = sequence_ids(
            batch, length, cum_seqlens=cum, segment_ids=inputs.segment_ids, seq_lengths=inputs.seq_lengths
        )
        segment = params.chunk * params.segment
        if cum is None or ids is None:
            return cls(batch, length, params.chunk, (length + segment - 1) // segment * params.segment, ids)
        segments = length // segment + inputs.sequences
        cum = jnp.clip(cum, 0, length)
        lengths = jnp.maximum(cum[1:] - cum[:-1], 0)
        ends = jnp.cumsum((lengths + segment - 1) // segment, dtype=jnp.int32)  # of sequences, in segments
        starts = jnp.pad(ends[:-1], (1, 0))
        numbers = jnp.arange(segments, dtype=jnp.int32)
        sequence = number_up_to(ends, numbers)
        known = jnp.minimum(sequence, inputs.sequences - 1)
        within = (numbers - starts[known])[:, None] * segment
        within = within + jnp.arange(segment, dtype=jnp.int32)
        total = segments * segment
        inside = (within < lengths[known][:, None]) & (sequence < inputs.sequences)[:, None]
        # Places without a token are numbered on, since the indices of a gather whose derivative is a scatter differ.
        source = jnp.where(inside, cum[known][:, None] + within, length + jnp.arange(total).reshape(inside.shape))
        of_token = jnp.maximum(ids[0], 0)
        token = jnp.arange(length, dtype=jnp.int32)
        places = starts[of_token] * segment + token - cum[of_token]
        places = jnp.where(ids[0] == PADDING, total + token, places)
        is_first = (within[:, :1] == 0) & (jnp.arange(params.segment) == 0)
        return cls(
            batch,
            length,
            params.chunk,
            segments * params.segment,
            ids,
            source.reshape(-1).astype(jnp.int32),
            places.astype(jnp.int32),
            jnp.repeat(sequence, params.segment),
            is_first.reshape(-1),
            jnp.where(lengths > 0, ends * params.segment - 1, PADDING),
        )

    def chunked(self, tokens: jax.Array) -> Any:
        """``[chunks, batch, chunk, ...]``: the tokens of each chunk, and zeros where there is none."""
        if self.source is not None:
            found = _gathered(tokens[0], self.source)
            return found.reshape(self.chunks, 1, self.chunk, *tokens.shape[2:])
        tokens = without_padding(tokens, self.ids)
        behind = self.chunks * self.chunk - self.length
        tokens = jnp.pad(tokens, [(0, 0), (0, behind), *[(0, 0)] * (tokens.ndim - 2)])
        return jnp.moveaxis(tokens.reshape(self.batch, self.chunks, self.chunk, *tokens.shape[2:]), 0, 1)

    def tokens(self, chunked: jax.Array) -> Any:
        """``[batch, length, ...]`` from chunks, with zeros for tokens of no sequence."""
        if self.places is not None:
            return _gathered(chunked.reshape(-1, *chunked.shape[3:]), self.places)[None]
        found = jnp.moveaxis(chunked, 0, 1).reshape(self.batch, -1, *chunked.shape[3:])
        return without_padding(found[:, : self.length], self.ids)

    def begun(self) -> jax.Array | None:
        """``[chunks, batch, chunk]``: how many segments have begun in the chunk up to each token, for segment ids."""
        if self.ids is None or self.source is not None:
            return None
        counts = self.chunked(begins(self.ids).astype(jnp.int32))
        found: jax.Array = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
        return found


def _gathered(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows by indices, of which none occurs twice, and zeros for those that do not exist."""
    found: jax.Array = rows.at[indices].get(mode="fill", fill_value=0, unique_indices=True)
    return found
