"""A copy of the repository, and tests run in it."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tools.mutants.contexts import PYTEST, WITHOUT_GPU, environment
from tools.mutants.defects import ROOT, Defect

SECONDS = 5400.0
"""At most for one run of pytest; one that takes longer hangs, and is caught by that."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of tests came to: the first test that failed (or how the run ended without one), "" if none did."""

    failed: str
    seconds: float


class Copy:
    """A copy of what git knows or does not ignore, in a temporary folder; without git, of what is not hidden."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-mutant-")
        self.root = Path(self._folder.name) / "tilewright"
        for name in _files():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, self.root / name)
        # Some tests ask git for the files of the repository.
        subprocess.run(["git", "init", "-q", "."], cwd=self.root, check=True)
        subprocess.run(["git", "add", "-A"], cwd=self.root, check=True)

    @contextlib.contextmanager
    def planted(self, defect: Defect) -> Iterator[None]:
        path = self.root / defect.file
        before = path.read_text()
        path.write_text(defect.mutated(before))
        try:
            yield
        finally:
            path.write_text(before)

    def run(self, tests: Sequence[str], suite: str) -> Outcome:
        """Runs tests, in their order, up to the first failure.

        Raises:
          RuntimeError: The copy has none of them.
        """
        with tempfile.NamedTemporaryFile("w", prefix="tilewright-mutant-tests-") as listed:
            listed.write("\n".join(tests))
            listed.flush()
            return self.run_files([*dict.fromkeys(test.partition("::")[0] for test in tests)], suite, listed.name)

    def run_files(self, files: Sequence[str], suite: str, tests_in: str = "") -> Outcome:
        """Runs the tests of some files or folders up to the first failure; of these those that a file lists, if any.

        Raises:
          RuntimeError: There are none.
        """
        began, code = time.monotonic(), None
        with tempfile.TemporaryDirectory(prefix="tilewright-mutant-run-") as folder:
            failed = Path(folder) / "failed"
            left_out = [] if any(file.startswith("tests/gpu") for file in files) else WITHOUT_GPU
            arguments = [*PYTEST, *left_out, "-x", "--suite", suite, "--failed-in", str(failed), *files]
            arguments += ["--tests-in", tests_in] if tests_in else []
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.root, env=environment(self.root), start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                code = process.wait(SECONDS)
                how = {0: "", 1: ""}.get(code, f"pytest ended with {code}")
            except subprocess.TimeoutExpired:
                how = f"pytest took more than {SECONDS:.0f} s"
            finally:
                # Whatever a test has started and a crash has left.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if not failed.exists() and code == pytest.ExitCode.NO_TESTS_COLLECTED:
                raise RuntimeError(f"there are no such tests in the copy: {files}")
            first = failed.read_text().splitlines()[0] if failed.exists() else how
        return Outcome(first, time.monotonic() - began)


def _files() -> list[Path]:
    """Of the repository, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [path for path in found if not any(part.startswith(".") for part in path.parts)]
    return [name for name in names if (ROOT / name).is_file()]
