"""The disk cache when things go wrong: each case ends as a miss or the right config, and other entries stay intact."""

import errno
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewright
from tests.support.threads import together
from tilewright.ops.config import persistent
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import canonical_json

GOOD = FwdParams(q_blocksize=64, num_warps=4)
OTHER = BwdParams(num_stages=3)
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")

# A process that uses the cache without importing JAX, which would take most of its time.
ROOT = str(Path(tilewright.__path__[0]))
PREAMBLE = f"""
import sys, types, os, signal, time
for name, path in {[("tilewright", ROOT), ("tilewright.ops", os.path.join(ROOT, "ops"))]!r}:
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
cache = PersistentCache(sys.argv[1])
"""


def spawn(cache, code, *arguments):
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(cache.path), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def cache(tmp_path):
    cache = PersistentCache(tmp_path / "configs")
    assert cache.put("good", GOOD, measurements=[{"ms": 1.25}], metadata={"note": "x"})
    assert cache.put("other", OTHER)
    return cache


def file_of(cache, key="good"):
    (path,) = cache.path.glob(f"{key}-*.json")
    return path


def temporaries(cache):
    return [path for path in cache.path.iterdir() if path.name.endswith(".tmp")]


def check_miss(cache, key="good"):
    """``key`` is a miss in every respect, the other entry is intact, and a new put repairs it."""
    for found in (
        cache.get(key), cache.get(key, expected_type=FwdParams), cache.entry(key), cache.stale_config(key)
    ):  # fmt: skip
        assert found is None
    assert key not in cache
    assert list(cache) == ["other"]
    assert len(cache) == len(cache.entries()) == 1
    assert cache.get("other") == OTHER


def reseal(document):
    document = {name: value for name, value in document.items() if name != "checksum"}
    digest = hashlib.sha256(canonical_json(document).encode()).hexdigest()
    return json.dumps({**document, "checksum": f"sha256:{digest}"})


class TestDamagedFiles:
    def test_any_bytes_missing_changed_or_added(self, cache, caplog):
        """Each prefix; each byte with a bit flipped, of the config's half of the bits; and any other edit."""
        caplog.set_level(logging.ERROR)
        path = file_of(cache)
        whole = path.read_bytes()
        config = range(whole.index(b'"config"'), whole.index(b'"readable"'))

        def found_in(content):
            path.write_bytes(content)
            entry, found = cache.entry("good"), cache.get("good", expected_type=FwdParams)
            assert found is None or found == GOOD, content
            assert entry is None or (entry.config == GOOD and entry.metadata == {"note": "x"}), content
            return found

        for length in range(len(whole)):  # nothing but white space may be missing from what is still read
            assert found_in(whole[:length]) is None or not whole[length:].strip(), length
        rng, survivors = random.Random(0), 0
        for position, byte in enumerate(whole):
            bits = range(position % 2, 8, 2) if position in config else [rng.randrange(8)]
            for bit in bits:
                flipped = found_in(whole[:position] + bytes([byte ^ 1 << bit]) + whole[position + 1 :])
                survivors += flipped is not None
        assert survivors < len(whole) / 20

        @given(st.integers(0, len(whole)), st.integers(0, 40), st.binary(max_size=40))
        def edited(position, length, inserted):
            found_in(whole[:position] + inserted + whole[position + length :])

        edited()
        assert cache.get("other") == OTHER
        assert found_in(whole) == GOOD

    def test_rubbish(self, cache, caplog):
        for content in (b"null", b"[]", b"{}", b"1e999", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"schema": NaN}'):
            file_of(cache).write_bytes(content)
            caplog.clear()
            check_miss(cache)
            assert "no config is read from good-" in caplog.text
            assert cache.put("good", GOOD)

    def test_an_entry_of_another_form(self, cache):
        """With the right checksum, and with another way to write it."""
        path = file_of(cache)
        document = json.loads(path.read_text())
        for change in (
            {"schema": 2}, {"schema": 0}, {"schema": None}, {"schema": "1"}, {"schema": True}, {"extra": 1},
            {"key": "another"}, {"key": ["good"]}, {"created": "yesterday"}, {"created": "2025-01-01T00:00:00"},
            {"created": 5}, {"toolchain": []}, {"metadata": None}, {"measurements": {}}, {"readable": 3},
            {"source": None},
        ):  # fmt: skip
            path.write_text(reseal(document | change))
            check_miss(cache)
        for name in document.keys() - {"checksum"}:
            path.write_text(reseal({key: value for key, value in document.items() if key != name}))
            check_miss(cache)
        path.write_text(json.dumps(document | {"checksum": document["checksum"].upper()}))
        check_miss(cache)

    def test_a_file_under_another_name(self, cache):
        path = file_of(cache)
        path.replace(path.with_name(path.name.replace("good", "evil")))
        check_miss(cache)
        (path.with_name(path.name.replace("good", "evil"))).replace(path)
        path.write_bytes(file_of(cache, "other").read_bytes())
        check_miss(cache)

    def test_too_large(self, cache, monkeypatch, caplog):
        monkeypatch.setattr(persistent, "ENTRY_LIMIT", file_of(cache).stat().st_size - 1)
        check_miss(cache)
        assert "larger than" in caplog.text
        assert not cache.put("good", GOOD, measurements=["x" * 2000])
        assert "is not written" in caplog.text
        monkeypatch.undo()
        assert cache.get("good") == GOOD


class TestStrangers:
    """A file never makes us import a module, run code, or return another type than asked for."""

    @pytest.mark.parametrize(
        "config",
        [
            {"$dataclass": "antigravity:x", "fields": {}},
            {"$dataclass": "subprocess:Popen", "fields": {"args": ["true"]}},
            {"$dataclass": "tilewright.ops.utils.datacarrier:BwdParams", "fields": {}},
            {"$dataclass": "tilewright.ops.utils.datacarrier:FwdParams", "fields": {"q_blocksize": -1}},
            {"$callable": "os:system"},
            {"q_blocksize": 64},
            None,
        ],
        ids=str,
    )
    def test_a_strangers_type(self, cache, config):
        path = file_of(cache)
        path.write_text(reseal({**json.loads(path.read_text()), "config": config}))
        loaded = set(sys.modules)
        assert cache.get("good", expected_type=FwdParams) is None
        assert cache.entry("good", expected_type=FwdParams) is None
        assert cache.get("other") == OTHER
        cache.get("good")
        cache.entries()
        assert set(sys.modules) == loaded

    def test_a_lazy_attribute_of_a_loaded_module_is_not_touched(self, cache, monkeypatch):
        touched = []
        lazy = types.ModuleType("lazy_module_of_a_test")
        lazy.__getattr__ = touched.append
        monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
        path = file_of(cache)
        config = {"$dataclass": f"{lazy.__name__}:Config.Inner", "fields": {}}
        document = {
            **json.loads(path.read_text()),
            "config": config,
            "measurements": [config],
            "metadata": {"a": config},
        }
        path.write_text(reseal(document))
        assert cache.get("good") is None
        assert cache.entry("good").config is None
        assert cache.entry("good").measurements == (config,)
        assert touched == []


@posix
class TestWhatIsNoFile:
    @pytest.mark.parametrize("kind", ["folder", "pipe", "link to nowhere", "link to itself"])
    def test_in_the_place_of_an_entry(self, cache, caplog, kind):
        path = file_of(cache)
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("nowhere" if kind == "link to nowhere" else path.name)
        check_miss(cache)
        if kind == "folder":
            assert not cache.put("good", GOOD)
            assert "is not written" in caplog.text
            assert not cache.remove("good")
            cache.clear()
            assert cache.get("other") is None
        else:
            assert cache.put("good", GOOD)
            assert cache.get("good") == GOOD
        assert temporaries(cache) == []

    def test_in_the_place_of_the_folder(self, tmp_path, caplog):
        (tmp_path / "file").write_text("x")
        for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 5000), "\0"):
            cache = PersistentCache(path)
            assert not cache.put("good", GOOD)
            assert cache.get("good") is None
            assert (len(cache), list(cache), cache.clear(), cache.remove("good")) == (0, [], 0, False)
        assert (tmp_path / "file").read_text() == "x"
        assert "is not written" in caplog.text


def refusing(code):
    """A system call that fails."""

    def fail(*arguments, **keywords):
        raise OSError(code, os.strerror(code))

    return fail


class TestRefusals:
    """The operating system says no."""

    @pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.ESTALE])
    @pytest.mark.parametrize("call", ["open", "replace", "fsync", "mkdir"])
    def test_each_call_of_a_write(self, cache, monkeypatch, caplog, call, code):
        if call == "mkdir":
            cache = PersistentCache(cache.path.parent / "new")
        before = sorted(path.name for path in cache.path.glob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(code))
            assert not cache.put("good", FwdParams())
            assert not cache.put("third", FwdParams())
            assert cache.get("third") is None
        assert sorted(path.name for path in cache.path.glob("*")) == before
        assert os.strerror(code) in caplog.text
        if call != "mkdir":
            assert (cache.get("good"), cache.get("other")) == (GOOD, OTHER)
            assert temporaries(cache) == []

    @pytest.mark.parametrize("call", ["open", "fstat"])
    def test_each_call_of_a_read(self, cache, monkeypatch, caplog, call):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.EACCES))
            assert cache.get("good") is None
            assert len(cache) == 0
        assert os.strerror(errno.EACCES) in caplog.text
        assert cache.get("good") == GOOD

    def test_listing_and_removing(self, cache, monkeypatch, caplog):
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", refusing(errno.EACCES))
            assert (len(cache), list(cache), cache.clear()) == (0, [], 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refusing(errno.EACCES))
            assert not cache.remove("good")
            assert cache.clear() == 0
            assert cache.put("third", GOOD)
        assert len(cache) == 3

    @posix
    def test_real_full_disk(self, cache):
        code = """
            import resource
            big = {"x": "y" * 100_000}
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            assert not cache.put("good", FwdParams(), metadata=big)
            assert not cache.put("third", FwdParams(), metadata=big)
            assert cache.get("good") == FwdParams(q_blocksize=64, num_warps=4)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            assert not cache.put("fourth", FwdParams())
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            assert not cache.put("good", FwdParams()) and cache.get("good") is None and len(cache) == 0
        """
        finish(spawn(cache, code))
        assert (cache.get("good"), cache.get("other"), len(cache)) == (GOOD, OTHER, 2)
        assert temporaries(cache) == []


@posix
class TestKilled:
    @pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
    def test_at_each_step(self, cache, moment):
        code = """
            moment = sys.argv[2]
            def die(*arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            if moment == "write":
                import io
                opened = os.fdopen
                class Dying(io.FileIO):
                    def write(self, data):
                        super().write(bytes(data)[:100])
                        die()
                os.fdopen = lambda descriptor, mode, **rest: (Dying if "w" in mode else opened)(descriptor, mode)
            else:
                setattr(os, moment, die)
            cache.put("good", FwdParams())
        """
        process = spawn(cache, code, moment)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert (cache.get("good"), cache.get("other"), len(cache)) == (GOOD, OTHER, 2)

        # What it left is swept by a later process once it is old, and not before.
        (left,) = temporaries(cache)
        assert PersistentCache(cache.path).put("third", GOOD)
        assert temporaries(cache) == [left]
        os.utime(left, (time.time() - 2 * persistent.TEMPORARY_LIFETIME_S,) * 2)
        (cache.path / ".mine.tmp").touch()
        os.utime(cache.path / ".mine.tmp", (0, 0))
        assert PersistentCache(cache.path).put("third", GOOD)
        assert [path.name for path in temporaries(cache)] == [".mine.tmp"]


class TestCrowds:
    def test_processes_on_one_key(self, cache):
        code = """
            number = int(sys.argv[2])
            while not os.path.exists(sys.argv[3]):
                time.sleep(0.005)
            for i in range(25):
                assert cache.put("good", FwdParams(num_warps=number), measurements=[number] * number)
                assert cache.put(f"own-{number}", FwdParams(num_stages=i + 1))
                config = cache.get("good", expected_type=FwdParams)
                assert config is not None and 1 <= config.num_warps <= 6
                entry = cache.entry("good")
                assert entry.measurements == (entry.config.num_warps,) * entry.config.num_warps
                assert cache.get(f"own-{number}") == FwdParams(num_stages=i + 1)
                assert cache.get("other") == BwdParams(num_stages=3)
        """
        cache.put("good", FwdParams(num_warps=1), measurements=[1])
        start = cache.path.parent / "start"
        processes = [spawn(cache, code, number, start) for number in range(1, 7)]
        start.touch()
        for process in processes:
            finish(process)
        assert len(cache) == 8
        assert {cache.get(f"own-{number}") for number in range(1, 7)} == {FwdParams(num_stages=25)}
        assert temporaries(cache) == []

    def test_sixteen_threads(self, cache):
        def work(number):
            for i in range(8):
                assert cache.put("good", FwdParams(num_warps=number + 1))
                assert cache.put(number, i)
                assert cache.get("good", expected_type=FwdParams).num_warps in range(1, 17)
                assert cache.get(number) == i
                assert set(cache) >= {"good", "other"}

        version = cache.version
        together(work, range(16))
        assert cache.version == version + 2 * 8 * 16
        assert len(cache) == 18
        assert temporaries(cache) == []
