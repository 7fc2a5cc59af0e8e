"""A plugin of pytest: which tests of a run touch which lines, and how long each takes.

With ``--record FOLDER`` a run under ``coverage`` writes that there. With ``--tests-in FILE`` a run takes the tests that
a file lists, one a line, in that order. ``--failed-in`` and ``--suites-in`` name files to write.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="the folder in which what tests touch is written")
    parser.addoption("--suites-in", type=Path, help="the file in which the suite of each test is written")
    parser.addoption("--tests-in", type=Path, help="the file that lists the tests to run, in their order")
    parser.addoption("--failed-in", type=Path, help="the file in which the tests that fail are written")


def pytest_configure(config: pytest.Config) -> None:
    folder, failed = config.getoption("--record"), config.getoption("--failed-in")
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if folder is not None and runs_tests:
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(folder))
    if failed is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(failed))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--suites-in") is not None:
        config.getoption("--suites-in").write_text(json.dumps({item.nodeid: "test" for item in items}))
    wanted = config.getoption("--tests-in")
    if wanted is None:
        return
    place = {name: index for index, name in enumerate(wanted.read_text().splitlines())}
    left_out = [item for item in items if item.nodeid not in place]
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
    config.hook.pytest_deselected(items=left_out)


class Failures:
    """Writes the name of each test that fails, and of each module that cannot be imported."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")


class Recorder:
    """Writes a line of JSON for each test, a file for each process."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            data_file=str(folder / "lines"), data_suffix=True, source=[str(ROOT / "tilewright")]
        )
        self._coverage.set_option("run:concurrency", ["thread"])
        self._opened: set[str] = set()
        self._file = (folder / f"tests-{os.getpid()}.jsonl").open("w")
        self._seconds: dict[str, float] = {}
        sys.addaudithook(self._audit)
        self._coverage.start()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":  # a compiler: whatever is in a folder that it is given
            self._opened.update(str(each).removeprefix("-I") for each in arguments[1])
        elif event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith((".py", ".pyc")):
            self._opened.add(arguments[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        self._opened.clear()
        self._seconds[item.nodeid] = 0.0
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")
            line = {
                "test": item.nodeid,
                "seconds": round(self._seconds[item.nodeid], 3),
                "opened": sorted(
                    str(Path(name).resolve().relative_to(ROOT))
                    for name in self._opened
                    if Path(name).resolve().is_relative_to(ROOT / "tilewright")
                ),
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._file.close()
