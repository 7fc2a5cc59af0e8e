"""The zoo's problems, its report's arithmetic on a record that is made up, and a run of a problem that a CPU can do."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention_zoo
from benchmarks.attention import Method
from benchmarks.attention_peers import OURS, Call, Operands
from benchmarks.attention_zoo import Outcome, Task, carry_out, chosen_problems, main, measure_within
from benchmarks.attention_zoo_cases import GROUPS, SMOKE, ZOO
from benchmarks.attention_zoo_report import FA4, LIBRARIES, TUNED, markdown, row_of, rows_of, summaries, summary, text

METHOD = Method(rounds=3, calls=2, device_time="wall", jobs=1)


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "problem": SMOKE["smoke_causal"],
        "directions": ("forward",),
        "peers": (OURS, "xla", f"{OURS} pallas", FA4),
        "method": METHOD,
        "seconds": 0.5,
        "tuning_s": None,
        "deadline": time.monotonic() + 1000.0,
        "cache": "",
    }
    return Task(**fields | changes)


def test_every_third_problem_by_name_is_held_out_and_another_third_tuned() -> None:
    for position, problem in enumerate(ZOO.values()):
        assert problem.held_out == (position % 3 == 2)
        assert problem.tuned == (position % 3 == 0)
    assert GROUPS["dev"].keys() | GROUPS["held"].keys() == GROUPS["all"].keys()
    assert not GROUPS["dev"].keys() & GROUPS["held"].keys()
    assert GROUPS["tuned"].keys() <= GROUPS["dev"].keys()


def test_the_oracle_of_a_problem_fits_a_card() -> None:
    for problem in ZOO.values():
        case = problem.case
        _, heads, q_length, kv_length = case.score_shape
        assert 8 * 4 * heads // (case.kv_heads or heads) * q_length * kv_length < 20e9, problem.name
        assert Operands.shapes(case).cotangent.size < 1 << 30


def timed(ms: float, **fields: Any) -> dict[str, Any]:
    return {"status": "timed", "clock": "device", "median_ms": ms, "wall_ms": [ms, 2 * ms, 9 * ms], **fields}


def cell(case: str, implementations: dict[str, Any], *, held_out: bool = False) -> dict[str, Any]:
    return {"case": case, "direction": "forward", "held_out": held_out, "implementations": implementations}


RECORD = {
    "cells": [
        cell("slower", {OURS: timed(2.0, backend="hopper", step="heuristic"), "cudnn": timed(1.0), "xla": timed(3.0)}),
        cell("faster", {OURS: timed(1.0, backend="hopper"), FA4: timed(2.0), "cudnn": {"status": "cannot"}}),
        cell(
            "library",
            {
                OURS: timed(1.0, backend="cudnn"),
                f"{OURS} pallas": timed(0.8),
                "cudnn": timed(0.96),
                TUNED: timed(0.7),
            },
            held_out=True,
        ),
        cell("wrong", {OURS: {"status": "wrong"}, "cudnn": timed(1.0)}, held_out=True),
        cell("alone", {OURS: timed(1.0, backend="hopper"), "cudnn": {"status": "cannot"}}),
    ]
}  # fmt: skip


def test_rows_of_a_made_up_record() -> None:
    rows = {row.case: row for row in rows_of(RECORD)}
    assert list(rows) == ["alone", "faster", "library", "slower", "wrong"]
    assert (rows["slower"].ratio, rows["slower"].peer, rows["slower"].regret) == (0.5, "cudnn", 0.0)
    assert (rows["slower"].step, rows["slower"].wall_ratio) == ("heuristic", 0.5)
    assert (rows["faster"].ratio, rows["faster"].peer) == (2.0, FA4)
    library = rows["library"]
    assert library.by_library
    assert library.backend in LIBRARIES
    assert (library.own, library.ratio) == (f"{OURS} pallas", 0.96)
    assert math.isclose(library.regret or 0.0, 0.25)
    assert math.isclose(library.tuned_ratio or 0.0, 0.96 / 0.7)
    assert (rows["wrong"].ratio, rows["wrong"].status, rows["wrong"].regret) == (0.0, "wrong", None)
    assert rows["alone"].ratio is None


def test_one_clock_for_all_of_a_cell() -> None:
    mixed = cell("mixed", {OURS: timed(1.0), "cudnn": timed(2.0) | {"clock": "wall", "wall_ms": [3.0]}})
    row = row_of(mixed)
    assert (row.clock, row.ours_ms, row.peer_ms) == ("wall", 2.0, 3.0)


def test_summaries_of_a_made_up_record() -> None:
    found = summaries(rows_of(RECORD))
    everything = found["all"]
    assert (everything.cells, everything.compared, everything.ahead, everything.near) == (5, 4, 0.25, 0.5)
    assert math.isclose(everything.mean_ratio, (0.5 * 2.0 * 0.96) ** (1 / 3))
    assert [row.case for row in everything.worst] == ["wrong", "slower", "library", "faster"]
    assert math.isclose(everything.max_regret, 0.25)
    assert (found["all, without libraries"].compared, found["all, without libraries"].near) == (3, 1 / 3)
    assert (found["development"].compared, found["development"].ahead) == (2, 0.5)
    assert (found["held out"].near, found["held out, without libraries"].near) == (0.5, 0.0)
    assert "all, backward" not in found
    assert math.isnan(summary([]).ahead)


def test_reports_show_every_cell() -> None:
    for report in (text(RECORD), markdown(RECORD)):
        for name in ("slower", "faster", "library (held out)", "wrong", "alone", "FlashAttention-4", "cudnn*"):
            assert name in report
    assert text({"cells": []}) == "no cells"
    widths = {line.count("|") for line in markdown(RECORD).splitlines() if line.startswith("|")}
    assert widths == {9, 12}


def test_rounds_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def measure(named: dict[str, Call], method: Method) -> dict[str, Any]:
        asked.append((list(named), method.rounds))
        time.sleep(0.02 * method.rounds)
        fails = {"fails": {"status": "failed"}} if "fails" in named else {}
        return {n: {"calls": 1, "device_ms": [], "wall_ms": [1.0] * method.rounds} for n in named} | fails

    monkeypatch.setattr(attention_zoo, "measure", measure)
    calls = {name: Call(lambda: None, ()) for name in ("runs", "fails")}
    method = Method(rounds=8, calls=1, device_time="wall", jobs=1)
    found = measure_within(10.0, calls, method)
    assert asked == [(["runs", "fails"], 2), (["runs"], 6)]
    assert len(found["runs"]["wall_ms"]) == 8
    assert found["fails"] == {"status": "failed"}
    asked.clear()
    measure_within(0.01, calls, method)
    assert asked == [(["runs", "fails"], 2)]


def test_a_problem_is_compiled_checked_and_measured() -> None:
    outcome = carry_out(task())
    (found,) = outcome.cells
    assert (found["case"], found["model"], found["held_out"]) == ("smoke_causal", "none", False)
    ours = found["implementations"][OURS]
    assert (ours["status"], ours["backend"], ours["step"]) == ("timed", "xla", "heuristic")
    assert "labels" not in ours
    assert 2 <= len(ours["wall_ms"]) <= 3
    for name in (f"{OURS} pallas", FA4):
        assert found["implementations"][name]["status"] == "cannot"
    assert row_of(found).peer == "xla"


def test_logits_that_are_too_large_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_zoo, "MAX_LOGIT_BYTES", 100)
    (found,) = carry_out(task(peers=(OURS, "xla"))).cells
    assert found["implementations"]["xla"]["status"] == "cannot"
    assert row_of(found).ratio is None


def test_nothing_is_measured_when_the_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "zoo.json"
    assert main(["--group", "smoke", "--budget", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["cells"] == []
    assert set(found["runs"][0]["without cells"]) == set(SMOKE)


def test_missing_problems_and_what_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def in_process(task: Task) -> Outcome:
        asked.append(task.problem.name)
        if task.problem.name == "smoke_cross":
            return Outcome(message="its process died with -9")
        return Outcome(({**cell(task.problem.name, {OURS: timed(1.0)})},), 1.0)

    monkeypatch.setattr(attention_zoo, "in_process", in_process)
    options = ["--group", "smoke", "--jobs", "1", "--out", str(tmp_path / "zoo.json")]
    main(options)
    main([*options, "--missing", "--markdown", str(tmp_path / "zoo.md")])
    assert asked == ["smoke_causal", "smoke_cross", "smoke_cross"]
    found = json.loads((tmp_path / "zoo.json").read_text())
    assert [each["case"] for each in found["cells"]] == ["smoke_causal"]
    assert "died" in found["runs"][1]["without cells"]["smoke_cross"]
    assert "smoke_causal" in (tmp_path / "zoo.md").read_text()


def test_names_that_do_not_exist() -> None:
    with pytest.raises(SystemExit, match="no problem 'nothing'"):
        chosen_problems("nothing", "all")
    assert [problem.name for problem in chosen_problems("vit_l16_224,smoke_cross", "all")] == [
        "vit_l16_224",
        "smoke_cross",
    ]


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zoo.json"
    options = ["--cases", "smoke_causal", "--jobs", "2", "--threads", "2", "--rounds", "2", "--calls", "2"]
    assert main([*options, "--peers", f"{OURS},xla", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["benchmark"] == "attention_zoo"
    assert [(each["case"], each["direction"]) for each in found["cells"]] == [
        ("smoke_causal", "forward"),
        ("smoke_causal", "backward"),
    ]
    assert {each["implementations"][OURS]["backend"] for each in found["cells"]} == {"xla"}
    assert "within 5 %" in capsys.readouterr().out
