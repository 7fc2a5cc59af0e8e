"""The inputs and results of every backend of the selective scan, and the chunks that its states are kept for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.sequences import num_sequences, number_up_to, sequence_ids

CHUNK = 64
"""Tokens of a chunk: the backward pass gets the state before each, N / 64 float32 for each element of u."""


class SelectiveScanInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      keeps: False to a forward pass whose states before the chunks are not used.
    """

    u: Float[Array, "batch length channels"]
    delta: Float[Array, "batch length channels"]
    A: Float[Array, "channels state"]
    B: Float[Array, "batch length groups state"]
    C: Float[Array, "batch length groups state"]
    D: Float[Array, " channels"] | None = None
    z: Float[Array, "batch length channels"] | None = None
    delta_bias: Float[Array, " channels"] | None = None
    delta_softplus: bool = static(default=False)
    initial_state: Float[Array, "sequences channels state"] | None = None
    cum_seqlens: Int32[Array, " boundaries"] | None = None
    segment_ids: Int32[Array, "batch length"] | None = None
    seq_lengths: Int32[Array, " batch"] | None = None
    return_state: bool = static(default=False, role="call")
    keeps: bool = static(default=True, role="stage")

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype that is computed in, and that states have."""
        return jnp.promote_types(self.u.dtype, jnp.float32)

    @property
    def batch(self) -> int:
        return self.u.shape[0]

    @property
    def length(self) -> int:
        return self.u.shape[1]

    @property
    def channels(self) -> int:
        return self.u.shape[2]

    @property
    def state(self) -> int:
        return self.A.shape[1]

    @property
    def groups(self) -> int:
        return self.B.shape[2]

    @property
    def sequences(self) -> int:
        """The sequences that have a state of their own."""
        return num_sequences(self.batch, self.cum_seqlens)

    @functools.cached_property
    def chunk(self) -> int:
        """Tokens of a chunk: a multiple of 8."""
        return min(CHUNK, -(-max(self.length, 1) // 8) * 8) if isinstance(self.length, int) else CHUNK

    @property
    def chunks(self) -> int:
        """Chunks of a row, of which those of a packed row may have no tokens."""
        return num_pieces(self, self.chunk)

    def ids(self) -> Any:
        """The sequence of each token, as ``sequence_ids`` numbers them; None for whole rows."""
        return sequence_ids(
            self.batch,
            self.length,
            cum_seqlens=self.cum_seqlens,
            segment_ids=self.segment_ids,
            seq_lengths=self.seq_lengths,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScanResults:
    """The results of a forward pass, or their cotangents.

    Attributes:
      state: the states behind the sequences; None unless the call returns them.
      chunk_states: the state before each chunk, for the backward pass; of a chunk without tokens any numbers.
    """

    out: Float[Array, "batch length channels"] | None
    state: Float[Array, "sequences channels state"] | None
    chunk_states: Float[Array, "batch chunks channels state"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a packed row, each of one sequence or of tokens that belong to none.

    Pieces begin where sequences begin, so that what is computed of a sequence depends on no other one.

    Attributes:
      start, count: ``[pieces]``: the first token, and the number of tokens; those behind the last piece have none.
      sequence: ``[pieces]``: the sequence, ``PADDING`` for tokens of none.
      first: ``[pieces]``: the first piece of the same sequence.
      last_of: ``[sequences]``: the last piece of each sequence; that of an empty one is before its first.
      first_of: ``[sequences]``: the first piece of each sequence.
    """

    start: Any
    count: Any
    sequence: Any
    first: Any
    last_of: Any
    first_of: Any


def num_pieces(inputs: SelectiveScanInputs, size: int) -> int:
    """The pieces of ``size`` tokens that a row may have: in a packed one each sequence and either end may have one."""
    if inputs.cum_seqlens is None:
        return -(-inputs.length // size)
    return inputs.length // size + inputs.sequences + 2


def pieces_of(inputs: SelectiveScanInputs, size: int) -> Pieces:
    """The pieces of ``size`` tokens of a packed row."""
    assert inputs.cum_seqlens is not None
    length, count = inputs.length, num_pieces(inputs, size)
    bounds = jnp.clip(inputs.cum_seqlens, 0, length)
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds, jnp.full(1, length, jnp.int32)])
    # Ranges of tokens: those before the first sequence, the sequences, and those behind the last one.
    pieces = jnp.maximum(edges[1:] - edges[:-1] + (size - 1), 0) // size
    total = jnp.cumsum(pieces, dtype=jnp.int32)
    # Sequences of boundaries that decrease have no more pieces than there are, so that no kernel leaves its arrays.
    ends, begins = jnp.minimum(total, count), jnp.minimum(total - pieces, count)
    index = jnp.arange(count, dtype=jnp.int32)
    ranges = number_up_to(ends, index)
    inside = jnp.minimum(ranges, pieces.shape[0] - 1)
    start = edges[inside] + (index - begins[inside]) * size
    used = index < ends[-1]
    is_sequence = used & (inside > 0) & (inside < pieces.shape[0] - 1)
    return Pieces(
        start=jnp.where(used, start, length),
        count=jnp.where(used, jnp.clip(edges[inside + 1] - start, 0, size), 0),
        sequence=jnp.where(is_sequence, inside - 1, -1),
        first=jnp.where(used, begins[inside], index),
        last_of=ends[1:-1] - 1,
        first_of=begins[1:-1],
    )


class SelectiveScanStepInputs(OpInputs):
    """A step after ``prepare``; shapes and dtypes hold without further checks."""

    state_pool: Float[Array, "slots channels state"]
    u: Float[Array, "rows channels"]
    delta: Float[Array, "rows channels"]
    A: Float[Array, "channels state"]
    B: Float[Array, "rows groups state"]
    C: Float[Array, "rows groups state"]
    D: Float[Array, " channels"] | None = None
    z: Float[Array, "rows channels"] | None = None
    delta_bias: Float[Array, " channels"] | None = None
    delta_softplus: bool = static(default=False)
    state_indices: Int32[Array, " rows"] | None = None
    write_indices: Int32[Array, " rows"] | None = None

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype that is computed in."""
        return jnp.promote_types(self.u.dtype, jnp.float32)

    @property
    def rows(self) -> int:
        return self.u.shape[0]

    @property
    def channels(self) -> int:
        return self.u.shape[1]

    @property
    def state(self) -> int:
        return self.A.shape[1]

    @property
    def groups(self) -> int:
        return self.B.shape[1]
