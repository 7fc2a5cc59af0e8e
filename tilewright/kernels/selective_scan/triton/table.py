"""The table of pieces that the Triton kernels of a selective scan read."""

from typing import Any

import jax.numpy as jnp

from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs, num_pieces, pieces_of
from tilewright.kernels.sequences import PADDING, begins, number_up_to

MARK_RESET, MARK_PADDING = 1, 2


def marks_of(inputs: SelectiveScanInputs) -> Any:
    """The mark of each token of rows with segments, ``[batch, length]`` int8; None without segments."""
    if inputs.segment_ids is None:
        return None
    ids = inputs.ids()
    return jnp.where(ids == PADDING, MARK_PADDING, jnp.where(begins(ids), MARK_RESET, 0)).astype(jnp.int8)


def table_of(inputs: SelectiveScanInputs, size: int, marks: Any) -> Any:
    """``[pieces, 8]`` int32, with the columns that ``forward_kernels`` lists, for pieces of ``size`` tokens."""
    if inputs.cum_seqlens is not None:
        pieces, chunks = pieces_of(inputs, size), pieces_of(inputs, inputs.chunk)
        index = jnp.arange(num_pieces(inputs, size), dtype=jnp.int32)
        is_sequence = pieces.sequence != PADDING
        last_of = jnp.append(pieces.last_of, 0)
        columns = (
            pieces.start,
            pieces.count,
            jnp.where(is_sequence, pieces.count, 0),
            pieces.sequence,
            jnp.where(is_sequence, pieces.first, index),
            jnp.where(is_sequence, last_of[pieces.sequence], index),
            number_up_to(chunks.start, pieces.start) - 1,
            jnp.zeros_like(index),
        )
        return jnp.stack(columns, axis=1)
    rows = num_pieces(inputs, size)
    row, number = (jnp.arange(inputs.batch, dtype=jnp.int32)[:, None], jnp.arange(rows, dtype=jnp.int32)[None])
    covered = jnp.minimum(size, inputs.length - number * size)
    count = covered
    if inputs.seq_lengths is not None:
        count = jnp.clip(inputs.seq_lengths[:, None] - number * size, 0, covered)
    resets = jnp.zeros((), jnp.int32)
    if marks is not None:
        padded = jnp.pad(marks == MARK_RESET, ((0, 0), (0, rows * size - inputs.length)))
        resets = jnp.any(padded.reshape(inputs.batch, rows, size), axis=2).astype(jnp.int32)
    columns = (
        row * inputs.length + number * size,
        covered,
        count,
        row,
        row * rows,
        row * rows + rows - 1,
        row * inputs.chunks + number * (size // inputs.chunk),
        resets,
    )
    shape = (inputs.batch, rows)
    return jnp.stack([jnp.broadcast_to(x, shape) for x in columns], axis=2).reshape(-1, 8)
