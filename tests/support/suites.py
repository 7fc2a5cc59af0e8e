"""The three suites, each within the next: ``make quick``, ``make test``, ``make test-full``.

A test without a marker is in all three, one marked ``slow`` is not in ``make quick``, and one marked ``full`` is only
in ``make test-full``. `sampled`, `crossed` and `covered` mark the parameters of one test.
"""

import collections
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

SUITES = ("quick", "test", "full")
LEFT_OUT = {"quick": {"slow", "full"}, "test": {"full"}, "full": set[str]()}
"""The markers whose tests a suite leaves out."""


def sampled(
    values: Iterable[Any],
    *,
    test: Collection[Any],
    quick: Collection[Any] = (),
    key: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Parameters of a test: ``make quick`` runs those that ``quick`` names, ``make test`` those of ``test``, too.

    Args:
      values: All parameters, each a value or, for several arguments, a tuple of values; a value that is a tuple stands
        in a tuple of its own.
      test: The keys of those for ``make test``.
      quick: The keys of those for ``make quick``, too.
      key: What a parameter is named by; the parameter itself unless given.

    Raises:
      ValueError: ``test`` or ``quick`` names what is not among the values.
    """
    values = list(values)
    known = [key(value) for value in values]
    if missing := [name for name in (*test, *quick) if name not in known]:
        raise ValueError(f"there is no parameter {missing}, there are {known}")
    return [
        _marked(value, "" if name in quick else "slow" if name in test else "full")
        for name, value in zip(known, values, strict=True)
    ]


def crossed(*axes: Iterable[Any], times: int = 1, quick: int = 0) -> list[Any]:
    """All combinations of the values of several axes; ``make test`` runs those that `covered` chooses."""
    return covered(itertools.product(*axes), lambda row: list(enumerate(map(repr, row))), times=times, quick=quick)


def covered(
    values: Iterable[Any],
    properties: Callable[[Any], Collection[Hashable]],
    *,
    where: Callable[[Any], bool] = lambda value: True,
    times: int = 1,
    quick: int = 0,
) -> list[Any]:
    """Parameters of a test; ``make test`` runs some of them, in which every property occurs.

    Args:
      values: All parameters.
      properties: What of a parameter is to occur, for each of its fields say.
      where: Which parameters may be chosen: those that are not skipped.
      times: How often each property is to occur at least, unless it is rarer than that.
      quick: How many of those chosen are in ``make quick``, too.
    """
    values = list(values)
    places = [index for index, value in enumerate(values) if where(value)]
    chosen = [places[i] for i in covering([properties(values[place]) for place in places], times)]
    suites = {place: "" if order < quick else "slow" for order, place in enumerate(chosen)}
    return [_marked(value, suites.get(index, "full")) for index, value in enumerate(values)]


def covering(rows: Sequence[Collection[Hashable]], times: int = 1) -> list[int]:
    """The places of some rows, in which every element of all rows occurs ``times`` times, or as often as in all.

    Greedy: the row that adds most comes next; among equals the one whose elements occurred least.
    """
    counts = collections.Counter(itertools.chain(*rows))
    missing = {element: min(times, count) for element, count in counts.items()}
    used: collections.Counter[Hashable] = collections.Counter()
    chosen: list[int] = []
    while any(used[element] < count for element, count in missing.items()):

        def gain(index: int) -> tuple[int, int]:
            row = rows[index]
            return sum(used[each] < missing[each] for each in row), -sum(used[each] for each in row)

        best = max((index for index in range(len(rows)) if index not in chosen), key=gain)
        chosen.append(best)
        used.update(rows[best])
    return chosen


def _marked(value: Any, suite: str) -> Any:
    marks = (getattr(pytest.mark, suite),) if suite else ()
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
