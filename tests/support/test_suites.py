"""What each suite runs of a test with many parameters."""

import itertools

import pytest

from tests.support.suites import covered, covering, crossed, sampled


def marks_of(parameters):
    return [[mark.name for mark in parameter.marks] for parameter in parameters]


def test_sampled_marks_what_is_not_named():
    assert marks_of(sampled("abcd", test="b", quick="d")) == [["full"], ["slow"], ["full"], []]
    pairs = sampled([("a", 1), ("b", 2)], test=["a"], key=lambda pair: pair[0])
    assert [parameter.values for parameter in pairs] == [("a", 1), ("b", 2)]
    assert marks_of(pairs) == [["slow"], ["full"]]


def test_sampled_refuses_a_name_that_is_not_there():
    with pytest.raises(ValueError, match="no parameter"):
        sampled("abc", test="d")


@pytest.mark.parametrize("times", [1, 2, 5])
def test_every_value_of_every_axis_is_covered(times: int):
    axes = range(7), "abc", (None, 2.0)
    rows = [tuple(enumerate(row)) for row in itertools.product(*axes)]
    chosen = covering(rows, times)
    assert len(set(chosen)) == len(chosen) <= 7 * times + 1
    for column, values in enumerate(axes):
        counts = [sum(rows[index][column] == (column, value) for index in chosen) for value in values]
        assert min(counts) >= min(times, len(rows) // len(values))
        assert max(counts) - min(counts) <= times  # balanced


def test_crossed_runs_all_combinations_in_the_full_suite():
    parameters = crossed(range(4), "ab", quick=2)
    assert [parameter.values for parameter in parameters] == list(itertools.product(range(4), "ab"))
    kinds = [marks or ["quick"] for marks in marks_of(parameters)]
    assert kinds.count(["quick"]) == 2
    assert kinds.count(["slow"]) == 2
    assert kinds.count(["full"]) == 4


def test_covered_chooses_among_what_is_not_skipped():
    words = ["ab", "bc", "ca", "abc"]
    assert marks_of(covered(words, set)) == [["full"], ["full"], ["full"], ["slow"]]
    short = covered(words, set, where=lambda word: len(word) == 2, quick=1)
    assert marks_of(short) == [[], ["slow"], ["full"], ["full"]]
