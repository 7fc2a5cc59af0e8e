"""Checks the Python examples of README and docs by mypy and pyright, and the programs in examples/ by pyright.

python -m tools.snippets   # a part of make types

The examples of a page are one module, as they run, in which a line has the number that it has in the page.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.pages import ROOT, python_examples

PACKAGE = "page_examples"
"""The package of these modules, to which options in pyproject.toml apply."""


def modules() -> Iterator[tuple[str, str]]:
    """The file name and the text of the module that each page with examples is."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if python_examples(text):
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            yield f"{name}.py", in_place(text)


def in_place(page: str) -> str:
    """The lines of Python in a page, with the others left empty."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Writes the package of the pages' modules into a folder."""
    (folder / PACKAGE).mkdir()
    for name, text in [("__init__.py", ""), *modules()]:
        (folder / PACKAGE / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Prints what the checkers find. Returns the exit code: 1 if they find anything."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        codes = [
            subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, "MYPYPATH": folder}, check=False
            ).returncode
            for command in (
                ("mypy", "-p", PACKAGE),
                ("pyright", "--pythonpath", sys.executable, f"{folder}/{PACKAGE}", "examples"),
            )
        ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
