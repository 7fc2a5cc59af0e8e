"""A plugin of pytest: tests in the order of a plan, up to a number of failures, and what became of each.

With ``--plan FILE`` a run takes the plan's tests in its order, and with ``--events FILE`` it writes a line for each
that begins, fails or is finished: a process that a test ends has said in which test it was.
"""

import time
from pathlib import Path

import msgspec
import pytest

UNKNOWN = 1.0
"""Seconds of a test whose cost nobody has recorded."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tests to run: all of the first stage, cheapest first, then those of the next.

    Attributes:
      stages: files, folders and tests.
      costs: seconds of tests.
      dearest: seconds above which a test is left out.
      enough: failures after which the run ends.
      after: seconds after the first failure in which others are looked for.
      limit: seconds for all tests together.
      timeout: seconds after which a test hangs.
    """

    stages: tuple[tuple[str, ...], ...]
    costs: dict[str, float] = {}
    dearest: float = 1e9
    enough: int = 4
    after: float = 20.0
    limit: float = 1e9
    timeout: float = 300.0

    def of_stages(self, which: slice) -> "Plan":
        """The plan of some of the stages."""
        return msgspec.structs.replace(self, stages=self.stages[which])

    def paths(self) -> list[str]:
        """What pytest is given: files and folders, none of which is in another."""
        found = {place.partition("::")[0] for stage in self.stages for place in stage}
        return sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))

    def stage(self, test: str) -> int:
        """The first stage that a test belongs to; their number, if it belongs to none."""
        file = test.partition("::")[0]
        for index, stage in enumerate(self.stages):
            if test in stage or file in stage or any(file.startswith(f"{place}/") for place in stage):
                return index
        return len(self.stages)

    def cost(self, test: str) -> float:
        return self.costs.get(test, UNKNOWN)


class Event(msgspec.Struct, frozen=True):
    """What happens to a test, ``began``, ``failed`` and ``finished``, or to the run, ``stopped`` and ``ended``."""

    what: str
    test: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plan", type=Path, help="the file of the plan")
    parser.addoption("--events", type=Path, help="the file in which is written what becomes of the tests")


def pytest_configure(config: pytest.Config) -> None:
    plan, events = config.getoption("--plan"), config.getoption("--events")
    if plan is not None and events is not None:
        config.pluginmanager.register(Run(msgspec.json.decode(plan.read_bytes(), type=Plan), events))


class Run:
    """A run by plan."""

    def __init__(self, plan: Plan, events: Path) -> None:
        self._plan, self._file = plan, events.open("ab", buffering=0)
        self._began = time.monotonic()
        self._failed: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        plan, count = self._plan, len(self._plan.stages)
        place = {item: (plan.stage(item.nodeid), plan.cost(item.nodeid)) for item in items}
        left_out = [item for item in items if place[item][0] == count or place[item][1] > plan.dearest]
        items[:] = sorted(set(items) - set(left_out), key=lambda item: (*place[item], item.nodeid))
        config.hook.pytest_deselected(items=left_out)
        self._began = time.monotonic()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("finished", nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        done = yield
        now, plan = time.monotonic(), self._plan
        first = next(iter(self._failed.values()), now)
        if len(self._failed) >= plan.enough or now - first > plan.after or now - self._began > plan.limit:
            item.session.shouldstop = "the plan is done"
            if nextitem is not None:
                self._write("stopped", "")
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.shouldstop:
            self._write("ended", "")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, time.monotonic())
            self._write("failed", report.nodeid)

    def _write(self, what: str, test: str) -> None:
        self._file.write(msgspec.json.encode(Event(what, test)) + b"\n")
