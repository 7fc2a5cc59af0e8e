"""The line that says how far a run is."""

import types

from tests.support import progress


def test_a_line_counts_what_has_finished_and_what_failed(monkeypatch):
    lines = []
    reporter = types.SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append)
    config = types.SimpleNamespace(pluginmanager=types.SimpleNamespace(get_plugin=lambda name: reporter))
    shown = progress.Progress(config)
    shown.pytest_xdist_node_collection_finished(["a", "b", "c", "d"])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    reports = [("a", "call", False), ("a", "teardown", False), ("b", "call", True), ("b", "teardown", False)]
    for test, when, failed in reports:
        shown.pytest_runtest_logreport(types.SimpleNamespace(nodeid=test, when=when, failed=failed))
    assert [line.split(", ")[:3] for line in lines] == [
        ["    0 of 4 tests", "  0 %", "0 failed"],
        ["    1 of 4 tests", " 25 %", "0 failed"],
        ["    2 of 4 tests", " 50 %", "1 failed"],
        ["    2 of 4 tests", " 50 %", "1 failed"],
    ]


def test_what_passes_has_no_letter_of_its_own():
    shown = progress.Progress(None)
    status = lambda **fields: shown.pytest_report_teststatus(types.SimpleNamespace(**fields))
    assert status(when="call", passed=True) == ("passed", "", "PASSED")
    assert status(when="call", passed=False) is None
    assert status(when="setup", passed=True) is None
