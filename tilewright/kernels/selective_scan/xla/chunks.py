"""Tokens by chunks, which begin where the sequences of a packed row begin."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.selective_scan.inputs import Pieces, SelectiveScanInputs, pieces_of
from tilewright.kernels.sequences import begins, number_up_to, without_padding


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a call.

    Attributes:
      ids: the sequence of each token; None for whole rows.
      pieces: those of a packed row; None if every row is a sequence, or has segments.
    """

    inputs: SelectiveScanInputs
    ids: Any
    pieces: Pieces | None

    def split(self, x: jax.Array) -> Any:
        """``[batch, length, ...]`` to ``[batch, chunks, chunk, ...]``, with zeros behind the tokens of a chunk."""
        size, chunks = self.inputs.chunk, self.inputs.chunks
        x = without_padding(x, self.ids)
        if self.pieces is None:
            x = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
            return x.reshape(x.shape[0], chunks, size, *x.shape[2:])
        if self.inputs.length == 0:  # sequences without tokens, from which nothing can be taken
            return jnp.zeros((1, chunks, size, *x.shape[2:]), x.dtype)
        offset = jnp.arange(size, dtype=jnp.int32)
        index = self.pieces.start[:, None] + offset
        found = jnp.take(x[0], index, axis=0, mode="fill", fill_value=0)
        inside = offset < self.pieces.count[:, None]
        return jnp.where(jnp.expand_dims(inside, range(2, found.ndim)), found, jnp.zeros((), x.dtype))[None]

    def merge(self, x: jax.Array) -> Any:
        """The tokens of ``[batch, chunks, chunk, ...]``, with zeros where a token belongs to no sequence."""
        length = self.inputs.length
        flat = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        if self.pieces is None:
            return without_padding(flat[:, :length], self.ids)
        starts, position = self.pieces.start, jnp.arange(length, dtype=jnp.int32)
        # Chunks without tokens start behind the last token.
        chunk = number_up_to(starts, position) - 1
        index = chunk * self.inputs.chunk + position - starts[chunk]
        return without_padding(jnp.take(flat, index, axis=1, mode="clip"), self.ids)

    def resets(self) -> Any:
        """True for the first token of each segment, ``[batch, chunks, chunk]``; None without segments."""
        return None if self.inputs.segment_ids is None else self.split(begins(self.ids))


def chunks_of(inputs: SelectiveScanInputs) -> Chunks:
    """The chunks of a call."""
    pieces = None if inputs.cum_seqlens is None else pieces_of(inputs, inputs.chunk)
    return Chunks(inputs, inputs.ids(), pieces)
