"""Where files are kept."""

import stat
from pathlib import Path

import pytest

from tilewright.ops.utils.folders import absolute, cache_folder, make_folder, replace_file


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
