"""The benchmark of first calls, with the calls of the tests on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import first_call
from tilewright.kernels import kernel


def test_each_process_is_timed_and_the_next_ones_find_the_caches(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "first_call.json"
    assert first_call.main(["--small", "--ops", "rms_norm", "--rounds", "1", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["when"], cell["jax_cache"]) for cell in cells] == [
        ("fresh", False), ("next", False), ("fresh", True), ("next", True),
    ]  # fmt: skip
    for cell in cells:
        for process in cell["processes"]:
            assert process["seconds"].keys() == set(first_call.STAGES)
            assert all(seconds > 0 for seconds in process["seconds"].values())
    hits = [cell["processes"][0]["cache_hits"] for cell in cells]
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0
    assert capfd.readouterr().out.count("rms_norm") == 4


def test_a_process_that_fails_is_told():
    cell = {"op": "sample", "when": "fresh", "jax_cache": False, "processes": [{"error": "ValueError: no"}]}
    assert "failed: ValueError: no" in first_call.line(cell)


@pytest.mark.parametrize("op", first_call.CASES)
def test_the_sizes_are_fields_of_the_cases(op: str):
    case = next(iter(kernel(op).cases.of_device("gpu").values()))
    assert all(hasattr(case, name) for name in first_call.CASES[op])
