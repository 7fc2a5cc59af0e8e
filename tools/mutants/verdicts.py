"""Which suite catches which defect, in a file of the repository."""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from tools.mutants.defects import Defect

FILE = Path(__file__).parent / "verdicts.json"


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The smallest suite that catches a defect ("gpu" if only those on an accelerator do, "" if none does), and a test.

    The test is the first that fails.
    """

    caught_by: Literal["quick", "test", "full", "gpu", ""]
    test: str
    seconds: float
    defect: str  # a hash: another text of the defect needs another verdict


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
