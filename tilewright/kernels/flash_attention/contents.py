"""Checks of the lengths and boundaries of attention, where their numbers are known."""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from tilewright.kernels.op.contents import Check, Finder, Given, boundaries, lengths, parts, shape_of


def _rows(given: Given, side: str) -> int | None:
    """The length of the whole sequence of queries or keys; ``None`` if it is not known."""
    shape = shape_of(given, side)
    if shape is None or len(shape) not in (3, 4):
        return None
    devices = parts(given)
    return None if devices is None else shape[-3] * devices


def _check(side: str, faults: Callable[..., Iterable[str]]) -> Check:
    def finder(given: Given) -> Finder | None:
        total = _rows(given, side)
        return None if total is None else functools.partial(faults, total=total)

    return finder


CONTENTS: Mapping[str, Check] = MappingProxyType(
    {
        "query_seq_lengths": _check("query", lengths),
        "key_value_seq_lengths": _check("key", lengths),
        "cum_seqlens_q": _check("query", boundaries),
        "cum_seqlens_k": _check("key", boundaries),
    }
)
