"""What each test touches: recorded by one run of a suite, and read to put the tests that matter first."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.defects import ROOT, Defect

# tests/tools checks the defects against the code, and would find every one of them.
PYTEST = [
    "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "tools.mutants.recorder",
    "-o", "addopts=--strict-markers --import-mode=importlib", "--ignore=tests/aot", "--ignore=tests/tools",
]  # fmt: skip
WITHOUT_GPU = ["--ignore=tests/gpu"]


def environment(root: Path) -> dict[str, str]:
    """That of a run of the tests of a copy: every Python process imports the copy's package."""
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    ours = {"PYTHONPATH": path, "TILEWRIGHT_HYPOTHESIS_PROFILE": "ci", "PYTHONDONTWRITEBYTECODE": "1"}
    # Programs that a defect leaves as they are need not be compiled again: tests/conftest.py.
    return {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), **os.environ, **ours}


def record(folder: Path, paths: list[str], jobs: int) -> None:
    """Runs tests of `make test` under coverage, all if no paths are given, and writes what they touch."""
    for old in [] if paths else [*folder.glob("tests-*.jsonl"), *folder.glob("lines*")]:
        old.unlink()
    arguments = [*PYTEST, *WITHOUT_GPU, "--record", str(folder), "-n", str(jobs), "--dist", "worksteal", *paths]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment(ROOT), check=True)
    import coverage

    data = coverage.CoverageData(str(folder / "lines"))
    data.read()
    for part in sorted(folder.glob("lines.*")):
        piece = coverage.CoverageData(str(part))
        piece.read()
        data.update(piece)
    data.write()
    for part in folder.glob("lines.*"):
        part.unlink()


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One test of the recorded run."""

    test: str
    suite: str
    seconds: float
    opened: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


def _suites(file: Path) -> dict[str, str]:
    """The suite of each test that there is by now."""
    arguments = [*PYTEST, *WITHOUT_GPU, "--collect-only", "--suite", "full", "--suites-in", str(file)]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment(ROOT), check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())


class Contexts:
    """A recorded run."""

    def __init__(self, folder: Path) -> None:
        parts = sorted(folder.glob("tests-*.jsonl"), key=lambda part: part.stat().st_mtime)
        if not parts:
            raise ValueError(f"nothing is recorded in {folder}: run `python -m tools.mutants record` first")
        lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        self.suites = suites = _suites(folder / "suites.json")
        self.tests = {
            line["test"]: Recorded(line["test"], suites[line["test"]], line["seconds"], tuple(line["opened"]))
            for line in lines
            if line["test"] in suites
        }
        import coverage

        self._data = coverage.CoverageData(str(folder / "lines"))
        self._data.read()
        self._of_file: dict[str, dict[int, list[str]]] = {}

    def order(self, defect: Defect, suites: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
        """The tests of some suites, nearest first: those that touch what a defect changes, their modules', all others.

        The first are those that execute a changed line, or open a changed file that is no Python, or have a program
        search its folder. Others of their modules may share a fixture with them, or a program that JAX has traced. Of
        the rest come those first that execute a line of the file, then those whose module is named after its place.
        """
        by_line = self._lines_of(defect.file)
        changed = defect.lines((ROOT / defect.file).read_text())
        touching = {test for number in changed for test in by_line.get(number, ())}
        places = {defect.file, str(Path(defect.file).parent)}
        touching |= {test for test, recorded in self.tests.items() if places.intersection(recorded.opened)}
        of_file = {test for tests in by_line.values() for test in tests}
        folder = "tests/" + str(Path(defect.file).parent.relative_to("tilewright"))

        def distance(recorded: Recorded) -> tuple[bool, bool, float]:
            return recorded.test not in of_file, not recorded.file.startswith(folder), recorded.seconds

        wanted = set(suites)
        found = sorted((r for r in self.tests.values() if r.suite in wanted), key=distance)
        files = {self.tests[test].file for test in touching if test in self.tests}
        rest = [recorded for recorded in found if recorded.test not in touching]
        return (
            [recorded.test for recorded in found if recorded.test in touching],
            [recorded.test for recorded in rest if recorded.file in files],
            [recorded.test for recorded in rest if recorded.file not in files],
        )

    def _lines_of(self, file: str) -> dict[int, list[str]]:
        if file not in self._of_file:
            self._of_file[file] = self._data.contexts_by_lineno(str(ROOT / file)) if file.endswith(".py") else {}
        return self._of_file[file]
