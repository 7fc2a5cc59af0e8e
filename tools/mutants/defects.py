"""A defect: a text of a file of the repository, and what stands in its place in a copy."""

import tomllib
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "defects"


class Defect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replaces ``find``, which occurs once in ``file``, by ``replace``; ``says`` is what goes wrong for a user.

    One that was drawn by rule names the ``op`` and the ``backend`` that it was drawn for, as ops share files.
    """

    id: str
    area: str
    file: str
    find: str
    replace: str
    says: str
    op: str = ""
    backend: str = ""

    def mutated(self, text: str) -> str:
        """The file's text with the defect.

        Raises:
          ValueError: ``find`` occurs more or less than once.
        """
        count = text.count(self.find)
        if count != 1 or self.find == self.replace:
            raise ValueError(f"defect {self.id}: its text must occur once in {self.file} and be replaced, {count=}")
        return text.replace(self.find, self.replace)

    def lines(self, text: str) -> range:
        """The numbers, from 1, of the lines of the file's text that it changes."""
        before, after = text.splitlines(), self.mutated(text).splitlines()
        first = _common(before, after)
        rest = min(len(before), len(after)) - first
        last = len(before) - _common(before[::-1][:rest], after[::-1][:rest])
        return range(min(first + 1, len(before)), max(first + 1, last) + 1)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defect: list[Defect]


def _common(left: list[str], right: list[str]) -> int:
    """The number of lines with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def load(folder: Path = FOLDER) -> dict[str, Defect]:
    """All defects by id.

    Raises:
      ValueError: An id stands twice.
      msgspec.ValidationError: A file has a field too many or too few.
    """
    found: dict[str, Defect] = {}
    for path in sorted(folder.glob("*.toml")):
        for defect in msgspec.convert(tomllib.loads(path.read_text()), _File).defect:
            if defect.id in found:
                raise ValueError(f"there are two defects {defect.id!r}, the second in {path.name}")
            found[defect.id] = defect
    return found
