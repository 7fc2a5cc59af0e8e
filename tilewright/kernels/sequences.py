"""Sequences of different lengths in one array, for ops that carry a state from token to token."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.arguments import as_array, identifiers, integer_array
from tilewright.kernels.op.contents import Check, Finder, Given, fault, lengths, shape_of

PADDING = -1
"""The sequence of a token that belongs to none."""

COMPARED = 512
"""Up to so many numbers each value is compared with all of them, in one kernel; a binary search is a loop of some."""


def sequence_arrays(
    batch: int, length: int, cum_seqlens: object, segment_ids: object, seq_lengths: object
) -> dict[str, jax.Array | None]:
    """Checks the three descriptions of sequences, of which a call has at most one, and returns them by name as int32.

    Args:
      batch, length: the leading dimensions of the tokens, ``[batch, length, ...]``.
      cum_seqlens: ``[sequences + 1]``: where sequences begin and end in the one row of a packed call. The first may
        be more than 0, the last less than the length.
      segment_ids: ``[batch, length]``: a sequence ends where the id changes; tokens of negative ids are padding.
      seq_lengths: ``[batch]``: the tokens of each row; those behind them are padding.
    """
    given = {"cum_seqlens": cum_seqlens, "segment_ids": segment_ids, "seq_lengths": seq_lengths}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"a call describes its sequences in one way, got {' and '.join(names)}")
    found: dict[str, jax.Array | None] = dict.fromkeys(given)
    if cum_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cum_seqlens are for sequences packed into one row: batch must be 1, got {batch}")
        shape = as_array("cum_seqlens", cum_seqlens).shape
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"cum_seqlens must have the shape [sequences + 1], got {tuple(shape)}")
        found["cum_seqlens"] = integer_array("cum_seqlens", cum_seqlens, tuple(shape), False)
    if segment_ids is not None:
        found["segment_ids"] = identifiers("segment_ids", segment_ids, (batch, length), False)
    if seq_lengths is not None:
        found["seq_lengths"] = integer_array("seq_lengths", seq_lengths, (batch,), False)
    return found


def sequence_contents(tokens: str) -> Mapping[str, Check]:
    """Checks of the numbers of ``seq_lengths`` and ``cum_seqlens``, where they are known.

    Args:
      tokens: the name of an argument ``[batch, length, ...]``.
    """

    def check(faults: Callable[..., Iterable[str]]) -> Check:
        def finder(given: Given) -> Finder | None:
            shape = shape_of(given, tokens)
            return None if shape is None or len(shape) < 2 else functools.partial(faults, total=shape[1])

        return finder

    return MappingProxyType({"seq_lengths": check(lengths), "cum_seqlens": check(_boundaries)})


def _boundaries(name: str, numbers: np.ndarray, total: int) -> Iterator[str]:
    """The faults of boundaries of sequences that are laid end to end in a part of a length."""
    if numbers.ndim == 1:
        before = np.append(numbers[:1], numbers[:-1])
        yield fault(name, numbers, numbers < before, "is less than the boundary before")
        yield from lengths(name, numbers, total)


def num_sequences(batch: int, cum_seqlens: jax.Array | None) -> int:
    """The number of sequences that have a state of their own: those of a packed row, or one for each row."""
    return batch if cum_seqlens is None else cum_seqlens.shape[0] - 1


def sequence_ids(
    batch: int,
    length: int,
    *,
    cum_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    seq_lengths: jax.Array | None = None,
) -> jax.Array | None:
    """``[batch, length]`` int32: the sequence of each token, ``PADDING`` where it has none; None for whole rows.

    Sequences are numbered from 0 in each row, in order. Segments that have the same id and do not touch are two.
    """
    position = jnp.arange(length, dtype=jnp.int32)
    if cum_seqlens is not None:
        found = number_up_to(cum_seqlens, position) - 1
        inside = (position >= cum_seqlens[0]) & (position < cum_seqlens[-1])
        return jnp.where(inside, found, PADDING)[None]
    if segment_ids is not None:
        begins = segment_ids[:, 1:] != segment_ids[:, :-1]
        numbers = jnp.cumsum(jnp.pad(begins, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        return jnp.where(segment_ids >= 0, numbers, PADDING)
    if seq_lengths is not None:
        return jnp.where(position < seq_lengths[:, None], 0, PADDING)
    return None


def number_up_to(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Counts, as int32, the ascending numbers, such as where sequences begin, that are at most each of some values."""
    method = "compare_all" if ascending.shape[0] <= COMPARED else "scan"
    return jnp.searchsorted(ascending, values, side="right", method=method).astype(jnp.int32)


def begins(ids: jax.Array) -> jax.Array:
    """True for the first token of each sequence, from ``sequence_ids``."""
    before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=PADDING)
    return (ids != before) & (ids != PADDING)


def without_padding(array: jax.Array, ids: jax.Array | None) -> Any:
    """``[batch, length, ...]`` with zeros in the rows of tokens that belong to no sequence, which may hold NaN."""
    if ids is None:
        return array
    return jnp.where(jnp.expand_dims(ids != PADDING, range(2, array.ndim)), array, jnp.zeros((), array.dtype))
