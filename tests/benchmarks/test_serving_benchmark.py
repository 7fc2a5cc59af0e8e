"""The serving benchmark end to end on small cases: what it writes, not how fast anything is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import common, serving
from benchmarks.serving import CELLS, SMOKE, Oracle, Work, main


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *extra: str) -> dict[str, Any]:
    monkeypatch.setattr(common, "RESULTS", folder)
    main(["--rounds", "1", "--calls", "1", "--device-time", "wall", "--copy-bytes", "65536", *extra])
    (file,) = folder.rglob("serving*.json")
    return json.loads(file.read_text())


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, monkeypatch, "--cases", ",".join(SMOKE))
    assert [cell["case"] for cell in found["cells"]] == list(SMOKE)
    for cell in found["cells"]:
        ours = cell["implementations"]["tilewright xla"]
        assert ours["status"] == "timed"
        assert ours["bytes_per_s"] == pytest.approx(cell["bytes"] / ours["median_ms"] * 1e3)
        assert cell["implementations"]["tilewright triton"]["status"] == "failed"
        assert cell["yardsticks"] == {}  # nothing of it runs on a CPU
    assert "of a copy" in capsys.readouterr().out


def test_a_wrong_result_is_recorded_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work.of(SMOKE["smoke_decode"])
    oracle = Oracle(work.inputs)
    right = serving.ours(work, "xla")(*work.positional, **work.keywords)
    assert oracle.violations(right) == []
    assert oracle.violations(right * 1.01)
    assert "not finite" in oracle.violations(right.at[0].set(np.nan))[0]


def test_the_work_of_full_sequences_is_what_the_cache_holds() -> None:
    work = Work.of(SMOKE["smoke_decode"])
    lengths = np.asarray(work.inputs.kv_lengths)
    assert work.flops == 4 * lengths.sum() * 4 * 16
    assert work.bytes == lengths.sum() * 2 * 2 * 16 * 4 + 2 * 3 * 4 * 16 * 4


def test_the_goals_are_those_of_decoding() -> None:
    goals = {name: cell.goal for name, cell in CELLS.items() if cell.goal is not None}
    assert goals == {
        "64x8192_page16": 1.0, "64x8192_page64": 1.0, "8x32768": 0.95, "1x131072": 0.9, "256x1024": 0.97,
        "16x8192_d256": 0.95,
    }  # fmt: skip
