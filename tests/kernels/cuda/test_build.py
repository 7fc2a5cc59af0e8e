"""The build and its cache, with a stand-in for nvcc: what is built once, what is never loaded, what is left behind."""

import dataclasses
import fcntl
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import fake_nvcc
from tilewright.errors import BuildError
from tilewright.kernels.cuda import (
    BuildCache,
    Group,
    GroupDone,
    GroupStarted,
    build,
    find,
    groups_of,
)
from tilewright.kernels.cuda.build import _content, build_key, default_jobs
from tilewright.kernels.cuda.headers import hash_headers
from tilewright.ops.kernel import builds

ROOT = Path(__file__).parents[3]

# A process of its own that builds what its arguments name: folder of the table, cache, groups.
BUILDER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.support.fake_nvcc import sample_table
from tilewright.kernels.cuda import BuildCache, Group, build
folder, cache, *names = sys.argv[1:]
table = sample_table(Path(folder))
print(*build([Group(table, name, 90) for name in names or ["fast"]], cache=BuildCache(Path(cache))).values())
"""


def start_builder(folder, cache, *groups, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(folder), str(cache.path), *groups],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ".", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition, process):
    for _ in range(1200):
        if condition():
            return
        if process.poll() is not None:
            raise RuntimeError(f"ended too early: {process.communicate()}")
        time.sleep(0.05)
    raise TimeoutError


def left_behind(cache):
    """What is in the cache beside finished builds."""
    return [path.name for path in cache.path.iterdir() if path.name.startswith(".")]


def test_a_table_is_built_once(nvcc, cache, table):
    events = []
    groups = groups_of(table, 90)
    assert [find(group, cache) for group in groups] == [None, None]
    built = build(groups, jobs=2, cache=cache, on_event=events.append)
    assert [str(group) for group in built] == ["sample fast sm_90a", "sample slow sm_90a"]
    assert sum(isinstance(event, GroupStarted) for event in events) == 2
    assert all(event.seconds > 0 for event in events if isinstance(event, GroupDone))
    assert len(nvcc.compilations()) == 2

    events.clear()
    assert build(groups, cache=cache, on_event=events.append) == built
    assert [find(group, cache) for group in groups] == list(built.values())
    assert [event.seconds for event in events] == [0, 0]
    assert len(nvcc.compilations()) == 2
    assert left_behind(cache) == []


def test_the_compiler_is_told_architecture_and_folders(nvcc, cache, table):
    build([Group(table, "slow", 80)], cache=cache)
    (line,) = nvcc.compilations()
    for part in ("arch=compute_80,code=sm_80", "-DTILEWRIGHT_ARCH=80", f"-I{table.header.parent}", "slow.cu"):
        assert part in line
    build([Group(table, "slow", 90)], cache=cache)
    assert "arch=compute_90a,code=sm_90a" in nvcc.compilations()[1]


def test_everything_is_its_owners_alone(nvcc, cache, table):
    before = os.umask(0)
    try:
        (library,) = build([Group(table, "fast", 90)], cache=cache).values()
    finally:
        os.umask(before)
    for folder in (cache.path, library.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(path.name for path in library.parent.iterdir())
    assert files == ["dispatch.h", "fast.cu", "library.so", "record.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in library.parent.iterdir()} == {0o600}
    assert json.loads((library.parent / "record.json").read_text())["target"] == "90a"


def tamper_with_bytes(folder):
    library = folder / "library.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)


def tamper_with_record(folder):
    (folder / "record.json").write_text("[]")


def open_to_others(folder):
    os.chmod(folder / "library.so", 0o666)


def lead_elsewhere(folder):
    os.rename(folder / "library.so", folder / "other.so")
    os.symlink(folder / "other.so", folder / "library.so")


@pytest.mark.parametrize(
    "change",
    [tamper_with_bytes, tamper_with_record, open_to_others, lead_elsewhere],
    ids=lambda f: f.__name__,
)
def test_what_was_tampered_with_is_built_anew(change, nvcc, cache, table):
    group = Group(table, "fast", 90)
    (library,) = build([group], cache=cache).values()
    good = library.read_bytes()
    change(library.parent)
    assert find(group, cache) is None
    assert build([group], cache=cache) == {group: library}
    assert library.read_bytes() == good
    assert find(group, cache) == library
    assert len(nvcc.compilations()) == 2
    assert left_behind(cache) == []


def test_a_file_in_the_place_of_a_build_is_replaced(nvcc, cache, table):
    group = Group(table, "fast", 90)
    cache.path.mkdir(mode=0o700)
    (cache.path / build_key(group).name).write_text("not a folder")
    assert build([group], cache=cache)[group] == find(group, cache)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702], ids=oct)
def test_a_folder_that_others_may_write_is_refused(nvcc, cache, table, mode):
    group = Group(table, "fast", 90)
    build([group], cache=cache)
    os.chmod(cache.path, mode)
    with pytest.raises(BuildError, match="writable by others"):
        find(group, cache)
    os.chmod(cache.path, 0o755)  # only readable: that is mended
    assert find(group, cache)
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700


def test_when_one_fails_the_others_are_given_up(nvcc, cache, table, monkeypatch):
    nvcc.behave("slow", "fail")
    nvcc.behave("fast", "hang")
    started = time.monotonic()
    with pytest.raises(BuildError, match="told to fail"):
        build(groups_of(table, 90), jobs=2, cache=cache)
    assert time.monotonic() - started < 60
    assert list(cache.path.iterdir()) == []
    for line in nvcc.compilations():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)


def test_a_compiler_that_hangs_is_ended(nvcc, cache, table):
    nvcc.behave("*", "hang")
    with pytest.raises(BuildError, match=r"sample fast sm_90a was not built within 0.2 s: nvcc was still running"):
        build([Group(table, "fast", 90)], cache=cache, timeout_s=0.2)
    assert list(cache.path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(nvcc.compilations()[0].split()[0]), 0)


def test_the_wait_for_another_process_ends_too(nvcc, cache, table, tmp_path):
    nvcc.behave("fast", "hang")
    process = start_builder(tmp_path, cache)
    try:
        wait_for(nvcc.compilations, process)
        with pytest.raises(BuildError, match=r"was not built within 0\.2 s: another process is building it"):
            build([Group(table, "fast", 90)], cache=cache, timeout_s=0.2)
        assert len(nvcc.compilations()) == 1
    finally:
        process.send_signal(signal.SIGINT)  # which ends its compiler too
        process.communicate(timeout=60)


def test_a_cache_that_cannot_be_made_is_an_error_of_the_build(nvcc, table, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be"):
        build(groups_of(table, 90), cache=BuildCache(tmp_path / "file" / "cuda"))


def test_an_interrupted_build_leaves_nothing(nvcc, cache, table, tmp_path):
    process = start_builder(tmp_path, cache, FAKE_NVCC_SECONDS="100")
    wait_for(nvcc.compilations, process)
    assert left_behind(cache)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert list(cache.path.iterdir()) == []
    compiler = int(nvcc.compilations()[0].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(compiler, 0)


def test_what_a_killed_build_left_is_never_used_and_removed(nvcc, cache, table, tmp_path):
    process = start_builder(tmp_path, cache, FAKE_NVCC_SECONDS="100")
    wait_for(nvcc.compilations, process)
    process.kill()
    process.communicate(timeout=60)
    os.killpg(int(nvcc.compilations()[0].split()[0]), signal.SIGKILL)  # a killed parent cannot do that
    assert left_behind(cache)
    assert find(Group(table, "fast", 90), cache) is None
    build([Group(table, "slow", 90)], cache=cache)  # another group's build tidies up
    assert left_behind(cache) == []


def test_the_files_of_a_running_build_are_left_alone(nvcc, cache, table, tmp_path):
    process = start_builder(tmp_path, cache, FAKE_NVCC_SECONDS="2")
    wait_for(nvcc.compilations, process)
    build([Group(table, "slow", 90)], cache=cache)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert Path(output.strip()) == find(Group(table, "fast", 90), cache)


def test_nothing_is_built_twice_by_processes_that_build_a_whole_table(nvcc, cache, table, tmp_path):
    processes = [
        start_builder(tmp_path, cache, *groups, FAKE_NVCC_SECONDS="1")
        for groups in (("fast", "slow"), ("slow", "fast"), ("fast", "slow"))
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sorted(line.split()[-3] for line in nvcc.compilations()) == ["fast.cu", "slow.cu"]
    assert left_behind(cache) == []


def test_without_locks_both_build_and_the_last_one_stays(nvcc, cache, table, tmp_path, monkeypatch):
    def flock(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    group = Group(table, "fast", 90)
    process = start_builder(tmp_path, cache, FAKE_NVCC_SECONDS="2")
    wait_for(nvcc.compilations, process)
    (library,) = build([group], cache=cache).values()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert Path(output.strip()) == library == find(group, cache)
    assert len(nvcc.compilations()) == 2
    assert not [name for name in left_behind(cache) if name.startswith(".build")]


def test_a_change_of_headers_sources_or_flags_is_another_build(nvcc, cache, table, tmp_path):
    def key(changed):
        hash_headers.cache_clear()
        _content.cache_clear()
        return build_key(Group(changed, "fast", 90)).name

    first = key(table)
    (tmp_path / "unrelated.h").write_text("// not included")
    slow_only = tuple(v for v in table.variants if v.name != "large_slow")
    assert key(dataclasses.replace(table, variants=slow_only)) == first  # another group's variants
    assert key(dataclasses.replace(table, memory_per_job=1)) == first
    fast_only = tuple(v for v in table.variants if v.name != "large_fast")
    others = [
        key(dataclasses.replace(table, variants=fast_only)),
        key(dataclasses.replace(table, flags=("-DX",))),
        key(dataclasses.replace(table, fields=("width", "rows"))),
    ]
    (tmp_path / "sample_part.h").write_text("// something")  # which sample.cuh includes
    others.append(key(table))
    (tmp_path / "sample_part.h").write_text("// nothing\n")
    assert key(table) == first
    assert len({first, *others}) == 5


def test_another_compiler_is_another_build(nvcc, cache, table, tmp_path, monkeypatch):
    group = Group(table, "fast", 90)
    build([group], cache=cache)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert find(group, cache) is None


def test_without_a_compiler_what_is_built_can_be_used(nvcc, cache, table, tmp_path, monkeypatch):
    group = Group(table, "fast", 90)
    (library,) = build([group], cache=cache).values()
    fake_nvcc.take_away(monkeypatch, tmp_path)
    assert find(group, cache) == library
    with pytest.raises(BuildError, match="there is no nvcc"):
        build([Group(table, "slow", 90)], cache=cache)


def test_jobs_are_bounded_by_cores_and_memory(table, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(builds, "_free_memory", lambda: 10 << 30)
    for memory, jobs in ((1 << 30, 8), (5 << 30, 2), (20 << 30, 1)):
        assert default_jobs(groups_of(dataclasses.replace(table, memory_per_job=memory), 90)) == jobs


def test_a_build_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(BuildError("nvcc could not compile it:", "x.cu(1): error")))
    assert (error.message, error.output) == ("nvcc could not compile it:", "x.cu(1): error")
    assert str(error) == "nvcc could not compile it:\nx.cu(1): error"
    assert str(BuildError("refused")) == "refused"
