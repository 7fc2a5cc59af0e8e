"""README and docs as a program sees them: their Python examples, and what they link to.

python tools/pages.py README.md docs/attention.md   # runs the examples of these pages with the installed tilewright
"""

import re
import sys
import tomllib
import types
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_examples(text: str) -> list[str]:
    """The blocks of Python in a page, in order; each continues the one before it."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """What a page links to, without anchors."""
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)


def contents(text: str) -> list[tuple[str, list[str]]]:
    """The table of contents that docs/index.md is: its sections, each with the pages that its list links to."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return [
        (section.partition("\n")[0], re.findall(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", section, re.MULTILINE))
        for section in sections
    ]


def repository() -> str:
    """The address of the repository, as the package's metadata has it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def linked_file(target: str, folder: Path) -> Path | None:
    """The file of the repository that a link in a page of a folder leads to; None if it leads elsewhere.

    Absolute links lead to files too if they are into our own repository at its branch main.
    """
    own = re.match(re.escape(repository()) + r"/(?:blob|tree|raw)/main/(.+)", target)
    if own:
        return ROOT / own[1]
    return None if re.match(r"[a-z]+:", target) else folder / target


def run_examples(page: Path, module: types.ModuleType) -> None:
    """Runs the examples of a page, in order, as parts of a module."""
    for block in python_examples(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), module.__dict__)


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        # A module that can be found by name, for what a page defines goes through the cache on disk.
        module = types.ModuleType(f"examples_of_{page.stem}")
        sys.modules[module.__name__] = module
        run_examples(page, module)


if __name__ == "__main__":
    main()
