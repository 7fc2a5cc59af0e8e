"""docs/environment.md names every environment variable that the package reads, and of ours no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text()
# Words in capitals that stand for variables without an underscore.
SINGLE = {"PATH", "CI", "TERM", "COLUMNS", "TMPDIR", "PYTHONPATH", "HOME"}
# Less those of os.open and os.sysconf.
NAME = re.compile(r"(?!O_|SC_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def touches_environment(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name in ("environ", "getenv"))
        for node in ast.walk(tree)
    )


def variables(text: str) -> set[str]:
    """Names of variables in a program: all that look like one where it touches the environment, ours everywhere."""
    tree = ast.parse(text)
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    looking = touches_environment(tree)
    return {
        word
        for word in words
        if (NAME.fullmatch(word) and (looking or word.startswith("TILEWRIGHT_"))) or (looking and word in SINGLE)
    }


def read_in(folder: str) -> set[str]:
    # Kernels' C++ is not a Python constant; its macros do not count.
    return {name for file in (ROOT / folder).rglob("*.py") for name in variables(file.read_text())}


def named(page: str) -> set[str]:
    return set(re.findall(r"`_?([A-Z][A-Z0-9_]+)`", page))


def missing(page: str, read: set[str]) -> set[str]:
    return read - named(page)


def superfluous(page: str, read: set[str]) -> set[str]:
    return {name for name in named(page) if name.startswith("TILEWRIGHT_")} - read - {"TILEWRIGHT_COMPLETE"}


def test_the_page_names_every_variable_that_is_read():
    read = read_in("tilewright")
    assert {"TILEWRIGHT_CACHE_DIR", "TILEWRIGHT_LOCK_MISS", "CUDA_HOME", "CI", "PATH"} <= read  # the search finds them
    assert missing(PAGE, read) == set()


def test_the_page_names_none_of_ours_that_nothing_reads():
    assert superfluous(PAGE, read_in("tilewright") | read_in("tests")) == set()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ('import os\nx = os.environ.get("TILEWRIGHT_NEW", "")', {"TILEWRIGHT_NEW"}),
        ('import os\nx = os.environ["SOME_NAME"]', {"SOME_NAME"}),
        ('import os\nx = os.getenv("SOME_NAME")', {"SOME_NAME"}),
        ('from os import environ\nx = environ["SOME_NAME"]', {"SOME_NAME"}),
        ('import os\nfor n in ("ONE_NAME", "PATH"):\n    os.environ.pop(n)', {"ONE_NAME", "PATH"}),
        ('NAME = "TILEWRIGHT_NEW"', {"TILEWRIGHT_NEW"}),
        ('x = "SOME_NAME"', set()),
    ],
)
def test_the_search_finds_what_a_program_reads(program, found):
    assert variables(program) == found
    assert missing("", found) == found


def test_a_name_that_nothing_reads_is_found():
    assert superfluous("`TILEWRIGHT_GONE` and `TILEWRIGHT_LOCK`", {"TILEWRIGHT_LOCK"}) == {"TILEWRIGHT_GONE"}
