"""``python -m tools.tables OP``: the table that ships for a device is measured anew where it is stale."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright.kernels import kernel
from tilewright.ops import AutotuningResult, device_fingerprint
from tilewright.ops.config.tables import load_tables, table_file
from tools import tables

pytestmark = pytest.mark.usefixtures("cache_directory")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tables in place of the package's, and few cases."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder)
    for op in ("rms_norm", "layer_norm"):
        cases = kernel(op).cases
        two = {name: dataclasses.replace(cases.small, name=name, rows=n) for n, name in ((2, "two"), (3, "three"))}
        monkeypatch.setattr(type(kernel(op)), "cases", dataclasses.replace(cases, by_device={"cpu": two}))
    return folder


def run(*arguments: str) -> int:
    return tables.main([*arguments, "--isolation", "none"])


def document(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(table_file(device_fingerprint(), folder).read_text())
    return said


def test_what_is_missing_or_stale_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said_of(*arguments: str) -> str:
        assert run(*arguments) == 0
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "4 entries missing or stale, 4 of them recorded in" in said_of("rms_norm")
    said = document(folder)
    assert said["commands"] == ["python -m tools.tables rms_norm"]
    assert {(entry["op"], entry["direction"]) for entry in said["entries"]} == {
        ("rms_norm", "forward"), ("rms_norm", "backward"),
    }  # fmt: skip
    table = load_tables(device_fingerprint(), folder)
    assert not any(entry.is_stale(kernel("rms_norm")) for entry in table.values())
    assert "0 entries missing or stale" in said_of("rms_norm")
    assert "the budget had ended: rms_norm" in said_of("rms_norm", "--budget", "1e-9")

    kept, *others = said["entries"]
    others[0]["source"] = "of old"
    table_file(device_fingerprint(), folder).unlink()
    (folder / "another.json").write_text(json.dumps(said | {"entries": [kept, others[0]]}))  # the other two are missing
    assert "3 entries missing or stale, 3 of them recorded in" in said_of("rms_norm", "--again")
    entries = {entry["key"]: entry for entry in document(folder)["entries"]}
    assert len(entries) == 4
    assert entries[kept["key"]] == kept
    assert all(entry["source"] for entry in entries.values())


def test_all_ops_are_measured_even_if_one_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "OPS", ("rms_norm", "layer_norm"))
    tune = tables.tune_invocations

    def failing(calls: Any, **options: Any) -> AutotuningResult:
        if calls[0].kernel.name == "rms_norm":
            raise ExceptionGroup("every candidate failed", [ValueError("for a reason")])
        return tune(calls, **options)

    monkeypatch.setattr(tables, "tune_invocations", failing)
    assert run("all") == 1
    captured = capsys.readouterr()
    assert "8 entries missing or stale, 4 of them recorded in" in captured.out
    assert "rms_norm: every candidate failed" in captured.err
    assert {entry["op"] for entry in document(folder)["entries"]} == {"layer_norm"}
