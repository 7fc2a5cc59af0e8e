"""The planted defects: they fit the code, and the program that plants them finds what catches them."""

import ast
import shutil
import subprocess
import tomllib
from collections import Counter

import pytest

from tests.support.suites import suites_of
from tools.mutants import near, pairs, plant, rules
from tools.mutants.defects import ROOT, Defect, load
from tools.mutants.plugin import Plan
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


WAITING = 0
"""Defects that were drawn by rule and wait for their verdicts: none may come without `python -m tools.mutants run`."""


def test_the_suites_catch_what_they_shall():
    """Every defect that does not wait has a verdict on the text that it has now; CONTRIBUTING.md has the shares."""
    verdicts = Verdicts()
    found = {name: verdict for name, defect in DEFECTS.items() if (verdict := verdicts.of(defect)) is not None}
    missing = [name for name in DEFECTS if name not in found]
    assert [name for name in missing if not DEFECTS[name].op] == [], "run python -m tools.mutants run"
    assert len(missing) <= WAITING, f"run python -m tools.mutants run {' '.join(missing)}"
    assert set(verdicts.known) <= set(DEFECTS)
    suites = suites_of()
    counts = Counter(verdict.caught_by(suites) for verdict in found.values())
    assert len(found) >= 40
    assert counts["quick"] >= 0.7 * len(DEFECTS)
    assert counts["quick"] + counts["test"] >= 0.95 * len(DEFECTS)


def test_every_backend_of_every_op_has_defects():
    """Those drawn for it, and those by hand in its files; what nothing catches counts, too."""
    few = [
        f"python -m tools.mutants grow {op} {backend} --count {pairs.FEWEST - len(ids)}"
        for (op, backend), ids in pairs.of_pairs(DEFECTS.values()).items()
        if len(ids) < pairs.FEWEST
    ]
    assert few == [], "store defects of these, and judge them with python -m tools.mutants run"


def test_what_was_drawn_names_its_op_and_backend():
    known = pairs.pairs()
    drawn = [defect for defect in DEFECTS.values() if defect.op or defect.backend]
    assert [defect.id for defect in drawn if (defect.op, defect.backend) not in known] == []
    assert [defect.id for defect in drawn if defect.id in pairs.rejected()] == []


def test_a_backend_has_its_files_and_those_that_these_import():
    own, beside = pairs.files("tilewright.kernels.norms.triton.backend:TritonNorm")
    assert {"tilewright/kernels/norms/triton/kernels.py", "tilewright/kernels/norms/triton/params.py"} <= set(own)
    assert "tilewright/kernels/norms/inputs.py" in beside
    assert pairs.files("tilewright.kernels.norms.xla:XlaNorm")[0] == ["tilewright/kernels/norms/xla.py"]


def test_candidates_come_in_an_order_of_the_seed_with_all_rules_in_turn():
    first = pairs.candidates("rms_norm", "xla")
    assert first == pairs.candidates("rms_norm", "xla") != pairs.candidates("rms_norm", "xla", seed=1)
    assert {each.id for each in first} == {each.id for each in pairs.candidates("rms_norm", "xla", seed=1)}
    turns = [each.id.split("-")[-2] for each in first]
    assert len(set(turns[: len(set(turns))])) == len(set(turns))
    for candidate in first:
        candidate.mutated((ROOT / candidate.file).read_text())
    with pytest.raises(ValueError, match="there is no backend 'trition'"):
        pairs.candidates("rms_norm", "trition")


def test_what_is_stored_or_rejected_is_not_drawn_again(monkeypatch):
    monkeypatch.setattr(pairs, "rejected", dict)
    first, second, third = pairs.grown("rms_norm", "xla", 3, 0, [])
    monkeypatch.setattr(pairs, "rejected", lambda: {second.id: "changes speed only"})
    assert pairs.grown("rms_norm", "xla", 1, 0, [first]) == [third]
    (entry,) = tomllib.loads(pairs.as_toml(first))["defect"]
    assert Defect(**entry) == first


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (rules.bound, "x = i < n", ["x = i <= n"]),
        (rules.bound, "x = cdiv(rows, block)", ["x = cdiv(rows, block - 1)"]),
        (rules.bound, "x = -(-rows // block)", ["x = (rows // block)"]),
        (rules.bound, "for i in range(0, n, step): f(i)", ["for i in range(0, n - step, step): f(i)"]),
        (rules.bound, "x = y[:n]", ["x = y[:n - 1]"]),
        (rules.swap, "x = a - b", ["x = b - a"]),
        (rules.swap, "x = (a + c) / b", ["x = b / (a + c)"]),
        (rules.swap, "x = where(c, a, b)", ["x = where(c, b, a)"]),
        (rules.swap, "x = tl.dot(a, b, acc)", ["x = tl.dot(b, a, acc)"]),
        (rules.swap, "x = y[row, column]", ["x = y[column, row]"]),
        (rules.lose, "x = a * scale", ["x = a", "x = scale"]),
        (rules.lose, "x = a - b", ["x = a"]),
        (rules.lose, "x = low & (i < n)", ["x = low", "x = (i < n)"]),
        (rules.lose, "x = a and b", ["x = b", "x = a"]),
        (rules.lose, "x = given or 128", []),
        (rules.fence, "plgpu.commit_smem()", ["pass"]),
        (rules.dtype, "x = zeros(n, tl.float32)", ["x = zeros(n, tl.bfloat16)"]),
        (rules.dtype, "x = y.dtype == jnp.float32", []),
        (rules.forget, "f(x, causal=causal)", ["f(x)"]),
        (rules.forget, "f(\n    x,\n    causal=causal,\n)", ["f(\n    x,\n)"]),
        (rules.forget, "cache_key = (x, y)", ["cache_key = (y)", "cache_key = (x)"]),
        (rules.forget, "if x:\n    reasons.append('no x')", ["if False:\n    reasons.append('no x')"]),
    ],
)
def test_what_a_rule_changes(rule, text, expected):
    edits = list(rule(rules.Source("kernel.py", text)))
    changed = [text[: edit.start] + edit.replace + text[edit.end :] for edit in edits]
    assert [ast.unparse(ast.parse(each)) for each in changed] == [ast.unparse(ast.parse(each)) for each in expected]


def test_rules_leave_alone_what_computes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    (tmp_path / "kernel.py").write_text(
        "def heuristic(n: int | None) -> float:\n    return n - 1\n\n"
        "def run(α, n):\n    if n < 1:\n        raise ValueError(n - 2)\n    return α - n\n"
    )
    found = rules.defects("kernel.py", "norm", "triton")
    assert sorted(each.find for each in found) == ["    if n < 1:", "    return α - n", "    return α - n"]
    assert all(rules.changes(each) for each in found)
    assert len({each.id for each in found}) == 3
    assert {(each.op, each.backend) for each in found} == {("norm", "triton")}


def test_the_tests_near_a_defect_are_those_named_after_its_place():
    def stages(file: str, backend: str = "") -> list[list[str]]:
        return near.places(Defect("x", "core", file, "", "", "", backend=backend))

    first, second, *others = stages("tilewright/kernels/norms/triton/kernels.py")
    assert first == ["tests/kernels/norms/test_triton.py"]
    assert second == ["tests/kernels/norms"]
    assert others == [["tests/kernels/triton"], ["tests/every_op"]]
    first, *_ = stages("tilewright/kernels/flash_attention/masking.py", "hopper")
    assert first != []
    assert all("pallas" in file or "hopper" in file for file in first)
    assert stages("tilewright/ops/config/lockfile.py")[0] == ["tests/ops/config/test_lockfile.py"]
    assert stages("tilewright/ops/config/lockfile.py")[1:] == [["tests/ops/config"], ["tests/ops"]]


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
    verdict = Verdict(("tests/test_code.py::test_it",), 1.5, fingerprint(SWAPPED))
    verdicts.put(SWAPPED, verdict)
    again = Verdicts(tmp_path / "verdicts.json")
    assert again.of(SWAPPED) == verdict
    changed = Defect("swapped", "core", "code.py", "return a - b", "return a", "")
    assert again.of(changed) is None
    again.keep(set())
    assert Verdicts(tmp_path / "verdicts.json").known == {}


def test_a_suite_catches_what_one_of_its_tests_catches(tmp_path):
    def caught(*tests: str) -> str:
        return Verdict(tests, 1.0, "").caught_by({"tests/a.py::test_long": "full", "tests/a.py::test_slow": "test"})

    assert caught() == ""
    assert caught("tests/a.py::test_long") == "full"
    assert caught("tests/a.py::test_long", "tests/a.py::test_slow") == "test"
    assert caught("tests/a.py::test_gone") == ""
    assert caught("tests/gpu/a.py::test_it") == "gpu"
    assert caught("tests/gpu/a.py::test_it", "tests/a.py::test_slow") == "test"


def test_a_verdict_stands_while_one_of_its_tests_is_there(tmp_path):
    def stands(*tests: str) -> bool:
        return Verdict(tests, 1.0, "").stands(tmp_path)

    (tmp_path / "test_a.py").write_text("class TestIt(Conformance):\n    pass\n\ndef test_x():\n    pass\n")
    assert stands()
    assert stands("test_a.py::TestIt::test_inherited[causal]")
    assert stands("test_a.py::test_y", "test_a.py::test_x[a::b]")
    assert not stands("test_a.py::test_y", "test_b.py::test_x")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_defect_is_planted_in_a_copy_and_caught(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for name, text in {
        "code.py": "def difference(a, b):\n    return a - b\n",
        "pytest.ini": "[pytest]",
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
        outcome = copy.run(Plan((("tests",),), {tests[0]: 0.1}))
        assert (outcome.failed, outcome.ran, outcome.complete) == ((tests[1],), 2, True)
        assert copy.run(Plan(((tests[0],),))).failed == ()
        # The cheapest comes first, and is enough.
        outcome = copy.run(Plan((("tests",),), {tests[1]: 0.1}, enough=1))
        assert (outcome.failed, outcome.ran, outcome.complete) == ((tests[1],), 1, False)
        assert copy.run(Plan((("tests",),), {tests[1]: 9.0}, dearest=3.0)).failed == ()
    assert copy.run(Plan((("tests",),))).failed == ()
    with copy.planted(Defect("ends", "core", "code_under_test.py", "return a - b", "import os; os._exit(3)", "")):
        outcome = copy.run(Plan((("tests",),), {tests[0]: 0.1}))
        assert (outcome.failed, outcome.complete) == ((tests[0],), False)
    assert (project / "code_under_test.py").read_text().endswith("return a - b\n")


_environment = plant.environment
