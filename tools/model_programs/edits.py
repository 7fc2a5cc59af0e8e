"""Edits of files of other libraries, which make them call our ops."""

import dataclasses
import shutil
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parent / "edits.toml"


@dataclasses.dataclass(frozen=True)
class Edit:
    """A passage of a file and what it becomes.

    Attributes:
      file: below the folder of the installed packages.
      op: the op that computes what the passage did; `programs` says which a program must call.
      first: what the first line of the passage begins with; the first such line of the file.
      last: what its last line begins with; the next such line.
      lines: what takes its place, not indented.
      also: lines behind the last one that belong to the passage.
    """

    file: str
    op: str
    first: str
    last: str
    lines: str
    also: int = 0

    def apply(self, text: str) -> str:
        """The text with this edit.

        Raises:
          ValueError: the text has no such passage.
        """
        found = text.splitlines()
        begin = _line(found, self.first, 0, self)
        end = _line(found, self.last, begin, self) + 1 + self.also
        indent = found[begin][: -len(found[begin].lstrip())]
        return "\n".join(
            [*found[:begin], *textwrap.indent(self.lines.strip("\n"), indent).splitlines(), *found[end:], ""]
        )


def _line(lines: list[str], begins: str, start: int, edit: Edit) -> int:
    for number, line in enumerate(lines[start:], start):
        if line.lstrip().startswith(begins):
            return number
    raise ValueError(f"{edit.file} has no line that begins with {begins!r}: another version than the Makefile installs")


def edits() -> list[Edit]:
    return [Edit(**each) for each in tomllib.loads(FILE.read_text())["edit"]]


def edited(packages: Path, into: Path, chosen: Iterable[Edit]) -> None:
    """Copies the packages that the edits are for, and edits the copies.

    Raises:
      ValueError: a file does not have the passage of an edit.
    """
    chosen = list(chosen)
    for package in {Path(edit.file).parts[0] for edit in chosen}:
        shutil.copytree(packages / package, into / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in {edit.file for edit in chosen}:
        text = (into / name).read_text()
        for edit in chosen:
            text = edit.apply(text) if edit.file == name else text
        # Behind the docstring and imports from __future__, which these files do not have.
        ops = "from tilewright.modules import (\n    flash_attention, gated_grouped_matmul, glu, grouped_matmul,"
        (into / name).write_text(f"{ops} linear_cross_entropy, rms_norm,\n)\n{text}")
