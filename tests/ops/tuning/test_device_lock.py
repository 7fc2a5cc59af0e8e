"""DeviceLock among threads and among real processes."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tilewright.ops.tuning import device_lock as turns_module
from tilewright.ops.tuning.device_lock import DeviceLock, device_lock_on
from tilewright.ops.types import Device

GPU = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))


def gate_is_closed(path: Path) -> bool:
    with open(f"{path}.gate", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_waits_to_be_alone_is_not_overtaken(tmp_path: Path) -> None:
    device_lock, order = DeviceLock(tmp_path / "device"), []
    first, second = threading.Event(), threading.Event()

    def compile_first() -> None:
        with device_lock.shared():
            first.set()
            assert second.wait(10)
            order.append("compiled")

    def compile_later() -> None:
        with device_lock.shared():
            order.append("compiled later")

    def measure() -> None:
        with device_lock.exclusive():
            order.append("measured")
            time.sleep(0.02)

    threads = [threading.Thread(target=target) for target in (compile_first, measure, compile_later)]
    threads[0].start()
    assert first.wait(10)
    threads[1].start()
    while not gate_is_closed(tmp_path / "device"):
        time.sleep(0.001)
    threads[2].start()
    second.set()
    for thread in threads:
        thread.join(10)
    assert order == ["compiled", "measured", "compiled later"]


def test_within_a_turn_another_is_had_at_once(tmp_path: Path) -> None:
    device_lock = DeviceLock(tmp_path / "device")
    with device_lock.exclusive(), device_lock.exclusive(), device_lock.shared():
        pass
    with device_lock.shared(), device_lock.exclusive():
        pass
    with device_lock.exclusive():
        pass


def test_a_turn_ends_with_an_error(tmp_path: Path) -> None:
    device_lock = DeviceLock(tmp_path / "device")
    with pytest.raises(ValueError, match="in a turn"), device_lock.exclusive():
        raise ValueError("in a turn")
    with device_lock.exclusive():
        pass


PROCESS = """
import sys, threading, time
from pathlib import Path
from tilewright.ops.tuning.device_lock import DeviceLock

device_lock, said = DeviceLock(Path(sys.argv[1])), []

def work(how, turn, seconds):
    for _ in range(6):
        with turn():
            start = time.monotonic()
            time.sleep(seconds)
            said.append((how, start, time.monotonic()))

compiling, measuring = ("shared", device_lock.shared, 0.01), ("alone", device_lock.exclusive, 0.005)
threads = [threading.Thread(target=work, args=each) for each in (compiling, compiling, measuring)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*(f"{how} {start} {end}" for how, start, end in said), sep="\\n")
"""


def test_processes_leave_each_other_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "device")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    lines = [line.split() for process in processes for line in process.communicate(timeout=120)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0, 0]
    device_lock = [(how, float(start), float(end)) for how, start, end in lines]
    assert len(device_lock) == 3 * 18
    for i, (how, start, end) in enumerate(device_lock):
        for other_how, other_start, other_end in device_lock[:i]:
            if "alone" in (how, other_how):
                assert end <= other_start or other_end <= start


def test_a_killed_process_gives_its_turn_back(tmp_path: Path) -> None:
    held = "import sys, time; from pathlib import Path; from tilewright.ops.tuning.device_lock import DeviceLock\n"
    held += "with DeviceLock(Path(sys.argv[1])).exclusive(): print('alone', flush=True); time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", held, str(tmp_path / "device")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alone\n"
        assert gate_is_closed(tmp_path / "device")
        process.kill()
        process.wait()
        with DeviceLock(tmp_path / "device").exclusive():
            pass


def test_each_card_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module.tempfile, "gettempdir", lambda: str(tmp_path))
    paths = []
    for visible in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        paths.append(device_lock_on(GPU)._path)
    assert paths[0] != paths[1]
    assert all(path is not None and path.parent.parent == tmp_path for path in paths)
    assert device_lock_on(Device("cpu", "cpu"))._path is None


def test_a_folder_that_another_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"tilewright-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    path = device_lock_on(GPU)._path
    assert path is not None
    assert not list((tmp_path / "elsewhere").iterdir())
    assert path.parent.name != f"tilewright-{os.getuid()}"
