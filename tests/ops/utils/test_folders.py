"""Where files are kept."""

import stat
from pathlib import Path

import pytest

from tilewright.ops.utils.folders import absolute, cache_folder, make_folder, read_file, replace_file


def test_the_environment_names_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "there"))
    assert cache_folder("cuda") == tmp_path / "there" / "cuda"
    assert not (tmp_path / "there").exists()


def test_the_users_cache_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("cuda").name == "cuda"
    assert tmp_path in cache_folder("cuda").parents


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert absolute("~/a/../b") == tmp_path / "b"
    assert absolute(Path("c")) == tmp_path / "c"


def test_folders_are_made_for_their_owner_alone(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "page"
    file.write_text("old")
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError):
        replace_file(folder, b"new")
    assert sorted(tmp_path.iterdir()) == [folder, file]


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
