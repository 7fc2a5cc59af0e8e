"""Two processes of one JAX program, which would choose different configs."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "agreement_job.py"
ROOT = JOB.parent.parent.parent.parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def run_job(*scenarios, timeout_s=120.0, **environment):
    """Runs both processes; returns by scenario what each printed (None if it ended without), and their errors."""
    port, env = free_port(), {name: text for name, text in os.environ.items() if not name.startswith("XLA_FLAGS")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    command = [sys.executable, str(JOB)]
    processes = [
        subprocess.Popen(
            [*command, str(index), "2", str(port), *scenarios],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    found, errors = [], []
    try:
        for process in processes:
            printed, error = process.communicate(timeout=timeout_s)
            said = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("JSON ")]
            found.append({each["scenario"]: each for each in said})
            errors.append(error)
    finally:
        for process in processes:
            process.kill()
    return {scenario: tuple(each.get(scenario) for each in found) for scenario in scenarios}, errors


@pytest.fixture(scope="module")
def job():
    """What two processes said of several programs, one after the other."""
    found, errors = run_job("choices", "tuning", "lock", "ops", "silent", TILEWRIGHT_AGREE_TIMEOUT_S="20")
    assert not any(None in each for each in found.values()), errors
    return found


def test_processes_with_different_caches_run_the_choice_of_process_0(job):
    zero, one = job["choices"]
    # For sizes 2 and 3 process 0 has 20 and 30 in its cache, process 1 has 21 and 31.
    assert zero["first"] == one["first"] == [[20, 40], [30, 60]]
    assert zero["again"] == one["again"] == zero["first"]
    assert zero["texts"] == one["texts"]
    assert zero["asked again"] == one["asked again"] == 0
    assert zero["warnings"] == []
    assert len(one["warnings"]) == 2
    warning = one["warnings"][1]
    assert all(text in warning for text in ("adds.choices (forward)", "size=20", "size=21"))
    assert warning.count("from: memory") == 2
    assert (zero["alone"], one["alone"]) == (40, 41)
    assert (zero["each"], one["each"]) == (50, 51)
    assert zero["then agreed"] == one["then agreed"] == 50
    assert zero["cannot run"] == "lowered"
    assert "process 0 runs adds.choices" in one["cannot run"]["error"]
    assert "it is too large for this process" in one["cannot run"]["error"]


def test_process_0_alone_measures_and_the_other_waits_longer_for_it(job):
    zero, one = job["tuning"]
    assert zero["tuned"] == one["tuned"] == [0, 0]
    assert (zero["origin"], one["origin"]) == ("autotune", None)


def test_a_lock_or_an_overlay_of_all_processes_decides_and_one_that_differs_is_an_error(job):
    zero, one = job["lock"]
    assert zero["locked"] == one["locked"] == [7, 14]
    assert zero["overlaid"] == one["overlaid"] == [8, 16]
    assert zero["one has a lock"] == one["one has a lock"] == [6, 12]
    assert [text for text in zero["warnings"] if "does not decide" not in text] == []
    (warning,) = one["warnings"]
    assert all(text in warning for text in ("from: lock, /", "from: heuristic"))
    assert zero["two locks"] == "lowered"
    assert "give all processes the same one" in one["two locks"]["error"]
    assert 1 <= one["two locks"]["seconds"] < 10


def test_attention_and_matmul_with_gradients_are_one_program(job):
    zero, one = job["ops"]
    assert zero["differ"]
    assert zero["text"] == one["text"]
    assert (zero["value"], zero["d_w"]) == (one["value"], one["d_w"])
    assert zero["warnings"] == []
    (warning,) = one["warnings"]
    assert warning.startswith("flash_attention (forward) for ")


def test_programs_of_one_process_are_its_own():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "TILEWRIGHT_AGREE_TIMEOUT_S": "1"}
    found, errors = run_job("local", **environment)
    _, one = found["local"]
    assert None not in found["local"], errors
    assert one["mapped"] == [11] * 6
    assert one["eager"] == one["in a mesh"] == 0  # of another shape than the one in its cache
    assert "process 0 did not decide adds.local (forward) for f32[2,3]" in one["by arrays"]


def test_a_process_that_gets_no_answer_raises_in_time(job):
    _, one = job["silent"]
    assert 1 <= one["silent"]["seconds"] < 10
    for text in ("process 0 did not decide adds.silent (forward)", "TILEWRIGHT_AGREE_TIMEOUT_S", "TILEWRIGHT_AGREE=0"):
        assert text in one["silent"]["error"]


def test_a_process_whose_leader_is_killed_does_not_hang():
    began = time.monotonic()
    found, errors = run_job("killed", timeout_s=60.0, TILEWRIGHT_AGREE_TIMEOUT_S="15")
    zero, one = found["killed"]
    assert zero is None
    assert one is None or "process 0" in one["killed"]["error"], errors  # JAX ends the process, or it raises
    assert time.monotonic() - began < 30
