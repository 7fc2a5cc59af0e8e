"""Which tests catch which defect, in a file of the repository."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tests.support.suites import SUITES
from tools.mutants.defects import ROOT, Defect

FILE = Path(__file__).parent / "verdicts.json"

type Caught = Literal["quick", "test", "full", "gpu", ""]
"""The smallest suite that catches a defect; "gpu" if only an accelerator shows it, "" if nothing does."""

MOST = 4
"""Tests that a verdict names: where they run may change, and tests may go."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests that catch a defect.

    Attributes:
      tests: up to `MOST`, cheapest first: of ``tests/gpu`` if only an accelerator shows the defect, none if none of the
        tests that were run does, which are at least those near it.
      seconds: until the run that found them ended.
      defect: a hash; another text of the defect needs another verdict.
    """

    tests: tuple[str, ...]
    seconds: float
    defect: str

    @classmethod
    def on(cls, defect: Defect, tests: Iterable[str], seconds: float) -> "Verdict":
        return cls(tuple(tests)[:MOST], round(seconds, 1), fingerprint(defect))

    def caught_by(self, suites: Mapping[str, str]) -> Caught:
        """The smallest suite that has one of the tests; what ``suites`` does not name is gone, or not measured yet."""
        if not self.tests:
            return ""
        if all(test.startswith("tests/gpu/") for test in self.tests):
            return "gpu"
        within = {suites[test] for test in self.tests if test in suites}
        return next((suite for suite in SUITES if suite in within), "")

    def stands(self, root: Path = ROOT) -> bool:
        """True if one of the tests is still there: its file, and its function or class. True also if there was none."""
        return not self.tests or any(_exists(test, root) for test in self.tests)


def _exists(test: str, root: Path) -> bool:
    file, *names = re.sub(r"\[.*", "", test, flags=re.DOTALL).split("::")
    path = root / file
    if not path.is_file():
        return False
    return not names or re.search(rf"^(async )?(def|class) {re.escape(names[0])}\b", path.read_text(), re.M) is not None


class Verdicts:
    """Those in a file, which is written anew with each that is added."""

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self.known = msgspec.json.decode(file.read_bytes(), type=dict[str, Verdict]) if file.exists() else {}

    def of(self, defect: Defect) -> Verdict | None:
        """The verdict, unless the defect is another by now."""
        verdict = self.known.get(defect.id)
        return verdict if verdict is not None and verdict.defect == fingerprint(defect) else None

    def put(self, defect: Defect, verdict: Verdict) -> None:
        self.known[defect.id] = verdict
        self._write()

    def keep(self, ids: set[str]) -> None:
        """Forgets all others."""
        self.known = {id: verdict for id, verdict in self.known.items() if id in ids}
        self._write()

    def _write(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(dict(sorted(self.known.items()))), indent=1)
        self._file.write_bytes(text + b"\n")


def fingerprint(defect: Defect) -> str:
    """A hash of what is replaced by what; where the file is does not matter."""
    return hashlib.sha256("\0".join((defect.find, defect.replace)).encode()).hexdigest()[:12]
