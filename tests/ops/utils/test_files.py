"""Whole files, read and replaced."""

import os

import pytest

from tilewright.ops.utils.files import read_file, replace_file


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "a"
    for content in (b"", b"one", b"\x00\xff" * 1000):
        replace_file(file, content)
        assert read_file(file, 2000) == content
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_beyond_the_limit_is_refused(tmp_path):
    replace_file(tmp_path / "a", b"four")
    assert read_file(tmp_path / "a", 4) == b"four"
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        read_file(tmp_path / "a", 3)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        read_file(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 10)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_and_no_temporary(tmp_path, monkeypatch, call):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    replace_file(tmp_path / "a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
