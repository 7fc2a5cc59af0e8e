"""A line about how far a run is, in place of a dot for each test."""

import time
from typing import Any

import pytest

SECONDS_BETWEEN = 10.0


class Progress:
    """Writes a line every few seconds, from the process that collects the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._written = time.monotonic()
        self._total = 0
        self._done: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._total = len(items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._total -= len(items)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No letter for what passes: the line says how many did."""
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", "PASSED"
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" or report.failed:
            self._done.add(report.nodeid)
        if time.monotonic() - self._written >= SECONDS_BETWEEN:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        minutes, seconds = divmod(int(self._written - self._began), 60)
        done, total = len(self._done), max(self._total, 1)
        line = (
            f"{done:5} of {total} tests, {100 * done // total:3} %, {len(self._failed)} failed, {minutes}:{seconds:02}"
        )
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)
