"""``tilewright tune OP --stale``: the table that ships for a device is measured anew where it is stale."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewright.cli import recording
from tilewright.cli.app import app
from tilewright.kernels import kernel
from tilewright.ops import AutotuningResult, device_fingerprint
from tilewright.ops.config.tables import load_tables, table_file

pytestmark = pytest.mark.usefixtures("cache_directory")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tables in place of the package's, and few cases."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(recording, "shipped_folder", lambda: folder)
    for op in ("rms_norm", "layer_norm"):
        cases = kernel(op).cases
        two = {name: dataclasses.replace(cases.small, name=name, rows=n) for n, name in ((2, "two"), (3, "three"))}
        monkeypatch.setattr(type(kernel(op)), "cases", dataclasses.replace(cases, by_device={"cpu": two}))
    return folder


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", *arguments, "--stale", "--isolation", "none"])
    assert result.exit_code == code, result.output
    return result.output


def document(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(table_file(device_fingerprint(), folder).read_text())
    return said


def test_what_is_missing_or_stale_is_measured(folder: Path) -> None:
    assert "4 entries missing or stale, 4 of them recorded in" in invoke("rms_norm")
    said = document(folder)
    assert said["commands"] == ["tilewright tune rms_norm --stale"]
    assert {(entry["op"], entry["direction"]) for entry in said["entries"]} == {
        ("rms_norm", "forward"), ("rms_norm", "backward"),
    }  # fmt: skip
    table = load_tables(device_fingerprint(), folder)
    assert not any(entry.is_stale(kernel("rms_norm")) for entry in table.values())
    assert "0 entries missing or stale" in invoke("rms_norm")
    said_of_op = invoke("rms_norm", "--budget", "1e-9")
    assert "the budget had ended: rms_norm" in said_of_op

    kept, *others = said["entries"]
    others[0]["source"] = "of old"
    table_file(device_fingerprint(), folder).unlink()
    (folder / "another.json").write_text(json.dumps(said | {"entries": [kept, others[0]]}))  # the other two are missing
    assert "3 entries missing or stale, 3 of them recorded in" in invoke("rms_norm", "--again")
    entries = {entry["key"]: entry for entry in document(folder)["entries"]}
    assert len(entries) == 4
    assert entries[kept["key"]] == kept
    assert all(entry["source"] for entry in entries.values())


def test_all_ops_are_measured_even_if_one_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "OPS", ("rms_norm", "layer_norm"))
    tune = recording.tune_invocations

    def failing(calls: Any, **options: Any) -> AutotuningResult:
        if calls[0].kernel.name == "rms_norm":
            raise ExceptionGroup("every candidate failed", [ValueError("for a reason")])
        return tune(calls, **options)

    monkeypatch.setattr(recording, "tune_invocations", failing)
    said = invoke("all", code=1)
    assert "8 entries missing or stale, 4 of them recorded in" in said
    assert "rms_norm: every candidate failed" in said
    assert {entry["op"] for entry in document(folder)["entries"]} == {"layer_norm"}


@pytest.mark.parametrize("further", [["--shape", "2,8"], ["--case", "all"], ["--json", "a.json"], ["--lock", "a.json"]])
def test_takes_no_call(folder: Path, further: list[str]) -> None:
    assert "--stale" in invoke("rms_norm", *further, code=2)
    assert list(folder.iterdir()) == []
