"""The power benchmark without a card: what it makes of nvidia-smi's samples."""

import math
import time

import pytest

from benchmarks.power import Smi


def test_samples_of_a_span() -> None:
    smi = Smi()
    smi.samples = [
        (0.9, ["100.0", "1980", "40", "0x0000000000000000"]),
        (1.0, ["650.5", "1700", "50", "0x0000000000000004"]),
        (1.1, ["700.5", "1500", "52", "0x0000000000000000"]),
        (1.2, ["690.0", "1600", "51", "0x000000000000000c"]),
        (1.3, ["[N/A]"]),
        (1.4, ["90.0", "1980", "40", "0x0000000000000000"]),
    ]
    found = smi.between(1.0, 1.3)
    assert found["samples"] == 3
    assert (found["power.draw.instant"], found["clocks.sm"], found["temperature.gpu"]) == (690.0, 1600.0, 51.0)
    assert math.isclose(found["power_capped"], 2 / 3)
    assert smi.between(2.0, 3.0) == {"samples": 0}


def test_it_is_read_until_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nwhile true; do echo '1.0, 2, 3, 0x4'; sleep 0.01; done\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with Smi() as smi:
        for _ in range(1000):
            if len(smi.samples) >= 3:
                break
            time.sleep(0.01)
    assert len(smi.samples) >= 3
    assert smi.between(0, float("inf"))["power_capped"] == 1.0
