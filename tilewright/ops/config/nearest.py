"""The nearest shape in a tuned table: what a call without an entry of its own may borrow.

The distance of two calls is the sum over all dimensions of all arrays of ``|log2(a / b)|``, in octaves. Two calls
that differ in anything else than sizes (op, version, direction, device, dtypes, ranks, static arguments, which axes are
mapped, which dimensions are 0) are infinitely far from each other. An axis mapped by ``vmap`` is a dimension of every
array that it maps.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tilewright.ops.utils.serialize import Json, canonical_json

# A size that a call has in one array it has in several: of attention, batch, length and heads each stand in query, key
# and value. So an octave of one of them is a distance of 3, and 6 is two octaves of one of them, or one octave of two.
# Beyond that the grid of tiles, and with it what is fastest, is another one, and the heuristic at least looks at it.
MAX_DISTANCE = 6.0
# No dimension alone may differ by more, in an op of a single array neither.
MAX_OCTAVES = 2.0
# Distances that are equal on paper are equal here, whatever the order in which their logarithms were added.
_DIGITS = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbour:
    """An entry of a table near to a call.

    Attributes:
      configs: those of the entry, best first.
      distance: in octaves, summed over all dimensions of all arrays.
    """

    key: str
    configs: tuple[Any, ...]
    distance: float


class NearestTable:
    """The entries of a tuned table by all of their key but the sizes, so that a look at one call reads few of them."""

    def __init__(self, entries: Iterable[tuple[Hashable, tuple[Any, ...]]]):
        forms: dict[str, list[tuple[str, tuple[int, ...], tuple[Any, ...]]]] = {}
        for key, configs in entries:
            form = _form(key)
            if form is not None:
                forms.setdefault(form[0], []).append((str(key), form[1], configs))
        self._groups = {skeleton: _Group(found) for skeleton, found in forms.items()}

    def neighbours(self, key: str) -> Iterator[Neighbour]:
        """The entries within the limits, nearest first, those at the same distance in the order of their keys."""
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
    """Entries that differ in sizes alone, in the order of their keys."""

    def __init__(self, found: list[tuple[str, tuple[int, ...], tuple[Any, ...]]]):
        found.sort(key=lambda entry: entry[0])
        self.keys = [key for key, _, _ in found]
        self.octaves = _octaves([sizes for _, sizes, _ in found])
        self.configs = [configs for _, _, configs in found]


def _octaves(sizes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Logarithms of several lists of sizes, a column for each: sums over long rows are several times faster."""
    return np.log2(np.array(sizes, np.float64).T.copy())


def _form(key: Hashable) -> tuple[str, tuple[int, ...]] | None:
    """A key without its sizes, and these in order; ``None`` for a key that is none of a call."""
    if not isinstance(key, str | bytes | bytearray):
        return None
    try:
        said = json.loads(key)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    sizes: list[int] = []
    mapped = [[[_blank(size, sizes) for _ in range(sum(which))], which] for size, which in said.pop("mapped", ())]
    return canonical_json([_without_sizes(said, sizes), mapped]), tuple(sizes)


def _without_sizes(said: Json, sizes: list[int]) -> Json:
    if isinstance(said, list):
        return [_without_sizes(part, sizes) for part in said]
    if not isinstance(said, dict):
        return said
    array = said.get("$array")
    shape = array.get("shape") if isinstance(array, dict) else None
    if isinstance(array, dict) and isinstance(shape, list):
        return {"$array": array | {"shape": [_blank(size, sizes) for size in shape]}}
    return {name: _without_sizes(part, sizes) for name, part in sorted(said.items())}


def _blank(size: Json, sizes: list[int]) -> Json:
    """A placeholder for a size, which is noted; 0, and the expressions of shape-polymorphic exports, as they are."""
    if type(size) is not int or size < 1:
        return size
    sizes.append(size)
    return None
