"""The three suites, each within the next: ``make quick``, ``make test``, ``make test-full``.

Which tests are in them is computed from what tests cost and catch (`tools.suites`) and recorded in
``tests/suites/tests.txt``: the path of a module, then a line for each of its tests with its suite, its processor
seconds and the rest of its id. A test without a line is in every suite until it is measured.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Final

SUITES: Final = ("quick", "test", "full")
FOLDER: Final = Path(__file__).parent.parent / "suites"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A test's smallest suite, and the processor seconds that it takes."""

    suite: str
    seconds: float

    def is_in(self, suite: str) -> bool:
        """True if a suite runs the test: its smallest, and those around it."""
        return SUITES.index(self.suite) <= SUITES.index(suite)


def read(file: Path) -> dict[str, Recorded]:
    """What is recorded in a file, by test id."""
    found, module = {}, ""
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith(" "):
            suite, seconds, name = line.split(maxsplit=2)
            found[f"{module}::{name}"] = Recorded(suite, float(seconds))
        else:
            module = line
    return found


def write(file: Path, tests: dict[str, Recorded]) -> None:
    """Records tests, sorted by id."""
    lines, last = [], ""
    for test in sorted(tests):
        module, _, name = test.partition("::")
        if module != last:
            lines.append(module)
            last = module
        recorded = tests[test]
        lines.append(f" {recorded.suite:5} {recorded.seconds:6.2f} {name}")
    file.write_text("\n".join(lines) + "\n")


@functools.cache
def recorded() -> dict[str, Recorded]:
    """What is recorded of the tests of this repository."""
    return read(FOLDER / "tests.txt")


def runs(test: str, suite: str) -> bool:
    """True if a suite runs a test."""
    known = recorded().get(test)
    return known is None or known.is_in(suite)


def suites_of() -> dict[str, str]:
    """The smallest suite of each recorded test."""
    return {test: each.suite for test, each in recorded().items()}


def costs() -> dict[str, float]:
    """The processor seconds of each recorded test."""
    return {test: each.seconds for test, each in recorded().items()}
