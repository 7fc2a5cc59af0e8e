"""Every command, in this process and as a program of its own."""

import json
import re
import subprocess

import jax
import pytest

from tests.support.command_line import ends, interrupted, invoke, program
from tilewright import __version__
from tilewright.ops import AutotuningResult, FwdParams, PersistentCache
from tilewright.ops.lowering.lowered_files import LoweredFiles
from tilewright.ops.tuning.journal import unfinished

SHAPE = ["--shape", "1,64,2,16"]

SLOW_KERNELS = """
import dataclasses
import time

import jax
import jax.numpy as jnp

from tilewright.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    wait_ms: int


class Wait(Kernel):
    def __init__(self, name, times):
        super().__init__(name)
        self.times = times

    def run(self, x, *, cfg):
        def wait(x):
            time.sleep(cfg.wait_ms / 1e3)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def heuristic_cfg(self, inv):
        return Config(self.times[0])

    def config_space(self, inv):
        return [Config(wait) for wait in self.times]


quick = Wait("quick", (2, 1))
slow = Wait("slow", tuple(range(300, 311)))


def both(x):
    return slow(quick(x))
"""


def test_version_and_help():
    assert invoke("--version").strip() == f"tilewright {__version__}"
    for command in ("info", "tune", "bench", "explain", "report", "build", "cache"):
        assert command in invoke("--help")
        assert "Usage" in invoke(command, "--help")


def test_info_names_device_versions_and_backends():
    text = invoke("info")
    for word in (jax.__version__, "flash_attention", "xla", "persistent cache", "CUDA compiler"):
        assert word in text


def test_tune_then_the_cache_commands(cache_directory, tmp_path):
    file = tmp_path / "result.json"
    assert "heuristic" in invoke("explain", "flash_attention", *SHAPE, "--causal")
    text = invoke("tune", "flash_attention", *SHAPE, "--causal", "--json", str(file))
    assert "flash_attention forward" in text
    assert "flash_attention backward" in text
    assert "2 of 2 measured now" in text
    result = AutotuningResult.from_json(file.read_text())
    assert {call.direction for call in result} == {"forward", "backward"}

    again = invoke("tune", "flash_attention", *SHAPE, "--causal")
    assert "all 2 calls known, nothing measured" in again
    assert "1 of 1 measured" in invoke("tune", "flash_attention", *SHAPE, "--causal", "--no-backward", "--again")

    explained = invoke("explain", "flash_attention", *SHAPE, "--causal")
    assert re.search(r"memory|disk", explained)
    assert "heuristic" not in explained

    listed = invoke("cache", "list")
    assert f"2 entries in {cache_directory}" in listed
    entry = re.search(r"^ *([0-9a-f]{8}) ", listed, re.MULTILINE).group(1)
    shown = json.loads(invoke("cache", "show", entry[:6]))
    assert shown["key"]["op"] == "flash_attention"
    assert len(shown["measurements"]) == len(result.entries[0].candidates)

    exported = tmp_path / "export.json"
    assert "2 entries written" in invoke("cache", "export", str(exported))
    assert f"Delete 2 entries of {cache_directory}" in invoke("cache", "clear", input="n\n", code=1)
    assert len(PersistentCache(cache_directory)) == 2
    assert "2 entries deleted" in invoke("cache", "clear", "--yes")
    assert "2 entries taken over" in invoke("cache", "import", str(exported))
    assert "0 entries taken over" in invoke("cache", "import", str(exported))
    assert len(PersistentCache(cache_directory)) == 2


def test_clearing_lowered_kernels(tmp_path):
    files = LoweredFiles(tmp_path / "lowered")
    for scale in (1, 2):
        files.put({"op": "tests.op", "scale": scale}, {}, b"module")
    arguments = ("cache", "clear", "--lowered", "--path", str(files.path))
    assert f"Delete 2 files of {files.path}" in invoke(*arguments, input="n\n", code=1)
    assert files.usage()[0] == 2
    assert "2 files deleted" in invoke(*arguments, "--yes")
    assert files.usage() == (0, 0)


def test_clearing_forgets_what_a_killed_tuning_had_measured(cache_directory):
    cache = PersistentCache(cache_directory)
    for each in (cache, unfinished(cache)):
        assert each.put("a key", FwdParams())
    assert "1 entry deleted" in invoke("cache", "clear", "--yes")
    assert len(PersistentCache(cache_directory)) == len(unfinished(cache)) == 0


def test_explain_for_a_device_that_is_not_here(cache_directory):
    call = ("flash_attention", "--shape", "4,4096,16,128", "--causal", "--dtype", "bf16", "--no-backward")
    there = invoke("explain", *call, "--device", "NVIDIA H200")
    assert "hopper" in there
    assert "shipped" in there
    assert re.search(r"0\.4\d\d ms", there)
    assert "there is no GPU, which hopper, cuda" in invoke("explain", *call, "--device", "TPU v5e")


def test_tuning_into_a_lock(cache_directory, tmp_path, monkeypatch):
    from tilewright.ops import Lock
    from tilewright.ops.config import lockfile

    file = tmp_path / "tilewright.lock.json"
    # The command makes the lock that the environment asks for, and none that is strict is in its way.
    monkeypatch.setenv("TILEWRIGHT_LOCK", str(file))
    monkeypatch.setenv("TILEWRIGHT_LOCK_MISS", "error")
    forget = lockfile._read_environment.cache_clear
    forget()
    try:
        shape = ("tune", "flash_attention", *SHAPE, "--lock", str(file))
        assert f"{file} decides 2 calls, 2 of them by this tuning" in invoke(*shape)
        before = file.read_bytes()
        assert "nothing measured" in invoke(*shape)
        assert file.read_bytes() == before
        assert "decides 3 calls, 1 of them" in invoke(*shape, "--causal", "--no-backward")
        assert len(Lock.load(file)) == 3
        explained = invoke("explain", "flash_attention", *SHAPE)
        assert "lock," in explained
        assert "an error" not in explained
        assert "but the call is an error" in invoke("explain", "flash_attention", "--shape", "1,32,2,16")
    finally:
        monkeypatch.undo()
        forget()


def test_a_lock_of_elsewhere_is_refused_before_anything_is_measured(cache_directory, tmp_path, capsys):
    from tilewright.ops import Lock, device_fingerprint

    for device, toolchain, message in (
        ("gpu:other", {}, "two devices"),
        (device_fingerprint(), {"jax": "0.1"}, "jax 0.1 there"),
    ):
        Lock(device, toolchain, ()).save(tmp_path / "a.json")
        code, out, line = ends(capsys, "tune", "flash_attention", *SHAPE, "--lock", tmp_path / "a.json")
        assert (code, out) == (2, "")
        assert message in line
    assert len(PersistentCache(cache_directory)) == 0


def test_candidates_are_isolated_as_asked(cache_directory, tmp_path):
    arguments = ("flash_attention", *SHAPE, "--no-backward", "--json", str(tmp_path / "found.json"))
    for isolation in ("process", "none"):
        invoke("tune", *arguments, "--again", "--isolation", isolation)
        (call,) = json.loads((tmp_path / "found.json").read_text())["entries"]
        assert {candidate["check"] for candidate in call["candidates"]} == {"passed"}


def test_bench_compares_with_jax_and_writes_json(tmp_path):
    file = tmp_path / "bench.json"
    text = invoke("bench", "flash_attention", *SHAPE, "--iters", "2", "--json", str(file))
    assert "jax.nn.dot_product_attention" in text
    said = json.loads(file.read_text())
    assert {(m["stage"], m["implementation"]) for m in said["measurements"]} == {
        (stage, name)
        for stage in ("forward", "forward+backward")
        for name in ("tilewright xla", "jax.nn.dot_product_attention")
    }
    assert all(len(m["samples_ms"]) == 2 and m["flops"] > 0 for m in said["measurements"])
    assert said["environment"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch"], "nonesuch"),
        (["tune"], "target"),
        (["tune", "flash_attention", "--shap", "1"], "--shap"),
        (["tune", "flash_attention", "--shape", "1,64,2,16", "--budget", "-3"], "-3"),
        (["tune", "flash_attention", "--shape", "1,64,2,16", "--timeout", "inf"], "--timeout"),
        (["explain", "flash_attention", "--shape", "1,64,2,16", "--set", "bias=foo"], "'hqk'"),
        (["tune", "flash_attention", "--shape", "1,64,2,16", "--json", "/nonesuch/x.json"], "/nonesuch"),
        (["tune", "flash_attention", "--shape", "1,64,2,16", "--lock", "/nonesuch/x.json"], "/nonesuch"),
        (["tune", "flash_attention", "--shape", "1,64,2,16", "--lock", "/"], "not a regular file"),
        (["explain", "flash_attention", "--shape", "1,64,2,16", "--device", "H200"], "did you mean 'NVIDIA H200'"),
        (["bench", "math:sin"], "math:sin"),
        (["bench", "flash_attention", "--iters", "0"], "--iters"),
        (["cache", "import", "/nonesuch/file"], "/nonesuch/file"),
        (["cache", "list", "--path", "/nonesuch"], "/nonesuch"),
        (["cache", "nonesuch"], "nonesuch"),
    ],
)
def test_bad_arguments_are_one_line_on_stderr_and_code_2(arguments, message, capsys):
    code, out, line = ends(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in line


def test_the_program_ends_with_code_2_and_no_traceback():
    command, environment = program("tune", "flash_attention", "--shape", "1,64,3,16", "--kv-heads", "2")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert "query.shape=(1, 64, 3, 16)" in line


def test_a_function_without_kernels_is_said_to_have_none(folder):
    (folder / "no_kernels.py").write_text(
        "import jax.numpy as jnp\n\ndef plain():\n    return jnp.sin, (jnp.ones(3),)\n"
    )
    assert "calls no kernel" in invoke("tune", "no_kernels:plain")


def test_interrupting_a_tuning_keeps_what_was_measured(tmp_path):
    (tmp_path / "waiting.py").write_text(SLOW_KERNELS)
    folder = tmp_path / "cache"
    file = tmp_path / "result.json"
    command, environment = program(
        "tune", "waiting:both", "--shapes", "float32[3]", "--json", str(file), TILEWRIGHT_CACHE_DIR=str(folder)
    )
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # The first call has its winner on disk.
    output, errors = interrupted(process, lambda: any((folder / "configs").glob("*.json")))
    assert "interrupted" in errors
    assert "quick forward" in output
    assert json.loads(file.read_text())["entries"][0]["op"] == "quick"
    assert "quick" in {json.loads(key)["op"] for key in PersistentCache(folder / "configs")}
