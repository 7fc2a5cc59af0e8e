"""The planted defects: they fit the code, and the program that plants them finds what catches them."""

import shutil
import subprocess
from collections import Counter

import pytest

from tools.mutants import plant
from tools.mutants.defects import ROOT, Defect, load
from tools.mutants.verdicts import Verdict, Verdicts, fingerprint

DEFECTS = load()
SWAPPED = Defect("swapped", "core", "code.py", "return a - b", "return b - a", "A difference has the wrong sign.")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_fits_the_code(name: str):
    defect = DEFECTS[name]
    text = (ROOT / defect.file).read_text()
    mutated = defect.mutated(text)
    if defect.file.endswith(".py"):
        compile(mutated, defect.file, "exec")
    lines = defect.lines(text)
    assert 1 <= len(lines) <= 12
    assert lines.stop <= len(text.splitlines()) + 1


def test_the_suites_catch_what_they_shall():
    """Every defect has a verdict on the text that it has now; the shares are those of CONTRIBUTING.md."""
    verdicts = Verdicts()
    found = {name: verdicts.of(defect) for name, defect in DEFECTS.items()}
    assert [name for name, verdict in found.items() if verdict is None] == [], "run python -m tools.mutants run"
    assert set(verdicts.known) == set(DEFECTS)
    counts = Counter(verdict.caught_by for verdict in found.values() if verdict is not None)
    assert len(DEFECTS) >= 40
    assert counts["quick"] >= 0.7 * len(DEFECTS)
    assert counts["quick"] + counts["test"] >= 0.95 * len(DEFECTS)


def test_the_lines_that_a_defect_changes():
    text = "one\ntwo\nthree\ntwo\nfive\n"
    defect = Defect("x", "core", "f", "three\ntwo", "three\n2\n2", "")
    assert list(defect.lines(text)) == [4]
    assert list(Defect("x", "core", "f", "one\n", "", "").lines(text)) == [1]
    assert list(Defect("x", "core", "f", "five\n", "five\nsix\n", "").lines(text)) == [5, 6]
    for find, replace in (("two", "2"), ("seven", "7"), ("one", "one")):
        with pytest.raises(ValueError, match="must occur once"):
            Defect("x", "core", "f", find, replace, "").mutated(text)


def test_verdicts_are_kept_and_go_with_the_text_of_the_defect(tmp_path):
    verdicts = Verdicts(tmp_path / "verdicts.json")
    assert verdicts.of(SWAPPED) is None
    verdict = Verdict("quick", "tests/test_code.py::test_it", 1.5, fingerprint(SWAPPED))
    verdicts.put(SWAPPED, verdict)
    again = Verdicts(tmp_path / "verdicts.json")
    assert again.of(SWAPPED) == verdict
    changed = Defect("swapped", "core", "code.py", "return a - b", "return a", "")
    assert again.of(changed) is None
    again.keep(set())
    assert Verdicts(tmp_path / "verdicts.json").known == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_defect_is_planted_in_a_copy_and_caught(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for name, text in {
        "code.py": "def difference(a, b):\n    return a - b\n",
        "pytest.ini": "[pytest]",
        "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--suite')\n",
        "tests/test_code.py": "import code\n\ndef test_zero():\n    assert code.difference(1, 1) == 0\n\n"
        "def test_it():\n    assert code.difference(3, 1) == 2\n",
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text.replace("import code", "import code_under_test as code"))
    (project / "code.py").rename(project / "code_under_test.py")
    subprocess.run(["git", "init", "-q", "."], cwd=project, check=True)
    monkeypatch.setattr(plant, "ROOT", project)
    # The plugin is this repository's, whose root must not come before the copy's.
    monkeypatch.setattr(plant, "environment", lambda root: {**_environment(root), "PYTHONPATH": f"{root}:{ROOT}"})
    copy = plant.Copy()
    defect = Defect("swapped", "core", "code_under_test.py", "return a - b", "return b - a", "")
    tests = ["tests/test_code.py::test_zero", "tests/test_code.py::test_it"]
    with copy.planted(defect):
        assert copy.run(tests, "test").failed == tests[1]
        assert copy.run(tests[:1], "test").failed == ""
        assert copy.run_files(["tests"], "test").failed == tests[1]
    assert copy.run(tests, "test").failed == ""
    assert (project / "code_under_test.py").read_text().endswith("return a - b\n")


_environment = plant.environment
