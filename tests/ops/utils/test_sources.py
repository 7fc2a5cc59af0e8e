"""Hashes of sources."""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tilewright
from tilewright.ops.utils import sources
from tilewright.ops.utils.sources import imported, packages_fingerprint, sources_fingerprint

FILES = {
    "__init__.py": "",
    "plain.py": "x = 1\n",
    "backend.py": "from tests_sources import plain, gone\n\ndef f():\n    import tests_sources.inner.late as b, os\n",
    "other.py": "import tests_sources.plain\n",
    "inner/__init__.py": "",
    "inner/late.py": "from . import (\n    first as a,  # a comment\n    second,\n)\nfrom ..other import x\n",
    "inner/first.py": "from tests_sources.backend import x\n",
    "inner/second.py": "from tests_absent import x\nfrom tests_sources.not_there import y\n",
    "inner/unused.py": "",
    "inner/kernel.cuh": "// 1\n",
    "inner/include/deep/header.h": "// 2\n",
    "inner/notes.txt": "",
}


def write(folder: Path, name: str, text: str) -> None:
    """Writes a file long ago, as far as its time says."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    os.utime(folder / name, (1.0, 1.0))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tests_sources"
    for name, text in FILES.items():
        write(folder, name, text)
    module = ModuleType("tests_sources")
    module.__file__, module.__path__ = str(folder / "__init__.py"), [str(folder)]
    monkeypatch.setitem(sys.modules, "tests_sources", module)
    packages_fingerprint.cache_clear()
    yield folder
    packages_fingerprint.cache_clear()


def of_packages(*names: str) -> str:
    packages_fingerprint.cache_clear()
    return packages_fingerprint(frozenset(names))


def test_every_source_of_a_package_counts(package: Path) -> None:
    found = [of_packages("tests_sources")]
    write(package, "inner/first.py", "x = 2\n")
    found.append(of_packages("tests_sources"))
    (package / "inner/first.py").rename(package / "inner/third.py")
    found.append(of_packages("tests_sources"))
    found.append(of_packages("tests_sources", "tilewright"))
    assert len(set(found)) == 4
    assert all(found)
    assert of_packages("tests_sources") == found[2]


def test_lines_of_comments_do_not_count(package: Path) -> None:
    found = []
    for text in (
        "x = 1\n",
        "# Why.\n# And how.\nx = 1\n    # More.\n",
        "x = 1  # Why.\n",
        'x = """\n#define A 1\n"""\n',
        'x = """\n#define A 2\n"""\n',
        "x = 2\n",
    ):
        write(package, "plain.py", text)
        found.append(of_packages("tests_sources"))
    assert found[0] == found[1]
    assert len(set(found)) == 5
    header = {"kernel.cuh": package / "inner" / "kernel.cuh"}
    before = sources_fingerprint(header)
    write(package, "inner/kernel.cuh", "# 1\n// 1\n")
    assert sources_fingerprint(header) != before


def test_a_source_that_changed_since_the_start_tells_nothing(package: Path) -> None:
    (package / "inner/first.py").write_text("x = 3\n")
    assert of_packages("tests_sources") == ""
    assert sources_fingerprint({"first": package / "inner/first.py"}) == ""
    assert sources_fingerprint({"plain": package / "plain.py"})


@pytest.mark.parametrize("names", [(), ("__main__",), ("tests_no_such_module",), ("tilewright", "sys")])
def test_what_has_no_sources_tells_nothing(names: tuple[str, ...]) -> None:
    assert of_packages(*names) == ""


def test_a_source_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert sources_fingerprint({}) == sources_fingerprint({"a": tmp_path / "a.py"}) == ""


def within(*packages: str) -> Callable[[str], bool]:
    return lambda module: module.partition(".")[0] in packages


def test_what_a_module_imports_counts_wherever_the_statement_stands(package: Path) -> None:
    """With headers beside it; without modules that nothing imports, and without importing anything."""
    found = imported(["tests_sources.backend"], within("tests_sources"))
    names = {"", "plain", "backend", "other", "inner", "inner.late", "inner.first", "inner.second"}
    headers = {"tests_sources.inner/kernel.cuh", "tests_sources.inner/include/deep/header.h"}
    assert found.keys() == {f"tests_sources.{name}".rstrip(".") for name in names} | headers
    assert all(path.is_file() for path in found.values())
    assert not [name for name in sys.modules if name.startswith("tests_sources.")]


def test_imports_of_what_does_not_count_are_not_followed(package: Path) -> None:
    found = imported(["tests_sources.backend"], {"tests_sources.backend", "tests_sources.plain"}.__contains__)
    assert found.keys() == {"tests_sources.backend", "tests_sources.plain"}
    assert imported(["tests_sources.backend"], within("another")) == {}
    assert imported(["tests_sources.gone", "tests_absent.x", ""], lambda module: True) == {}


def test_every_import_in_the_package_is_found() -> None:
    """The expression that finds them agrees with Python's own parser."""
    root = Path(tilewright.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        package = ".".join(("tilewright", *path.parent.relative_to(root).parts))
        found = set(sources._imports(text, package))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {each.name for each in node.names} <= found, path
            if isinstance(node, ast.ImportFrom):
                assert {node.module, *(f"{node.module}.{each.name}" for each in node.names)} <= found, path
