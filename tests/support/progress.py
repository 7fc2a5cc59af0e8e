"""A line about how far a run is, in place of a dot for each test."""

import time
from typing import Any

import pytest

from tests.support.suites import recorded

SECONDS_BETWEEN = 10.0


class Progress:
    """Writes a line every few seconds, from the process that collects the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._written = time.monotonic()
        self._total = self._unmeasured = 0
        self._done: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected(ids)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._unmeasured:
            terminalreporter.write_line(
                f"{self._unmeasured} of these tests are in every suite until `make test-costs` has measured them"
            )

    def _collected(self, ids: list[str]) -> None:
        if ids:  # the process that only collects reports has none of its own
            self._total, self._unmeasured = len(ids), len(set(ids) - set(recorded()))

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
