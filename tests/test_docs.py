"""README and docs: every Python example of a page runs, in order, and what the pages link to exists."""

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.slow
@pages
def test_every_python_example_of_a_page_runs(page, monkeypatch):
    # A module that can be found by name, for what a page defines goes through the cache on disk.
    module = types.ModuleType(f"examples_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec"), module.__dict__)


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
