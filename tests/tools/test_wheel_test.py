"""What make wheel-test looks for in an sdist and a wheel."""

import io
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from tools.wheel_test import Failure, check_sdist, check_wheel, files_of

FILES = ("README.md", "tilewright/__init__.py", "tilewright/py.typed", "tilewright/tables/card.json")
PAGE = "[Attention](https://example.org/docs/attention.md), [below](#below)"


def write_sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name in (*files, "PKG-INFO", "setup.cfg", "tilewright.egg-info/SOURCES.txt"):
            archive.addfile(tarfile.TarInfo(f"tilewright-1/{name}"), io.BytesIO())
    return path


def write_wheel(path, files, page=PAGE):
    with zipfile.ZipFile(path, "w") as archive:
        for name in files:
            archive.writestr(name, "")
        archive.writestr("tilewright-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: tilewright\n\n{page}\n")
    return path


def test_an_sdist_holds_the_repository(tmp_path):
    check_sdist(write_sdist(tmp_path / "whole", FILES), FILES)
    with pytest.raises(Failure, match=r"lacks .*card.json"):
        check_sdist(write_sdist(tmp_path / "less", FILES[:3]), FILES)
    with pytest.raises(Failure, match=r"holds .*secret"):
        check_sdist(write_sdist(tmp_path / "more", [*FILES, "secret"]), FILES)


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path):
    check_wheel(write_wheel(tmp_path / "whole", FILES[1:]), FILES)
    with pytest.raises(Failure, match=r"lacks .*card.json"):
        check_wheel(write_wheel(tmp_path / "less", FILES[1:3]), FILES)
    with pytest.raises(Failure, match=r"holds \['README.md'\]"):
        check_wheel(write_wheel(tmp_path / "more", FILES), FILES)


@pytest.mark.parametrize("page", ["[Attention](docs/attention.md)", ""])
def test_the_page_of_a_wheel_has_no_relative_links(tmp_path, page):
    with pytest.raises(Failure, match=r"relative links"):
        check_wheel(write_wheel(tmp_path / "wheel", FILES[1:], page), FILES)


def write(folder, **files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_files_of_a_repository_are_those_that_git_does_not_ignore(tmp_path):
    write(tmp_path, **{".gitignore": "made/\n", "a/b": "", "made/c": "", "PKG-INFO": ""})
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    assert files_of(tmp_path) == {"a/b", ".gitignore"}


def test_the_files_of_an_unpacked_sdist_are_those_that_it_names(tmp_path):
    named = "a/b\n.hidden\ngone\ntilewright.egg-info/SOURCES.txt\n"
    write(tmp_path, **{"tilewright.egg-info/SOURCES.txt": named, "a/b": "", ".hidden": "", "a/left.pyc": ""})
    assert files_of(tmp_path) == {"a/b", ".hidden"}
