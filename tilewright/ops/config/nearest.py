"""Finds the nearest shape in a tuned table, whose config a call without an entry of its own may use.

The distance of two calls is the sum over all dimensions of all arrays of ``|log2(a / b)|``, in octaves. Two calls that
differ in anything but sizes (op, version, direction, device, dtypes, ranks, static arguments, which axes are mapped,
which dimensions are 0) are infinitely far apart. An axis mapped by ``vmap`` counts as a dimension of every array that
it maps.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tilewright.ops.utils.serialize import Json, canonical_json

# One logical size usually appears in several arrays: attention's batch, length and heads each appear in query, key and
# value. So one octave in one of them is a distance of 3, and 6 means two octaves in one of them, or one octave in two.
# Farther away the tile grid, and with it the fastest config, is another one; the heuristic at least takes the shape
# into account.
MAX_DISTANCE = 6.0
# Limit for every single dimension, also in an op of a single array.
MAX_OCTAVES = 2.0
# Rounds distances so that those equal on paper compare equal, in whatever order their logarithms were added.
_DIGITS = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbour:
    """An entry of a table near a call.

    Attributes:
      configs: the entry's configs, best first.
      distance: distance in octaves, summed over all dimensions of all arrays.
    """

    key: str
    configs: tuple[Any, ...]
    distance: float


class NearestTable:
    """The entries of a tuned table, grouped by key without sizes, so that a lookup compares few of them."""

    def __init__(self, entries: Iterable[tuple[Hashable, tuple[Any, ...]]]):
        forms: dict[str, list[tuple[str, tuple[int, ...], tuple[Any, ...]]]] = {}
        for key, configs in entries:
            form = _form(key)
            if form is not None:
                forms.setdefault(form[0], []).append((str(key), form[1], configs))
        self._groups = {skeleton: _Group(found) for skeleton, found in forms.items()}

    def neighbours(self, key: str) -> Iterator[Neighbour]:
        """Yields the entries within the limits, nearest first; ties in the order of their keys."""
        form = _form(key)
        group = None if form is None else self._groups.get(form[0])
        if form is None or group is None:
            return
        octaves = np.abs(group.octaves - _octaves([form[1]]))
        distances = np.round(octaves.sum(axis=0), _DIGITS)
        within = np.round(octaves.max(axis=0, initial=0.0), _DIGITS) <= MAX_OCTAVES
        near = np.flatnonzero(within & (distances <= MAX_DISTANCE))
        for i in near[np.argsort(distances[near], kind="stable")]:
            if group.keys[i] != key:
                yield Neighbour(group.keys[i], group.configs[i], float(distances[i]))


class _Group:
    """Entries that differ only in sizes, in the order of their keys."""

    def __init__(self, found: list[tuple[str, tuple[int, ...], tuple[Any, ...]]]):
        found.sort(key=lambda entry: entry[0])
        self.keys = [key for key, _, _ in found]
        self.octaves = _octaves([sizes for _, sizes, _ in found])
        self.configs = [configs for _, _, configs in found]


def _octaves(sizes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Logarithms of several lists of sizes, one column each: sums over long rows are several times faster."""
    return np.log2(np.array(sizes, np.float64).T.copy())


def _form(key: Hashable) -> tuple[str, tuple[int, ...]] | None:
    """A key without its sizes, and the sizes in order; ``None`` if it is not the key of a call."""
    if not isinstance(key, str | bytes | bytearray):
        return None
    try:
        parsed = json.loads(key)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    sizes: list[int] = []
    mapped = [[[_blank(size, sizes) for _ in range(sum(flags))], flags] for size, flags in parsed.pop("mapped", ())]
    return canonical_json([_without_sizes(parsed, sizes), mapped]), tuple(sizes)


def _without_sizes(value: Json, sizes: list[int]) -> Json:
    if isinstance(value, list):
        return [_without_sizes(part, sizes) for part in value]
    if not isinstance(value, dict):
        return value
    array = value.get("$array")
    shape = array.get("shape") if isinstance(array, dict) else None
    if isinstance(array, dict) and isinstance(shape, list):
        return {"$array": array | {"shape": [_blank(size, sizes) for size in shape]}}
    return {name: _without_sizes(part, sizes) for name, part in sorted(value.items())}


def _blank(size: Json, sizes: list[int]) -> Json:
    """Appends a size to ``sizes`` and returns a placeholder; returns 0 and symbolic sizes unchanged."""
    if type(size) is not int or size < 1:
        return size
    sizes.append(size)
    return None
