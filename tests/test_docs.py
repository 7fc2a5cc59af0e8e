"""README and docs: every Python example of a page runs, in order, and what the pages link to exists."""

import logging
import sys
import types
from collections.abc import Iterator

import pytest

from tools.pages import ROOT, linked_file, links, repository, run_examples

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """A page may turn logging on, which must not reach the tests that run after it in this process."""
    loggers = logging.getLogger(), logging.getLogger("tilewright")
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("logging_as_it_was")
@pages
def test_every_python_example_of_a_page_runs(page, monkeypatch):
    # A module that can be found by name, for what a page defines goes through the cache on disk.
    module = types.ModuleType(f"examples_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_examples(page, module)


@pages
def test_links_lead_somewhere(page):
    found = {target: linked_file(target, page.parent) for target in links(page.read_text())}
    assert [target for target, file in found.items() if file is not None and not file.exists()] == []


def test_absolute_links_into_our_own_repository_are_files_of_it():
    ours = repository()
    assert linked_file(f"{ours}/blob/main/docs/cli.md", ROOT / "docs") == ROOT / "docs/cli.md"
    assert linked_file(f"{ours}/tree/main/docs", ROOT) == ROOT / "docs"
    assert linked_file("notes/suites.md", ROOT / "docs") == ROOT / "docs/notes/suites.md"
    for elsewhere in (f"{ours}/issues", "https://example.org/blob/main/docs/cli.md", "mailto:a@example.org"):
        assert linked_file(elsewhere, ROOT) is None
    assert links("[a](docs/a.md#part) [b](#part) [c](https://example.org/c)") == ["docs/a.md", "https://example.org/c"]
