"""The limits that keep the source readable: sizes of functions and files, comments, docstrings.

Files in CUDA C++ have the limit of lines that files in Python have.
"""

import re

import pytest

from tools.counts import ROOT, Count, counts_of


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    return counts_of(ROOT / "tilewright")


def numbers(count: Count) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", count.value)]


def test_functions_and_files_are_short(counts):
    typical, longest = numbers(counts["functions"])
    assert typical <= 25, counts["functions"].behind[:5]
    assert longest <= 150, counts["functions"].behind[:5]
    assert numbers(counts["files"])[1] <= 600, counts["files"].behind[:5]
    assert any(said.endswith(".cuh") for said in counts["files"].behind)


def test_docstrings_are_a_fifth_at_most_and_begin_with_a_verb_or_the_thing(counts):
    assert 10 <= numbers(counts["docstrings"])[0] <= 20
    assert counts["questions"].behind == []


def test_nothing_else_grows(counts):
    assert counts["folders"].behind == []
    assert numbers(counts["any"])[0] <= 5, counts["any"].behind[:5]
    assert numbers(counts["comments"])[0] >= 2, counts["comments"].behind[:5]
