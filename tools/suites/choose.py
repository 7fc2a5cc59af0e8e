"""Which tests `make quick` and `make test` run: as much as their budgets of processor time buy.

First comes what is needed: each direction of each backend under each op and transformation that any test reaches,
each example of the contract, each page, each table that ships, and each planted defect, by the tests that have most of
it for their time. `make test` has all of that, whatever it costs; of `make quick` it fills the budget. What is left of
a budget is for test functions that have not run, and then for further parameters of those that have.
"""

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from tests.support.suites import SUITES, Recorded

BUDGETS: Final = {"quick": 100.0, "test": 850.0}
"""Processor seconds of the tests of a suite: on two cores what collecting, ruff and mypy leave of 3 and 10 minutes."""
ALWAYS: Final = tuple(
    f"tests/{module}.py::" for module in ("test_reference_examples", "test_docs", "kernels/test_shipped_tables")
)
"""Where every test belongs to the floor: the examples of the contract, the pages, and the tables that ship."""
FURTHER: Final = 0.1
"""The worth of a second set of parameters of a function, where the first has 1; of a third half of that, and so on."""
STAYS: Final = 0.6
"""A test that is in a suite counts as that much cheaper, so that a new measurement alone changes little."""
AT_LEAST: Final = 0.02
"""Seconds: what pytest takes for any test."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of tests.

    Attributes:
      seconds: of each test, in processor time.
      reached: the cheapest tests that reach each element of the floor.
      caught: the tests known to catch each planted defect.
      now: the smallest suite of each test as it was chosen last.
    """

    seconds: Mapping[str, float]
    reached: Mapping[str, Collection[str]]
    caught: Mapping[str, Collection[str]]
    now: Mapping[str, str]


def function_of(test: str) -> str:
    return test.partition("[")[0]


def choose(facts: Facts, budgets: Mapping[str, float] = BUDGETS) -> dict[str, Recorded]:
    """The smallest suite of each test."""
    chosen: dict[str, str] = {}
    for suite, budget in budgets.items():
        for test in _chosen(facts, suite, budget, chosen):
            chosen[test] = suite
    return {test: Recorded(chosen.get(test, SUITES[-1]), seconds) for test, seconds in facts.seconds.items()}


def _chosen(facts: Facts, suite: str, budget: float, before: Collection[str]) -> list[str]:
    """The tests that a suite has beside those of smaller ones."""
    wants = _wants(facts, whole=suite != SUITES[0])
    covered = set(itertools.chain.from_iterable(wants.get(test, ()) for test in before))
    smaller = SUITES[: SUITES.index(suite) + 1]

    def price(test: str) -> float:
        return max(facts.seconds[test], AT_LEAST) * (STAYS if facts.now.get(test) in smaller else 1.0)

    def wanted(test: str) -> float:
        return len(wants[test] - covered) / price(test)

    left = budget - sum(facts.seconds[test] for test in before)
    found = []
    for test in _best(set(wants) - set(before), wanted):
        if suite == SUITES[0] and facts.seconds[test] > left:
            continue
        found.append(test)
        covered |= wants[test]
        left -= facts.seconds[test]
    for test in _superfluous(found, before, wants, facts.seconds):
        found.remove(test)
        left += facts.seconds[test]

    functions = Counter(map(function_of, [*before, *found]))

    def new(test: str) -> float:
        count = functions[function_of(test)]
        return (FURTHER / count if count else 1.0) / price(test)

    for test in _best(facts.seconds.keys() - set(before) - set(found), new):
        if facts.seconds[test] <= left:
            found.append(test)
            functions[function_of(test)] += 1
            left -= facts.seconds[test]
    return found


def _best(tests: Iterable[str], worth: Callable[[str], float]) -> Iterator[str]:
    """Tests, the one with the most worth next, while there is any; worth may fall when one is taken, but never rise."""
    queue = [(-worth(test), test) for test in tests]
    heapq.heapify(queue)
    while queue:
        known, test = heapq.heappop(queue)
        if (now := -worth(test)) > known:  # others may be worth more by now
            heapq.heappush(queue, (now, test))
        elif now:
            yield test


def _superfluous(
    found: Collection[str], before: Iterable[str], wants: Mapping[str, set[str]], seconds: Mapping[str, float]
) -> Iterator[str]:
    """Tests of which all that they were chosen for is in others, chosen later; the dearest first."""
    counts = Counter(itertools.chain.from_iterable(wants.get(test, ()) for test in [*before, *found]))
    for test in sorted(found, key=lambda test: (-seconds[test], test)):
        if all(counts[element] > 1 for element in wants[test]):
            counts.subtract(wants[test])
            yield test


def _wants(facts: Facts, whole: bool) -> dict[str, set[str]]:
    """What each test is wanted for; of `make quick` each direction of a backend once, without pages and examples."""
    wants: dict[str, set[str]] = {}

    def add(element: str, tests: Iterable[str]) -> None:
        for test in tests:
            if test in facts.seconds:
                wants.setdefault(test, set()).add(element)

    for element, tests in facts.reached.items():
        if whole or " " not in element:
            add(element, tests)
    for defect, tests in facts.caught.items():
        add(f"defect {defect}", tests)
    if whole:
        for test in facts.seconds:
            if test.startswith(ALWAYS):
                add(test, [test])
    return wants
