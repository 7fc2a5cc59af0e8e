"""The benchmark of tuning, on a case small enough for a CPU: its record, and a table that selection reads."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

import tilewright
from benchmarks.attention import SMOKE_CASES, chosen_cases
from benchmarks.attention_tuned import behind, contenders, invocation, main
from benchmarks.common import RESULTS, recorded
from tilewright.kernels.flash_attention.xla.backend import FwdParams
from tilewright.kernels.op.choice import Choice
from tilewright.ops import ConfigSelectorChain
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.kernel.candidates import Candidate


def test_a_run_leaves_a_record_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "record.json", tmp_path / "tables" / "cpu.json"
    table.parent.mkdir()
    options = ["--cases", "smoke_causal", "--rounds", "2", "--out", str(out), "--table", str(table)]
    assert main(options) == 0
    record = json.loads(out.read_text())
    assert [(cell["case"], cell["direction"]) for cell in record["cells"]] == [
        ("smoke_causal", "forward"),
        ("smoke_causal", "backward"),
    ]
    for cell in record["cells"]:
        assert cell["tuned_ms"] > 0
        assert len(cell["samples_ms"]["tuned"]) == 2
        assert cell["candidates"][0]["check"] == "passed"
        assert cell["regret"] is not None
    assert "2 calls" in capsys.readouterr().out
    # A second run adds to both.
    assert main([*options, "--keep", "--directions", "forward"]) == 0
    record = json.loads(out.read_text())
    assert len(record["runs"]) == 2
    assert len(record["cells"]) == 2
    said = json.loads(table.read_text())
    assert len(said["commands"]) == 2
    assert "--table" in said["commands"][0]
    assert len(AutotuningResult.from_json(table.read_text())) == 2
    for direction in ("forward", "backward"):
        inv = invocation(SMOKE_CASES["smoke_causal"], direction)
        assert ConfigSelectorChain(tables=table.parent).lookup(inv).step == "shipped"


def test_nothing_starts_when_the_time_is_over(tmp_path: Path) -> None:
    assert main(["--cases", "smoke_causal", "--seconds", "0", "--out", str(tmp_path / "record.json")]) == 0
    assert json.loads((tmp_path / "record.json").read_text())["cells"] == []


def candidate(backend: str, block: int, ms: float, **fields: object) -> Candidate:
    return Candidate(Choice(backend, FwdParams(q_blocksize=block)), (ms,), **fields)


def test_contenders_are_the_best_of_every_implementation_that_came_near() -> None:
    candidates = (
        candidate("xla", 1, 1.0, heuristic=True),
        candidate("xla", 2, 0.85),
        candidate("cuda", 1, 0.8),
        candidate("cuda", 2, 0.7, error="wrong"),
        candidate("hopper", 1, 0.6),
        candidate("triton", 1, 1.0),
    )
    call = TunedCall("op", "forward", "{}", "", candidates, 4)
    found = {name: each.config.params.q_blocksize for name, each in contenders(call).items()}
    assert found == {"tuned": 1, "default": 1, "hopper": 1, "cuda": 1, "xla": 2}


@pytest.mark.parametrize(("over", "single", "said"), [(1.0, 1.019, False), (1.03, 1.0, True), (None, 1.03, True)])
def test_what_is_behind(over: float | None, single: float, said: bool) -> None:
    assert behind({"over_default": over, "over_best_single": single}) is said


REBUILT_SINCE = ("dropout_4k", "d192_v128_4k")
"""Cases whose Hopper kernels have changed since the recorded run: the tables that ship have no entries for them."""

REMOVED = "d72_4k"
"""The case whose winner on an H100, a kernel in CUDA C++, was removed: the table has the fastest of the others."""


@pytest.mark.parametrize(
    ("device_kind", "name"), [("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA H200", "h200")]
)
def test_what_ships_is_what_the_recorded_run_found(device_kind: str, name: str) -> None:
    record = recorded(RESULTS / f"nvidia-{name}" / "attention_tuned.json")
    found = AutotuningResult.from_json(files("tilewright").joinpath("tables", f"nvidia-{name}.json").read_text())
    winners = {entry.key: entry.winner.config for entry in found if entry.op == "flash_attention"}
    chain = ConfigSelectorChain()
    with tilewright.target_device(device_kind):
        for cell in record["cells"]:
            if cell["case"] in REBUILT_SINCE:
                continue
            inv = invocation(chosen_cases(cell["case"])[0], cell["direction"])
            # ``ahead`` is younger than the records; what was measured then is its default.
            winner = str(winners.pop(inv.key)).replace(", ahead=True", "")
            was_removed = cell["case"] == REMOVED and cell["tuned_config"] == "cuda()"
            assert winner == ("cudnn()" if was_removed else cell["tuned_config"])
            choice = chain.lookup(inv)
            assert choice.step == "shipped", (cell["case"], cell["direction"], choice)
    assert not winners
