"""What is recorded of tests, and the choice of those that `make quick` and `make test` run."""

import pytest

from tests.support.suites import FOLDER, Recorded, read, recorded, write
from tools.suites.__main__ import merged
from tools.suites.choose import BUDGETS, Facts, choose

SECONDS = {
    **{f"tests/test_norm.py::test_cases[{i}]": 1.0 + i / 10 for i in range(20)},
    "tests/test_norm.py::test_slow": 30.0,
    "tests/test_norm.py::test_long": 300.0,
    "tests/test_docs.py::test_page[README.md]": 40.0,
    "tests/test_other.py::test_cheap": 0.01,
}
FACTS = Facts(
    seconds=SECONDS,
    reached={
        "Norm.forward": ["tests/test_norm.py::test_cases[7]", "tests/test_norm.py::test_slow"],
        "Norm.backward norm vmap": ["tests/test_norm.py::test_slow"],
    },
    caught={
        "wrong": ["tests/test_norm.py::test_cases[9]", "tests/test_norm.py::test_slow"],
        "gone": ["tests/test_norm.py::test_that_was_renamed"],
    },
    now={},
)


def suites(facts: Facts, **budgets: float) -> dict[str, str]:
    return {test: each.suite for test, each in choose(facts, budgets or {"quick": 5.0, "test": 90.0}).items()}


def test_the_choice():
    chosen = suites(FACTS)
    assert chosen["tests/test_norm.py::test_cases[7]"] == "quick"  # the direction
    assert chosen["tests/test_norm.py::test_cases[9]"] == "quick"  # the defect
    assert chosen["tests/test_other.py::test_cheap"] == "quick"
    assert chosen["tests/test_norm.py::test_slow"] == "test"  # the one under vmap
    assert chosen["tests/test_docs.py::test_page[README.md]"] == "test"
    assert chosen["tests/test_norm.py::test_long"] == "full"
    assert set(chosen) == set(SECONDS)


def test_budgets_hold_but_for_what_the_floor_needs():
    for budgets in ({"quick": 3.0, "test": 80.0}, {"quick": 20.0, "test": 100.0}):
        chosen = choose(FACTS, budgets)
        for suite, budget in budgets.items():
            assert sum(SECONDS[test] for test, each in chosen.items() if each.is_in(suite)) <= budget
    least = suites(FACTS, quick=0.0, test=0.0)
    assert {test for test, suite in least.items() if suite == "test"} == {
        "tests/test_norm.py::test_slow",
        "tests/test_docs.py::test_page[README.md]",
    }


def test_what_is_chosen_stays_while_it_is_as_useful():
    """Where two tests do the same, a new measurement alone moves neither; a much cheaper one takes the place."""
    tests = {f"tests/test_{name}.py::test_it[{name}]": 2.0 for name in "ab"}
    facts = Facts(tests, {"Norm.forward": list(tests)}, {}, {})
    first, second = sorted(tests)
    assert suites(facts, quick=2.5)[first] == "quick"
    now = {first: "full", second: "quick"}
    assert suites(Facts(tests | {first: 1.6}, facts.reached, {}, now), quick=2.5)[second] == "quick"
    assert suites(Facts(tests | {first: 0.6}, facts.reached, {}, now), quick=2.5)[first] == "quick"


def test_a_new_op_takes_its_share_from_what_catches_nothing_new():
    before = choose(FACTS, {"quick": 5.0, "test": 90.0})
    new = {f"tests/test_toy.py::test_cases[{i}]": 2.0 for i in range(5)}
    facts = Facts(
        SECONDS | new,
        dict(FACTS.reached) | {"Toy.forward": list(new), "Toy.backward": list(new)[2:3]},
        dict(FACTS.caught) | {"toy": list(new)[4:]},
        {test: each.suite for test, each in before.items()},
    )
    after = choose(facts, {"quick": 5.0, "test": 90.0})
    within = [test for test, each in after.items() if each.suite != "full"]
    assert {test for test in within if test in new} >= {list(new)[2], list(new)[4]}
    assert sum(facts.seconds[test] for test in within) <= 90.0
    gone = {test for test, each in before.items() if each.suite != "full"} - set(within)
    assert all("test_cases" in test for test in gone)


def test_measurements_take_the_place_of_older_ones():
    tests = {"tests/a.py::one": Recorded("quick", 1.0), "tests/a.py::two": Recorded("test", 2.0)}
    reached = {"Norm.forward": ["tests/a.py::one"], "Norm.backward": ["tests/a.py::one", "tests/a.py::two"]}
    lines = [
        {"test": "tests/a.py::one", "seconds": 1.2, "skipped": False, "reached": ["Norm.backward"]},
        {"test": "tests/a.py::new", "seconds": 0.5, "skipped": False, "reached": ["Norm.backward"]},
        {"test": "tests/a.py::left out", "seconds": 0.1, "skipped": True, "reached": ["Norm.forward"]},
    ]
    found, now = merged(tests, reached, lines)
    assert found["tests/a.py::one"] == Recorded("quick", 1.0)  # within what two measurements differ by
    assert found["tests/a.py::new"] == Recorded("full", 0.5)
    assert now == {"Norm.backward": ["tests/a.py::new", "tests/a.py::one", "tests/a.py::two"]}
    (longer,) = merged(tests, {}, [lines[0] | {"seconds": 1.5}])[:1]
    assert longer["tests/a.py::one"].seconds == 1.5


def test_records_are_written_and_read(tmp_path):
    tests = {
        "tests/b.py::test_it[a  b - c]": Recorded("quick", 0.25),
        "tests/b.py::TestIt::test_it": Recorded("full", 12.5),
        "tests/a.py::test_it": Recorded("test", 1.0),
    }
    write(tmp_path / "tests.txt", tests)
    assert read(tmp_path / "tests.txt") == tests
    assert read(tmp_path / "nothing.txt") == {}


@pytest.mark.parametrize("suite", BUDGETS)
def test_the_recorded_suites_keep_to_their_budgets(suite: str):
    """What is chosen costs what was planned; where the floor needs more, tests must become cheaper."""
    assert sum(each.seconds for each in recorded().values() if each.is_in(suite)) <= BUDGETS[suite]


def test_the_recorded_tests_are_sorted_as_they_are_written(tmp_path):
    write(tmp_path / "tests.txt", recorded())
    assert (tmp_path / "tests.txt").read_text() == (FOLDER / "tests.txt").read_text()
