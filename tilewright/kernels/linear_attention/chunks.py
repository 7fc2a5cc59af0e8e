"""Chunks of 64 tokens that begin where sequences begin, for the kernels of linear attention on GPUs."""

import dataclasses

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.sequences import number_up_to

CHUNK = 64
"""Tokens of a chunk: the rows of a matmul of a warpgroup."""

MAX_TOKENS = 1 << 30
"""Rows of all sequences: kernels count them in 32 bits."""


def chunk_reasons(inputs: LinearAttentionInputs) -> list[str]:
    """Reasons why the tokens of a call are no chunks for kernels on GPUs; empty if they are."""
    if 0 in (*inputs.value.shape, inputs.key_dim, inputs.sequences):
        return [f"its kernels need tokens of sequences, got value of the shape {inputs.value.shape}"]
    if inputs.batch * inputs.length > MAX_TOKENS:
        return [f"its kernels count up to {MAX_TOKENS} tokens, got {inputs.batch} · {inputs.length}"]
    return []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkTable:
    """The chunks and sequences among the rows of ``[batch · length]`` tokens.

    Attributes:
      chunks: int32 ``[chunks, 3]``: the first row, the number of rows, and how many of these are tokens of a sequence:
        the first ones. Rows of padding are in chunks, too, which may have no token at all; spare chunks have no row.
      sequences: int32 ``[sequences, 2]``: the first chunk, and the number of chunks, which may be 0.
    """

    chunks: jax.Array
    sequences: jax.Array

    @property
    def num_chunks(self) -> int:
        """The static number of chunks, spare ones included."""
        return self.chunks.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.sequences.shape[0]


def chunk_table(
    batch: int, length: int, *, cum_seqlens: jax.Array | None = None, seq_lengths: jax.Array | None = None
) -> ChunkTable:
    """The chunks of whole rows, of rows up to ``seq_lengths`` [batch], or of the sequences of one packed row.

    Boundaries beyond the row are clipped to it, and sequences of boundaries that decrease have no more chunks than the
    table, so that no kernel leaves its arrays. The number of chunks depends on
    shapes alone: ``batch · ⌈length / 64⌉``, or ``⌊(length + 63 · (sequences + 2)) / 64⌋`` with ``cum_seqlens``.
    """
    if cum_seqlens is not None:
        return _packed(length, cum_seqlens)
    per_row = -(-length // CHUNK)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    begin = CHUNK * jnp.arange(per_row, dtype=jnp.int32)[None, :]
    rows = jnp.broadcast_to(jnp.clip(length - begin, 0, CHUNK), (batch, per_row))
    lengths = jnp.full((batch,), length, jnp.int32) if seq_lengths is None else jnp.clip(seq_lengths, 0, length)
    tokens = jnp.clip(lengths[:, None] - begin, 0, CHUNK)
    chunks = jnp.stack([row * length + begin, rows, tokens], -1).reshape(batch * per_row, 3)
    sequences = jnp.stack([row[:, 0] * per_row, -(-lengths // CHUNK)], -1)
    return ChunkTable(chunks.astype(jnp.int32), sequences.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentTable:
    """Segments of consecutive chunks, which begin where sequences begin.

    Attributes:
      segments: int32 ``[segments, 2]``: the first chunk, and the number of chunks, which is 0 for spare ones.
      sequences: int32 ``[sequences, 2]``: the first segment, and the number of segments, which may be 0.
    """

    segments: jax.Array
    sequences: jax.Array

    @property
    def num_segments(self) -> int:
        """The static number of segments, spare ones included."""
        return self.segments.shape[0]


def segment_table(table: ChunkTable, size: int) -> SegmentTable:
    """Segments of ``size`` chunks, but for the last one of each sequence; their number depends on shapes alone."""
    first_chunk, chunks = table.sequences[:, 0], table.sequences[:, 1]
    per_sequence = -(-chunks // size)
    last = jnp.cumsum(per_sequence, dtype=jnp.int32)
    first = last - per_sequence
    segment = jnp.arange(table.num_chunks // size + table.num_sequences, dtype=jnp.int32)
    owner = jnp.minimum(number_up_to(last, segment), table.num_sequences - 1)
    begin = size * (segment - first[owner])
    segments = jnp.stack([first_chunk[owner] + begin, jnp.clip(chunks[owner] - begin, 0, size)], -1)
    return SegmentTable(segments.astype(jnp.int32), jnp.stack([first, per_sequence], -1).astype(jnp.int32))


def _packed(length: int, cum_seqlens: jax.Array) -> ChunkTable:
    bounds = jnp.clip(cum_seqlens, 0, length)
    count = bounds.shape[0] - 1
    # The rows before the first sequence and behind the last one are two more, of padding: they come last.
    begins = jnp.concatenate([bounds[:-1], jnp.zeros((1,), jnp.int32), bounds[-1:]])
    ends = jnp.concatenate([bounds[1:], bounds[:1], jnp.full((1,), length, jnp.int32)])
    lengths = jnp.maximum(ends - begins, 0)
    per_sequence = -(-lengths // CHUNK)
    last = jnp.cumsum(per_sequence, dtype=jnp.int32)
    first = last - per_sequence
    chunk = jnp.arange((length + (CHUNK - 1) * (count + 2)) // CHUNK, dtype=jnp.int32)
    owner = jnp.minimum(number_up_to(last, chunk), count + 1)
    begin = CHUNK * (chunk - first[owner])
    # A spare chunk lies beyond the rows of its owner, and so has none.
    rows = jnp.clip(lengths[owner] - begin, 0, CHUNK)
    chunks = jnp.stack([begins[owner] + begin, rows, jnp.where(owner < count, rows, 0)], -1)
    sequences = jnp.stack([first, jnp.clip(chunk.shape[0] - first, 0, per_sequence)], -1)[:count]
    return ChunkTable(chunks.astype(jnp.int32), sequences.astype(jnp.int32))
