"""Lowered kernels on disk: what was written comes back, and nothing else ever does."""

import functools
import json
import os
import stat
import time
from pathlib import Path

import pytest

from tests.support.threads import together
from tilewright.ops.lowering import lowered_files
from tilewright.ops.lowering.lowered_files import LoweredFiles

KEY = {"op": "tests.op", "stage": "forward", "platform": "cpu", "operands": [[2, 3], "float32"], "scale": 0.1}
CONTENT = bytes(range(256)) + b"\n" * 3


@pytest.fixture
def files(tmp_path) -> LoweredFiles:
    return LoweredFiles(tmp_path / "lowered")


def only_file(files: LoweredFiles) -> Path:
    (path,) = files.path.iterdir()
    return path


def test_what_was_written_comes_back(files):
    assert files.get(KEY) is None
    assert files.put(KEY, {"targets": []}, CONTENT)
    found = files.get(KEY)
    assert (found.about, found.content) == ({"targets": []}, CONTENT)
    assert files.put(KEY, {}, b"")  # in place of what was there
    assert files.get(KEY).content == b""
    assert files.usage()[0] == 1


@pytest.mark.parametrize(
    "changed", [{"scale": 0.2}, {"op": "tests.other"}, {"operands": [[2, 3], "bfloat16"]}, {"a": 1}]
)
def test_another_key_is_a_miss(files, changed):
    files.put(KEY, {}, CONTENT)
    assert files.get({**KEY, **changed}) is None


def test_folder_and_files_are_their_owners_alone(files):
    old = os.umask(0)
    try:
        files.put(KEY, {}, CONTENT)
    finally:
        os.umask(old)
    assert stat.S_IMODE(files.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(files).stat().st_mode) == 0o600


@pytest.mark.parametrize("at", [0, 30, 200, -1, -200])
def test_any_damage_is_a_miss(files, at, caplog):
    files.put(KEY, {"said": "x" * 300}, CONTENT)
    path = only_file(files)
    data = path.read_bytes()
    changed = bytearray(data)
    changed[at] ^= 1
    for damaged in (changed, data[:at], data + b"more"):
        path.write_bytes(damaged)
        caplog.clear()
        assert files.get(KEY) is None
        assert "is not used" in caplog.text


def test_a_header_that_was_changed_with_its_content_is_a_miss(files):
    """Its checksum covers what is said of the content, too."""
    files.put(KEY, {"targets": []}, CONTENT)
    path = only_file(files)
    magic, line, content = path.read_bytes().split(b"\n", 2)
    header = json.loads(line)
    header["about"] = {"targets": ["another"]}
    path.write_bytes(b"\n".join((magic, json.dumps(header).encode(), content)))
    assert files.get(KEY) is None


def test_the_file_of_another_key_under_this_name_is_a_miss(files):
    files.put(KEY, {}, CONTENT)
    path = only_file(files)
    data = path.read_bytes()
    path.unlink()
    other = {**KEY, "scale": 0.5}
    files.put(other, {}, b"other")
    only_file(files).write_bytes(data)
    assert files.get(other) is None


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_a_miss(files, tmp_path, kind):
    files.put(KEY, {}, CONTENT)
    path = only_file(files)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert files.get(KEY) is None


@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_used(files, mode):
    files.put(KEY, {}, CONTENT)
    only_file(files).chmod(0o600 | mode)
    assert files.get(KEY) is None
    only_file(files).chmod(0o600)
    files.path.chmod(0o700 | mode)
    assert files.get(KEY) is None
    assert not files.put({**KEY, "scale": 2}, {}, CONTENT)


def test_what_belongs_to_another_user_is_not_used(files, monkeypatch):
    files.put(KEY, {}, CONTENT)
    monkeypatch.setattr(lowered_files.os, "geteuid", lambda: os.getuid() + 1)
    assert files.get(KEY) is None
    assert not files.put({**KEY, "scale": 2}, {}, CONTENT)


def test_a_file_that_is_too_large_is_a_miss_and_not_written(files, monkeypatch):
    files.put(KEY, {}, CONTENT)
    monkeypatch.setattr(lowered_files, "FILE_LIMIT", 100)
    assert files.get(KEY) is None
    assert not files.put({**KEY, "scale": 2}, {}, CONTENT)


@pytest.mark.parametrize("error", [28, 30])  # no space left, a file system that is read only
def test_what_cannot_be_written_is_logged(files, monkeypatch, caplog, error):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    files.put(KEY, {}, CONTENT)
    monkeypatch.setattr("tilewright.ops.utils.folders.os.fsync", fail)
    assert not files.put(KEY, {}, b"new")
    assert os.strerror(error) in caplog.text
    assert files.get(KEY).content == CONTENT
    assert [path.name for path in files.path.iterdir()] == [only_file(files).name]


def test_what_was_used_longest_ago_goes_first(tmp_path):
    files = LoweredFiles(tmp_path, limit=25_000)
    keys = [{**KEY, "scale": i} for i in range(4)]
    for age, key in zip((400, 300, 200), keys[:3], strict=True):
        files.put(key, {}, bytes(7000))
        newest = max(files.path.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (time.time() - age,) * 2)
    assert files.get(keys[0]) is not None  # and with that it is the newest
    files.put(keys[3], {}, bytes(7000))
    assert [files.get(key) is not None for key in keys] == [True, False, True, True]


def test_what_killed_writers_left_goes_in_the_end(files):
    files.put(KEY, {}, CONTENT)
    left = files.path / f".{only_file(files).name}.123-0123456789abcdef.tmp"
    left.write_bytes(b"half")
    files.put(KEY, {}, CONTENT)
    assert left.exists()  # its writer may be alive
    os.utime(left, (0, 0))
    files.put(KEY, {}, CONTENT)
    assert not left.exists()


def test_clear_leaves_what_is_not_ours(files):
    files.put(KEY, {}, CONTENT)
    files.put({**KEY, "scale": 2}, {}, CONTENT)
    (files.path / "notes.txt").write_text("mine")
    assert files.clear() == 2
    assert [path.name for path in files.path.iterdir()] == ["notes.txt"]
    assert LoweredFiles(files.path / "none").clear() == 0


def test_readers_and_writers_at_once_see_whole_entries(files):
    contents = [bytes([i]) * 50_000 for i in range(4)]

    def write(content):
        for _ in range(20):
            files.put(KEY, {}, content)

    def look():
        for _ in range(60):
            found = files.get(KEY)
            assert found is None or found.content in contents

    together(lambda work: work(), [*(functools.partial(write, content) for content in contents), look, look, look])
    assert files.get(KEY).content in contents
