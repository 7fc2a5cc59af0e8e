"""The page of ``tilewright report``, read back with parsers that know nothing of how it was made."""

import dataclasses
import datetime
import functools
import json
import math
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.command_line import ends, invoke
from tilewright.cli.report.calls import ReportedCall, calls_of_cache
from tilewright.cli.report.page import MAX_MESSAGE, render, visible
from tilewright.kernels.op.choice import Choice
from tilewright.ops import AutotuningResult, Candidate, FwdParams, PersistentCache, TunedCall
from tilewright.ops.config.persistent import Entry
from tilewright.ops.utils.device import current_device

DATE = "2026-02-03"
HOSTILE = "<script>alert(1)</script> \"'><img src=x onerror=y> &lt; <!-- \x1b[31m \x00 \ud800 \u202e ]]> </pre></style>"
SVG = "{http://www.w3.org/2000/svg}"


def config(block):
    return Choice("xla", FwdParams(q_blocksize=block, kv_blocksize=64))


FIELD = (
    Candidate(config(64), (2.0, 2.2, 2.1), check="passed", heuristic=True),
    Candidate(config(128), (1.0, 1.3, 1.04, 1.05), check="passed"),
    Candidate(config(256), (1.06, 1.0, 1.01), check="passed"),
    Candidate(config(512), error="XlaRuntimeError: out of memory\n  at <frame 1>"),
    Candidate(config(1024), check="failed", error="0.5 is too far off"),
    Candidate(config(2048), error="XlaRuntimeError: out of memory\n  at <frame 1>"),
)


def result_of(*fields, device="gpu:H100:9.0", chosen=1, **toolchain):
    calls = [
        TunedCall("attention", "forward", f"key {i}", f"f32[{i},8]", candidates, chosen)
        for i, candidates in enumerate(fields)
    ]
    return AutotuningResult(tuple(calls), device=device, toolchain=toolchain or {"jax": "0.12.0"})


def page_of(result, tmp_path, name="result.json"):
    (tmp_path / name).write_text(result.to_json())
    out = tmp_path / "page.html"
    invoke("report", str(tmp_path / name), "--out", str(out), "--date", DATE)
    return out.read_text(encoding="utf-8")


def reported(candidates, chosen=0, **fields):
    call = TunedCall("op", "forward", "key", "f32[8]", tuple(candidates), chosen)
    return ReportedCall(dataclasses.replace(call, **fields), "cpu:x", {"jax": "1"}, "file")


class Page(HTMLParser):
    """Elements in order, with attributes; text by the elements around it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.tree = ElementTree.fromstring(text.partition("\n")[2])

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def shape(self):
        return [(tag, sorted(attributes)) for tag, attributes in self.elements]

    def text(self, tag):
        return "".join(data for around, data in self.texts if tag in around)

    def table(self, kind, number=0):
        table = [e for e in self.tree.iter("table") if e.get("class") == kind][number]
        return [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")][1:]

    def definitions(self, number):
        made = list(self.tree.iter("dl"))[number]
        terms = ["".join(e.itertext()) for e in made.iter("dt")]
        return dict(zip(terms, ["".join(e.itertext()) for e in made.iter("dd")], strict=True))


def test_the_numbers_are_those_of_the_result(tmp_path):
    page = Page(page_of(result_of(FIELD, FIELD[:2]), tmp_path))
    default, chosen, fastest = (statistics.median(FIELD[i].samples_ms) for i in (0, 1, 2))

    row = page.table("calls")[0]
    assert row[:2] == ["1. attention forward", "f32[0,8]"]
    assert row[2:5] == [f"{default:.3g} ms", f"{chosen:.3g} ms", f"{default / chosen:.2f}×"]
    assert row[5:7] == ["6", "3"]
    assert row[7].endswith("result.json (measured)")

    head, figures, first, second = (page.definitions(i) for i in range(4))
    assert head == {"Device": "gpu:H100:9.0", "Toolchain": "jax 0.12.0", "Date": DATE}
    assert figures["Calls"] == "2"
    assert figures["Candidates"] == "8, 3 failed"
    assert figures["Saved, one run of each call"] == f"{2 * (default - chosen):.3g} ms of {2 * default:.3g} ms"
    assert figures["Speedup, geometric mean"] == f"{default / chosen:.2f}×"
    assert first["Regret"].startswith(f"{chosen - fastest:.3g} ms ({(chosen - fastest) / fastest:.1%}) above")
    assert first["Regret"].endswith("xla q_blocksize=256 kv_blocksize=64")
    assert first["Chosen"].startswith("xla q_blocksize=128 kv_blocksize=64, 1.04 ms ±")
    assert second["Regret"].startswith("none")
    kept = Page(render([reported(FIELD[:1])], date=DATE)).definitions(2)
    assert kept["Default"] == "the same: it was kept"

    rows = page.table("field")
    order = [FIELD[i] for i in (2, 1, 0)]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[1] for row in rows] == [f"xla q_blocksize={n} kv_blocksize=64" for n in (256, 128, 64)]
    assert [row[2] for row in rows] == [f"{statistics.median(c.samples_ms):.3g} ms" for c in order]
    assert [row[3] for row in rows] == [f"{c.noise_ms:.3g} ms" for c in order]
    assert [row[6:] for row in rows] == [["passed", ""], ["passed", "chosen"], ["passed", "default"]]


def heads_of(page):
    """The line above each message."""
    return ["".join(e.itertext()) for e in page.tree.iter("p") if e.find("strong") is not None]


def points_of(plot, gid):
    """The points of a path of a plot, or of its markers, each a column and a height from the top."""
    (group,) = [e for e in plot.iter(f"{SVG}g") if (e.get("id") or "").endswith(f"-{gid}")]
    if uses := list(group.iter(f"{SVG}use")):
        return [(float(use.get("x")), float(use.get("y"))) for use in uses]
    found = re.findall(r"M (\S+) (\S+)\s+L (\S+) (\S+)", "".join(e.get("d") for e in group.iter(f"{SVG}path")))
    return [((float(left) + float(right)) / 2, float(y)) for left, y, right, _ in found]


def texts_of(plot):
    return {"".join(e.itertext()) for e in plot.iter(f"{SVG}text")}


def test_the_plot_shows_every_sample_and_marks_chosen_and_default(tmp_path):
    page = Page(page_of(result_of(FIELD), tmp_path))
    (plot,) = page.tree.iter(f"{SVG}svg")
    points = points_of(plot, "samples")
    by_candidate = [{y for x, y in points if x == column} for column in sorted({x for x, _ in points})]
    # With the median of an even number of samples, which is not a sample itself.
    assert [len(ys) for ys in by_candidate] == [3, 5, 3]
    medians = points_of(plot, "medians")
    assert medians == sorted(medians)  # fastest first,
    heights = [y for _, y in medians]
    assert heights == sorted(heights, reverse=True)  # from the bottom to the top
    assert {"chosen: 1.04 ms", "default: 2.1 ms", "ms per call"} <= texts_of(plot)
    (said,) = [e.get("aria-label") for e in page.tree.iter("div") if e.get("role") == "img"]
    assert said.startswith("The field of attention forward: 3 candidates")
    assert "the chosen one is number 2 with 1.04 ms" in said


def test_one_that_is_wrong_but_fast_is_crossed_out_and_no_measure_of_regret():
    wrong = Candidate(config(1), (0.1, 0.1), check="failed", error="wrong")
    page = Page(render([reported([*FIELD[:3], wrong], chosen=2)], date=DATE))
    assert page.definitions(2)["Regret"].startswith("none")
    assert page.definitions(1)["Candidates"] == "4, 1 failed"
    (plot,) = page.tree.iter(f"{SVG}svg")
    assert len(points_of(plot, "wrong")) == 1
    assert len(points_of(plot, "medians")) == 3


def test_the_page_needs_nothing_and_runs_nothing(tmp_path):
    page = Page(page_of(result_of(FIELD, FIELD), tmp_path))
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "base", "form"}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name == "src"}
        for name in ("href", "xlink:href"):
            if name in attributes:
                assert attributes[name].startswith("#")
                assert attributes[name][1:] in ids
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.split("; ")[:2] == ["default-src 'none'", "style-src 'unsafe-inline'"]
    assert not re.search(r"https?:|url\(|@import", page.text("style"))
    assert {found for a in page.elements for found in re.findall(r"url\((.)", str(a))} <= {"#"}


def all_texts(text):
    """A call whose strings are all ``text``."""
    candidates = (
        Candidate(text, (1.0, 2.0), check=text, heuristic=True),
        Candidate(text, (0.5,), check=text),
        Candidate(text, check=text, error=text),
    )
    call = TunedCall(text, text, text, text, candidates, 1, step=text)
    return ReportedCall(call, text, {text: text}, text, (text,))


@functools.cache
def plain():
    return Page(render([all_texts("x")], date=DATE))


@given(st.text(st.characters(), min_size=1, max_size=200))
@example(HOSTILE)
@example("&#60;script&#62; &amp;")
@example("\r\n \t\x0b\x0c\x85\u2028\ufeff\ufffe\U0001ffff")
@example(" ")
def test_no_text_becomes_an_element(text):
    made = render([all_texts(text)], date=DATE)
    assert made.encode().decode() == made
    page = Page(made)
    assert page.shape == plain().shape
    assert page.text("pre") == visible(text)


@given(st.lists(st.lists(st.floats(), max_size=4), min_size=1, max_size=6))
@example([[1e308, 1e-320], [0.0], [-1.0], [math.inf, 1.0], [math.nan]])
@example([[1e-300, 1e-299], [1e11]])
@example([[5e-324], [5e-324]])
@example([[1e11], [1e11 + 1e-4]])
def test_no_number_breaks_the_page(samples):
    field = [Candidate("c", tuple(times), heuristic=not i) for i, times in enumerate(samples)]
    page = Page(render([reported(field)], date=DATE))
    for tag, attributes in page.elements:
        if tag in ("path", "rect", "use"):
            assert not re.search(r"nan|inf", " ".join(map(str, attributes.values())))


def test_what_cannot_be_seen_is_spelt_out():
    assert visible("\x1b[31mred\x00\ud800\u202e\ufeff\r\na\rb\tc") == (
        "\\x1b[31mred\\x00\\ud800\\u202e\\ufeff\na\\rb\tc"
    )
    assert visible("größer 日本 × 🙂") == "größer 日本 × 🙂"


def test_a_message_of_megabytes_is_cut_with_a_note():
    message = "begin" + "x" * 3_000_000 + "the end"
    text = render([reported([*FIELD[:2], Candidate(config(1), error=message)])], date=DATE)
    assert len(text) < MAX_MESSAGE + 30_000
    shown = Page(text).text("pre")
    assert shown.startswith("begin")
    assert shown.endswith("the end")
    assert f"{len(message) - MAX_MESSAGE:,} of {len(message):,} characters left out" in shown


def large_field(seed):
    """300 candidates: 60 of each of four implementations, 40 failures of two kinds, 20 that were not measured."""
    times = [1 + (seed * 7 + i * 37) % 240 / 100 for i in range(240)]
    names = ("hopper", "cuda", "cudnn", "xla")
    field = [
        Candidate(f"{names[i % 4]} block={i}", tuple(t + j / 50 for j in range(5)), "passed", heuristic=i == 0)
        for i, t in enumerate(times)
    ]
    field += [
        Candidate(f"cuda variant=v{i}", (), "failed", f"[0]: largest error {i}.5e-03, {i + 1} elements")
        for i in range(20)
    ]
    field += [Candidate(f"hopper rows={i}", (), error=f"RuntimeError: out of memory: {i} bytes") for i in range(20)]
    field += [
        Candidate(f"xla rows={i}", (), "dropped", f"it takes {i}.5 ms at the least, and another took 1 ms")
        for i in range(20)
    ]
    return tuple(field)


class TestOfManyCandidates:
    FIELD = large_field(1)

    @pytest.fixture
    def page(self, tmp_path):
        return Page(page_of(result_of(self.FIELD), tmp_path))

    def test_every_implementation_is_shown_by_its_best(self, page):
        rows = page.table("field")
        measured = sorted(self.FIELD[:240], key=lambda c: c.time_ms)
        assert [row[1] for row in rows] == [measured[int(row[0]) - 1].config for row in rows]
        shown = {row[1] for row in rows}
        for name in ("hopper", "cuda", "cudnn", "xla"):
            mine = [c.config for c in measured if c.config.split()[0] == name]
            assert set(mine[:3]) <= shown
        assert {c.config for c in measured[:60]} <= shown
        assert {self.FIELD[0].config, self.FIELD[1].config} <= shown  # default, chosen
        assert len(rows) <= 60 + 4 * 3 + 2
        (plot,) = page.tree.iter(f"{SVG}svg")
        assert len(points_of(plot, "medians")) == 240
        assert page.definitions(1)["Candidates"] == "300, 40 failed, 20 not measured"
        (said,) = ["".join(e.itertext()) for e in page.tree.iter("p") if "Left out" in "".join(e.itertext())]
        assert said.startswith(f"Left out: {240 - len(rows)} that are slower")
        assert "result.json" in said

    def test_every_message_stands_once_with_all_whom_it_concerns(self, page):
        """Also where messages differ in numbers alone."""
        assert [head.split(",")[0] for head in heads_of(page)] == ["20 candidates"] * 3
        assert ["".join(e.itertext()) for e in page.tree.iter("pre")] == [self.FIELD[i].error for i in (240, 260, 280)]

    def test_of_many_messages_some_are_shown(self):
        def words(i):
            return "".join(chr(97 + int(digit)) for digit in str(i))

        field = [*FIELD[:2], *(Candidate(config(i + 1), error=f"{words(i)} " + "x" * 2000) for i in range(3000))]
        text = render([reported(field)], date=DATE)
        assert len(text) < 100_000
        page = Page(text)
        assert len(list(page.tree.iter("pre"))) == 8
        (said,) = ["".join(e.itertext()) for e in page.tree.iter("p") if "further messages" in "".join(e.itertext())]
        assert said == "Left out: 2992 further messages, of 2992 candidates. All are in file."


def test_the_same_input_gives_the_same_bytes(tmp_path):
    first = page_of(result_of(FIELD, FIELD[:2]), tmp_path)
    assert page_of(result_of(FIELD, FIELD[:2]), tmp_path) == first
    invoke("report", str(tmp_path / "result.json"), "--out", str(tmp_path / "today.html"))
    dates = {datetime.datetime.now(datetime.UTC).date().isoformat()}
    today = (tmp_path / "today.html").read_text()
    dates.add(datetime.datetime.now(datetime.UTC).date().isoformat())
    assert today in [first.replace(DATE, date) for date in dates]


def test_files_merge_and_the_later_counts(tmp_path):
    (tmp_path / "a.json").write_text(result_of(FIELD, FIELD, device="gpu:A").to_json())
    (tmp_path / "b.json").write_text(result_of(FIELD[:2], device="gpu:B", jax="9").to_json())
    out = tmp_path / "page.html"
    said = invoke("report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out))
    assert "2 calls" in said
    page = Page(out.read_text())
    assert [row[5] for row in page.table("calls")] == ["2", "6"]
    assert page.definitions(0)["Device"] == "gpu:B; gpu:A"
    assert page.table("places") == [["gpu:B", "jax 9", "1"], ["gpu:A", "jax 0.12.0", "2"]]


def test_a_result_can_be_reported_where_its_kernels_are_not_installed(tmp_path):
    said = json.loads(result_of(FIELD).to_json())
    for candidate in said["entries"][0]["candidates"]:
        candidate["config"] = {"$dataclass": "this:Config", "fields": {"rows": 4, "none": None}}
    (tmp_path / "result.json").write_text(json.dumps(said))
    invoke("report", str(tmp_path / "result.json"), "--out", str(tmp_path / "page.html"))
    assert Page((tmp_path / "page.html").read_text()).table("field")[0][1] == "rows=4"
    assert "this" not in sys.modules  # a module of the standard library that prints when it is imported


def test_without_files_the_disk_cache_is_reported(cache_directory, tmp_path):
    invoke("tune", "flash_attention", "--shape", "1,32,2,16", "--json", str(tmp_path / "result.json"))
    cache = PersistentCache(cache_directory)
    elsewhere = json.dumps({"op": "other", "direction": "forward", "device": "gpu:elsewhere"})
    cache.put(elsewhere, 1, measurements=[Candidate(1, (1.0,)).fields()], metadata={"time_ms": 1.0})
    out = tmp_path / "page.html"
    assert invoke("report", "--out", str(out)).startswith("2 calls, ")
    page = Page(out.read_text())
    result = AutotuningResult.from_json((tmp_path / "result.json").read_text())
    by_direction = {row[0].split()[-1]: row for row in page.table("calls")}
    for call in result:
        row = by_direction[call.direction]
        assert row[1] == call.shapes
        assert row[3] == f"{call.winner.time_ms:.3g} ms"
        assert row[7].startswith("disk cache, 20")
    assert page.definitions(0)["Device"] == result.device == current_device().fingerprint


def test_an_entry_whose_config_is_of_an_unknown_type_is_reported_all_the_same():
    tagged = [{"$dataclass": "gone:Config", "fields": {"rows": rows}} for rows in (1, 2)]
    measurements = tuple(
        {"config": c, "samples_ms": {"$tuple": [ms]}, "check": "passed", "error": "", "heuristic": ms == 3.0}
        for c, ms in zip(tagged, (3.0, 2.0), strict=True)
    )
    key = json.dumps({"op": "mine", "direction": "forward", "device": "cpu:x", "args": [], "kwargs": {}})
    created = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    entry = Entry(key, None, "Config(2)", measurements, {"time_ms": 2.0, "complete": False}, {}, "", created, True)
    unusable = dataclasses.replace(entry, measurements=())
    calls, left_out = calls_of_cache([entry, unusable, dataclasses.replace(entry, key="{}")], "cpu:x")
    assert left_out == 1
    page = Page(render(calls, date=DATE))
    assert page.definitions(2)["Chosen"] == "rows=2, 2 ms"
    assert "cut short" in page.definitions(2)["Note"]
    assert "stale" in page.definitions(2)["Note"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\x00\xff\xfe", "result.json"),
        (b"[]", "not list"),
        (b"[" * 100_000, "result.json"),
        (b'{"schema": 2, "entries": []}', "schema"),
        (b'{"schema": 1, "device": "", "toolchain": {}, "interrupted": false, "entries": []}', "no call"),
        (b'{"schema": 1, "entries": [{"op": "x"}]}', "AutotuningResult"),
        (b'{"schema": 1, "device": "", "toolchain": {}, "decisions": [], "sha256": ""}', "it is a lock file"),
        (b'{"op": "x", "environment": {}, "measurements": [{}]}', "not the JSON of a bench"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_written(content, message, tmp_path, capsys):
    good, file, out = tmp_path / "good.json", tmp_path / "result.json", tmp_path / "page.html"
    good.write_text(result_of(FIELD).to_json())
    file.write_bytes(content)
    out.write_text("old")
    line = exits_with_one_line([good, file, "--out", out], capsys)
    assert message in line
    assert "result.json" in line
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [good, out, file]


def exits_with_one_line(arguments, capsys):
    code, out, line = ends(capsys, "report", *arguments)
    assert (code, out) == (2, "")
    return line


def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(tmp_path, capsys):
    file = tmp_path / "result.json"
    file.write_text(result_of(FIELD).to_json())
    missing = tmp_path / "missing.json"  # would be complained about if it were read
    assert "no directory" in exits_with_one_line([missing, "--out", tmp_path / "nowhere" / "x.html"], capsys)
    assert "is a directory" in exits_with_one_line([missing, "--out", tmp_path], capsys)
    assert "one of the files" in exits_with_one_line([file, "--out", file], capsys)
    assert "cannot read" in exits_with_one_line([missing, "--out", tmp_path / "x.html"], capsys)
    assert "--date" in exits_with_one_line([file, "--date", "today"], capsys)
    assert list(tmp_path.iterdir()) == [file]


def test_an_empty_cache_is_said_to_be(cache_directory, tmp_path, capsys):
    line = exits_with_one_line(["--out", tmp_path / "page.html"], capsys)
    assert str(cache_directory) in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_a_library_that_is_missing_is_named(library, monkeypatch, tmp_path, capsys):
    for name in ("page", "plot"):
        monkeypatch.delitem(sys.modules, f"tilewright.cli.report.{name}")
    monkeypatch.setitem(sys.modules, library, None)
    code, _, line = ends(capsys, "report", "--out", tmp_path / "page.html")
    assert code == 1
    assert f"a report needs {library}: pip install 'tilewright[plot]'" in line
