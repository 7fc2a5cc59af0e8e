"""The counts of a tree: what is in it is found, and nothing else."""

import textwrap

import pytest

from tools.counts import counts_of, cycles, imports_of, main, modules_of, room_cycles

BODY = """
def {name}(values: list[int], scale: Any, *rest: int, **options: "Any | None") -> int:
    total = 0
    for value in values:
        total += value * scale
        if total > 100:
            total -= 100
    for other in rest:
        total ^= other
    return total
"""


@pytest.fixture
def package(tmp_path):
    def made(**files: str):
        """A package of modules, where ``__in__`` stands for a slash, and of what makes their folders packages."""
        folder = tmp_path / "house"
        for name, text in {"__init__": "", **files}.items():
            path = folder / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(textwrap.dedent(text))
        return folder

    return made


def graph_of(folder):
    modules = modules_of(folder)
    return {module.name: imports_of(module, [each.name for each in modules]) for module in modules}


def test_imports_of_every_kind_are_found(package):
    folder = package(
        top="import house.one\nfrom house import two\nfrom house.rooms.bed import sleep\nimport os",
        one="def late():\n    from house.rooms import bed",
        two="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import one",
        rooms__in____init__="from .bed import sleep",
        rooms__in__bed="from ..two import x\nsleep = 1",
    )
    assert graph_of(folder) == {
        "house": set(),
        "house.top": {"house.one", "house.two", "house.rooms.bed"},
        "house.one": {"house.rooms.bed"},
        "house.two": {"house.one"},
        "house.rooms": {"house.rooms.bed"},
        "house.rooms.bed": {"house.two"},
    }
    assert cycles(graph_of(folder)) == [["house.one", "house.rooms.bed", "house.two"]]


def test_strings_that_import_are_found(package):
    folder = package(
        one="""
            HOME = "house.rooms"
            PLACES: dict[str, str] = {"a": "house.two"}
            BED = lazy(f"{HOME}.bed:Bed")
            TABLES = {name: f"{HOME}.{name}" for name in NAMES}
            def late(name):
                return importlib.import_module(PLACES[name])
        """,
        two="import_module('house.rooms.bed')\nlogging.getLogger('house.one')\n['-m', 'house.one']",
        rooms__in__bed="@stable_id('bed', formerly=('house.two:Bed',))\nclass Bed: 'Sleeps in house.one: there.'",
    )
    one, two = {"house.two", "house.rooms", "house.rooms.bed"}, {"house.rooms.bed"}
    assert {name: found for name, found in graph_of(folder).items() if found} == {"house.one": one, "house.two": two}


def test_cycles_of_rooms(package):
    """A registry and an op's backend are not a cycle; two ops that need each other are."""
    folder = package(
        __init__="OPS = ('house.bed.op:Bed', 'house.desk.op:Desk')",
        bed__in__op="lazy('house.bed.gpu.backend:Gpu')",
        bed__in__size="import house.desk.size",
        bed__in__gpu__in__backend="import house.bed.size",
        desk__in__op="import house.bed.op",
        desk__in__size="",
        tools="",
    )
    packages = ["house", "house.bed", "house.bed.gpu", "house.desk"]
    assert cycles(graph_of(folder)) == []
    assert room_cycles(graph_of(folder), packages) == [["house.bed", "house.desk"]]
    counts = counts_of(folder)
    assert (counts["cycles"].behind, counts["rooms"].behind) == ([], ["house.bed house.desk"])
    upwards = graph_of(folder) | {"house.bed.gpu.backend": {"house.bed.op"}, "house.desk.op": {"house"}}
    assert room_cycles(upwards, packages) == [
        ["house.__init__", "house.bed", "house.desk"],
        ["house.bed.gpu", "house.bed.op"],
    ]


def test_cycles_are_sets_that_all_reach_each_other():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}, "h": {"h"}}
    assert cycles(graph) == [["a", "b", "c"], ["f", "g"]]
    (ring,) = cycles({str(i): {str((i + 1) % 5000)} for i in range(5000)})  # deeper than Python's own recursion
    assert len(ring) == 5000


def test_what_is_written_twice_is_found_once(package):
    folder = package(one=BODY.format(name="add"), two='"""Words."""\nimport os\n' + BODY.format(name="add"))
    (pair,) = counts_of(folder)["repeated"].behind
    assert pair.startswith("9 lines: ")
    assert f"{folder}/one.py:2 " in pair
    assert pair.endswith(f"{folder}/two.py:4")


def test_imports_comments_and_docstrings_are_no_repetition(package):
    text = '"""' + "\n".join("words" for _ in range(20)) + '"""\n' + "import os\n" * 9 + "# a comment\n" * 9
    assert not counts_of(package(one=text, two=text))["repeated"].behind


def test_arguments_that_are_any(package):
    counts = counts_of(package(one=BODY.format(name="add")))
    assert counts["any"].value == "50.0 % (2 of 4)"
    assert [said.split()[-1] for said in counts["any"].behind] == ["scale", "options"]


def test_sizes(package):
    counts = counts_of(package(one=BODY.format(name="add"), **{f"m{i}": "" for i in range(20)}))
    assert counts["functions"].value == "9, 9"
    assert counts["files"].value == "0, 10"
    assert counts["folders"].value == "1"
    assert counts["folders"].behind[0].startswith("21 modules in ")


def test_sizes_of_cuda_files_count_too(package):
    folder = package(one="value = 1\n")
    for name, lines in {"long.cuh": 700, "short.cu": 20, "short.h": 30, "notes.md": 900}.items():
        (folder / name).write_text("// a line\n" * lines)
    files = counts_of(folder)["files"]
    assert files.value == "700, 700"
    assert [said.split()[0] for said in files.behind] == ["700", "30", "20", "1", "0"]


def test_the_command_prints_each_count_and_what_is_behind_one(package, capsys):
    main([str(package(one="import house.two", two="import house.one")), "--show", "cycles"])
    *counts, behind = capsys.readouterr().out.splitlines()
    assert len(counts) == 10
    assert behind == "house.one house.two"


def test_a_count_that_does_not_exist_is_a_usage_error(package, capsys):
    with pytest.raises(SystemExit):
        main([str(package()), "--show", "cats"])
    assert "cycles, rooms, repeated" in capsys.readouterr().err


def test_comments_docstrings_and_how_they_begin(package):
    code = '"""Whether a file counts,\nin two lines."""\n' + "# a reason\nx = 1  # beside code\n" * 40
    counts = counts_of(package(kernels__in__one=code, two="def f():\n    '''Returns what it is given.'''\n"))
    assert counts["comments"].value == f"{100 * 40 / 82:.1f} %"
    assert counts["docstrings"].value == f"{100 * 3 / 84:.1f} %"
    assert [place.split()[-1] for place in counts["questions"].behind] == ["Whether"]
    assert [place.split(" % ")[0] for place in counts["comments"].behind] == [f"{100 * 40 / 82:.1f}"]
