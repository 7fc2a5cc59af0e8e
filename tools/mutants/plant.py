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
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.mutants.defects import ROOT, Defect
from tools.mutants.plugin import Event, Plan

SECONDS = 5400.0
"""At most for one run of pytest; one that takes longer hangs, and is caught by that."""

# tests/tools checks the defects against the code, and would find every one of them.
PYTEST = [
    "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "tools.mutants.plugin",
    "-o", "addopts=--strict-markers --import-mode=importlib", "--ignore=tests/aot", "--ignore=tests/aot_tpu",
    "--ignore=tests/tools",
    "--continue-on-collection-errors",
]  # fmt: skip


def environment(root: Path) -> dict[str, str]:
    """That of a run of the tests of a copy: every Python process imports the copy's package."""
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    ours = {"PYTHONPATH": path, "TILEWRIGHT_HYPOTHESIS_PROFILE": "ci", "PYTHONDONTWRITEBYTECODE": "1"}
    # Programs that a defect leaves as they are need not be compiled again: tests/conftest.py.
    return {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), **os.environ, **ours}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of tests came to.

    Attributes:
      failed: the tests that failed, in the order of the run; how it ended, if that was bad and none is to blame.
      ran: the number of tests that were finished.
      complete: every test was, that the run was asked for.
    """

    failed: tuple[str, ...]
    ran: int
    complete: bool
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

    def run(self, plan: Plan, limit: float = SECONDS) -> Outcome:
        """Runs tests in the order of a plan, to the end or until enough have failed."""
        began, how = time.monotonic(), ""
        with tempfile.TemporaryDirectory(prefix="tilewright-mutant-run-") as folder:
            asked, events = Path(folder) / "plan.json", Path(folder) / "events.jsonl"
            asked.write_bytes(msgspec.json.encode(plan))
            of_gpus = any(place.startswith("tests/gpu") for stage in plan.stages for place in stage)
            arguments = [*PYTEST, *([] if of_gpus else ["--ignore=tests/gpu"]), "--timeout", f"{plan.timeout:.0f}"]
            arguments += ["--plan", str(asked), "--events", str(events)]
            arguments += [path for path in plan.paths() if (self.root / path).exists()]
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.root, env=environment(self.root), start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                code = process.wait(limit)
                # 1: tests failed; 2: the plan's end, or its limit; 5: there are no tests.
                how = "" if code in (0, 1, 2, 5) else f"pytest ended with {code}"
            except subprocess.TimeoutExpired:
                how = f"pytest took more than {limit:.0f} s"
            finally:
                # Whatever a test has started and a crash has left.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            lines = events.read_bytes().splitlines() if events.exists() else []
        seen = [msgspec.json.decode(line, type=Event) for line in lines]
        failed = dict.fromkeys(event.test for event in seen if event.what == "failed")
        ended = any(event.what in ("stopped", "ended") for event in seen)
        if not ended and (begun := [event.test for event in seen if event.what == "began"]):
            # The process has ended within a test, which hangs or crashes.
            failed[begun[-1]] = None
        elif not ended and how:
            failed[how] = None
        ran = sum(event.what == "finished" for event in seen)
        complete = any(event.what == "ended" for event in seen)
        return Outcome(tuple(failed), ran, complete, time.monotonic() - began)


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
