"""``tilewright build``, with a stand-in for nvcc."""

import functools
import os
import signal
import subprocess
import zipfile

import pytest

from tests.support import fake_nvcc
from tests.support.command_line import ends, interrupted, program, streams
from tilewright.cli.info.inventory import machine_facts
from tilewright.kernels.cuda import BuildCache, Group, build
from tools.kernels_wheel.__main__ import record_of
from tools.kernels_wheel.wheel import write_wheel

TABLE = """
from pathlib import Path
from tests.support.fake_nvcc import sample_table

TABLE = sample_table(Path(__file__).parent)
OTHER = 3
"""


@pytest.fixture
def nvcc(folder, monkeypatch):
    """The stand-in, a cache of the test's own, and a module ``mine`` with a table in the working directory."""
    (folder / "mine.py").write_text(TABLE)
    return fake_nvcc.given(folder, monkeypatch)


invoke = functools.partial(streams, "build")


def test_build_then_list(nvcc, tmp_path):
    built = invoke("--arch", "90a", "--table", "mine:TABLE", "--jobs", "1").output
    assert f"2 of 2 built now, 0 were there, in {tmp_path / 'cache' / 'cuda'}" in built
    assert "in 0 s" in built
    again = invoke("--arch", "90a", "--arch", "80", "--table", "mine:TABLE").output
    assert "1 of 3 built now, 2 were there" in again
    assert "already" in again

    listed = invoke("--arch", "70", "--arch", "90", "--table", "mine:TABLE", "--list").output
    assert "2 of 3 built" in listed
    assert "no: nvcc 99.1.0 compiles for 80, 90, not for 70" in listed
    assert len(nvcc.compilations()) == 3


def test_the_list_says_where_each_comes_from(nvcc, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    table = fake_nvcc.sample_table(tmp_path)
    group = Group(table, "fast", 90)
    (path,) = build([group], cache=BuildCache(tmp_path / "builds")).values()
    wheel = write_wheel(tmp_path / "dist", [(record_of(group, path, (13, 0)), path)], 13, "linux_x86_64", {})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    invoke("--arch", "90a", "--table", "mine:TABLE", "--group", "slow")
    listed = invoke("--arch", "90a", "--table", "mine:TABLE", "--list").output
    assert "shipped, 0.0 MB" in listed
    assert f"1 of 2 built in {tmp_path / 'cache' / 'cuda'}" in listed
    assert f"1 shipped in {tmp_path / 'site' / 'tilewright_kernels' / 'cu13'}" in listed
    assert (
        dict(machine_facts())["shipped CUDA kernels"]
        == f"{tmp_path / 'site' / 'tilewright_kernels' / 'cu13'} (1 group)"
    )
    again = invoke("--arch", "90a", "--table", "mine:TABLE").output
    assert "0 of 2 built now, 2 were there" in again
    assert "shipped, 0.0 MB" in again


def test_devices_stand_for_their_architectures(nvcc):
    there = ("--table", "mine:TABLE", "--list")
    listed = invoke("--device", "NVIDIA H200", "--device", "NVIDIA A100-SXM4-80GB", *there).output
    assert listed == invoke("--arch", "90a", "--arch", "80", *there).output


def test_one_group(nvcc):
    assert "1 of 1 built" in invoke("--arch", "9.0", "--table", "mine:TABLE", "--group", "slow").output
    (line,) = nvcc.compilations()
    assert "slow.cu" in line


def test_a_failing_compiler_is_exit_code_1_with_its_own_message(nvcc, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC_ERROR", "sample.cuh(3): error: there is no such thing")
    result = invoke("--arch", "90", "--table", "mine:TABLE", "--group", "slow", code=1)
    assert "sample.cuh(3): error: there is no such thing" in result.stderr
    assert "tilewright: nvcc could not compile sample slow sm_90a (exit code 2)" in result.stderr
    assert "0 of 1 built" in result.stdout


def test_no_compiler_is_exit_code_1_with_the_reason(nvcc, monkeypatch, tmp_path):
    fake_nvcc.take_away(monkeypatch, tmp_path)
    assert "there is no nvcc" in invoke("--arch", "90", "--table", "mine:TABLE", code=1).stderr
    assert "no: there is no nvcc" in invoke("--arch", "90", "--table", "mine:TABLE", "--list").stdout


def test_the_generated_sources_can_be_had(nvcc, tmp_path):
    output = invoke("--table", "mine:TABLE", "--sources", str(tmp_path / "sources")).output
    assert "4 files of sample written" in output
    names = sorted(path.name for path in (tmp_path / "sources" / "sample").iterdir())
    assert names == ["dispatch.h", "fast.cu", "manifest.json", "slow.cu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "hopper", "--table", "mine:TABLE"], "hopper"),
        (["--table", "mine:TABLE"], "no NVIDIA GPU here"),
        (["--device", "H200", "--table", "mine:TABLE"], "did you mean 'NVIDIA H200'"),
        (["--device", "TPU v5e", "--table", "mine:TABLE"], "TPU v5e is no NVIDIA GPU"),
        (["--arch", "60", "--table", "mine:TABLE"], "60"),
        (["--arch", "90", "--table", "mine:OTHER"], "not a VariantTable"),
        (["--arch", "90", "--table", "mine:NONE"], "mine has no TABLE 'NONE'"),
        (["--arch", "90", "--table", "nonesuch:TABLE"], "nonesuch"),
        (["--arch", "90", "--table", "nonesuch"], "nonesuch"),
        (["--arch", "90", "--table", "mine:TABLE", "--group", "nonesuch"], "fast, slow"),
        (["--arch", "90", "--table", "mine:TABLE", "--jobs", "0"], "--jobs"),
        (["--table", "mine:TABLE", "--sources", "/proc/nonesuch"], "/proc/nonesuch"),
    ],
)
def test_bad_arguments_are_one_line_on_stderr_and_code_2(arguments, message, nvcc, capsys):
    code, out, line = ends(capsys, "build", *arguments)
    assert (code, out) == (2, "")
    assert message in line


def test_a_cache_of_somebody_else_is_refused(nvcc, tmp_path, capsys):
    (tmp_path / "cache" / "cuda").mkdir(parents=True)
    os.chmod(tmp_path / "cache" / "cuda", 0o777)
    code, _, line = ends(capsys, "build", "--arch", "90", "--table", "mine:TABLE", "--list")
    assert code == 1
    assert "writable by others" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_keeps_what_was_finished(number, nvcc, tmp_path):
    nvcc.behave("slow", "hang")
    command, environment = program("build", "--arch", "90", "--table", "mine:TABLE", "--jobs", "1")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = interrupted(process, lambda: len(nvcc.compilations()) == 2, number)
    assert "interrupted" in errors
    assert "1 of 2 built now" in output
    (kept,) = (tmp_path / "cache" / "cuda").iterdir()
    assert kept.name.startswith("sample-fast-")
