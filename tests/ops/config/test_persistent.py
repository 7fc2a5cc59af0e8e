"""The disk cache when all is well."""

import dataclasses
import datetime
import enum
import json
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tilewright.ops.config.persistent import Entry, PersistentCache
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import stable_json


class Platform(enum.StrEnum):
    XLA = "xla"


class Timing(NamedTuple):
    config: FwdParams
    milliseconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    platform: Platform
    params: FwdParams | BwdParams | None = None
    windows: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Derived:
    """Does not come back from its fields as it was."""

    size: dataclasses.InitVar[int] = 1
    area: int = dataclasses.field(default=0, init=False)

    def __post_init__(self, size):
        object.__setattr__(self, "area", size * size)


@dataclasses.dataclass(frozen=True)
class Strict:
    size: int

    def __post_init__(self):
        if self.size > 5:
            raise RuntimeError("not any more")


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path / "configs")


def files(cache):
    return sorted(path.name for path in cache.path.iterdir())


CONFIGS = [
    FwdParams(q_blocksize=128, num_warps=4),
    Choice(Platform.XLA, BwdParams(num_stages=2), ((1, float("inf")),)),
    Timing(FwdParams(), 0.1),
    Platform.XLA,
    (1, "a", None),
    {"block": 8},
    7,
    "name",
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_what_is_put_is_found_again_by_another_object(cache, config):
    assert cache.get("key") is None
    assert "key" not in cache
    assert cache.put("key", config)
    other = PersistentCache(str(cache.path))
    for found in (other.get("key"), other.get("key", expected_type=type(config))):
        assert found == config
        assert type(found) is type(config)
    assert "key" in other
    assert len(other) == 1
    assert list(other) == ["key"]
    assert other.get("other") is None


def test_the_last_put_counts_and_versions_grow(cache):
    versions = [cache.version]
    for warps in (1, 2, 4):
        cache.put("key", FwdParams(num_warps=warps))
        versions.append(cache.version)
    assert cache.get("key") == FwdParams(num_warps=4)
    assert len(cache) == 1
    assert cache.remove("key")
    versions.append(cache.version)
    assert not cache.remove("key")
    assert sorted(set(versions)) == versions
    assert cache.version == versions[-1]
    assert files(cache) == []


def test_keys_of_every_kind(cache):
    keys = [
        "a",
        "a/b\\c:*?\0\n",
        "ü" * 500,
        "",
        ".",
        "..",
        ("a", 1),
        ("a", True),
        ("a", 1.0),
        5,
        Platform.XLA,
        "é",
        "e\u0301",
    ]
    for i, key in enumerate(keys):
        cache.put(key, i)
    assert [cache.get(key) for key in keys] == list(range(len(keys)))
    assert len(cache) == len(keys)
    assert {stable_json((key,)) for key in cache} == {stable_json((key,)) for key in keys}
    assert all(len(name) < 120 for name in files(cache))
    with pytest.raises(TypeError, match="lambda"):
        cache.put(lambda: 0, 1)


def test_the_file_is_readable_and_complete(cache):
    key = stable_json({"op": "tilewright.kernels.flash_attention.op:FlashAttention", "direction": "backward", "n": 1})
    timings = [Timing(FwdParams(num_warps=w), 1.0 / w) for w in (1, 2)]
    metadata = {"time_ms": 0.5, "complete": True}
    cache.put(key, timings[1].config, measurements=timings, metadata=metadata, source="abc")
    (name,) = files(cache)
    assert "FlashAttention-backward" in name
    document = json.loads((cache.path / name).read_text())
    assert document["key"] == key
    assert document["readable"] == repr(timings[1].config)
    assert document["config"]["fields"]["num_warps"] == 2
    assert document["toolchain"]["jax"] == jax.__version__
    assert len(document["measurements"]) == 2
    assert (cache.path / name).read_text().count("\n") > 20

    entry = cache.entry(key)
    assert isinstance(entry, Entry)
    assert (entry.key, entry.config, entry.measurements) == (key, timings[1].config, tuple(timings))
    assert (entry.metadata, entry.source, entry.stale) == (metadata, "abc", False)
    age = datetime.datetime.now(datetime.UTC) - entry.created
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)
    assert cache.entry("other") is None
    assert cache.entries() == [entry]


class TestStale:
    def test_another_source(self, cache):
        cache.put("key", 1, source="old")
        assert cache.get("key") == cache.get("key", source=lambda _: "old") == 1
        assert cache.stale_config("key", source=lambda _: "old") is None
        assert cache.get("key", source=lambda _: "new") is None
        assert cache.stale_config("key", source=lambda _: "new") == 1
        assert cache.entry("key", source=lambda _: "new").stale
        assert cache.stale_config("key", source=lambda _: "new", expected_type=str) is None


class TestTypes:
    def test_only_the_expected_type(self, cache, caplog):
        cache.put("key", FwdParams())
        for other in (BwdParams, Choice, tuple, dict, int):
            assert cache.get("key", expected_type=other) is None
            assert cache.entry("key", expected_type=other) is None
        assert "FwdParams" in caplog.text
        cache.put("key", (1,))
        for other in (list, Timing, bool):
            assert cache.get("key", expected_type=other) is None
        cache.put("key", True)
        assert cache.get("key", expected_type=int) is None

    def test_local_types(self, cache):
        @dataclasses.dataclass(frozen=True)
        class Local:
            platform: Platform
            inner: FwdParams

        config = Local(Platform.XLA, FwdParams(num_warps=8))
        assert cache.put("key", config)
        assert cache.get("key") is None  # no name leads to it
        assert cache.entry("key").config is None
        assert cache.entry("key").readable == repr(config)
        assert cache.get("key", expected_type=Local) == config

    def test_a_config_that_its_class_refuses_today_is_a_miss(self, cache, caplog, monkeypatch):
        cache.put("key", Strict(5))
        monkeypatch.setattr(Strict, "__post_init__", lambda self: (_ for _ in ()).throw(RuntimeError("not any more")))
        assert cache.get("key", expected_type=Strict) is None
        assert "not any more" in caplog.text

    @pytest.mark.parametrize(
        "config", [object(), lambda: 0, Derived(3), jnp.ones(3), (jnp.ones(()),), jax.ShapeDtypeStruct((1,), "int8")]
    )
    def test_what_would_not_come_back_is_refused_before_anything_is_written(self, cache, config):
        cache.put("key", 1)
        with pytest.raises(TypeError):
            cache.put("key", config)
        with pytest.raises(TypeError):
            cache.put("other", 1, measurements=[object()])
        assert cache.get("key") == 1
        assert len(files(cache)) == 1


class TestPlace:
    def test_default_is_in_the_users_cache_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("TILEWRIGHT_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("HOME", str(tmp_path))
        path = PersistentCache().path
        assert path.name == "configs"
        assert path.is_relative_to(tmp_path)
        assert "tilewright" in path.parts

    def test_environment_is_read_on_first_use(self, monkeypatch, tmp_path):
        cache = PersistentCache()
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "there"))
        cache.put("key", 1)
        assert cache.path == tmp_path / "there" / "configs"
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "elsewhere"))
        assert cache.get("key") == 1

    def test_tilde_and_relative_paths(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert PersistentCache("~/configs").path == tmp_path / "configs"
        monkeypatch.chdir(tmp_path)
        cache = PersistentCache(Path("relative"))
        cache.put("key", 1)
        monkeypatch.chdir("/")
        assert cache.get("key") == 1

    def test_nothing_is_made_before_the_first_write(self, cache):
        assert (cache.get("key"), len(cache), list(cache), cache.entries(), cache.clear()) == (None, 0, [], [], 0)
        assert not cache.remove("key")
        assert not cache.path.exists()

    @pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
    def test_folders_are_private(self, tmp_path):
        cache = PersistentCache(tmp_path / "a" / "b" / "c")
        cache.put("key", 1)
        for folder in (cache.path, cache.path.parent, cache.path.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


class TestMerging:
    def filled(self, path, **configs):
        cache = PersistentCache(path)
        for key, config in configs.items():
            cache.put(key, config, source=f"source of {key}", measurements=[Timing(FwdParams(), 1.5)])
        return cache

    def test_copied_files_are_entries(self, tmp_path):
        ours, theirs = self.filled(tmp_path / "a", x=1, y=2), self.filled(tmp_path / "b", z=3)
        for path in theirs.path.iterdir():
            (ours.path / path.name).write_bytes(path.read_bytes())
        assert {key: ours.get(key) for key in ours} == {"x": 1, "y": 2, "z": 3}

    def test_merge_takes_what_is_newer(self, tmp_path):
        theirs = self.filled(tmp_path / "b", x=10, y=20)
        ours = self.filled(tmp_path / "a", x=1, z=3)
        theirs.put("z", 30)
        assert ours.merge(theirs.path) == 2
        assert {key: ours.get(key) for key in ours} == {"x": 1, "y": 20, "z": 30}
        assert ours.merge(theirs) == 0
        assert ours.merge(theirs, overwrite=True) == 3
        assert ours.get("x") == 10
        assert ours.merge(ours) == 0
        assert ours.merge(tmp_path / "nothing") == 0

    def test_export_and_import(self, tmp_path, caplog):
        ours = self.filled(tmp_path / "a", x=1, y=FwdParams(num_warps=1))
        exported = tmp_path / "configs.json"
        assert ours.export(exported) == 2
        theirs = PersistentCache(tmp_path / "b")
        assert theirs.import_(exported) == 2
        assert sorted(theirs.entries(), key=lambda e: e.key) == sorted(ours.entries(), key=lambda e: e.key)
        assert theirs.import_(exported) == 0
        theirs.put("x", 2)
        assert theirs.import_(exported) == 0
        assert theirs.get("x") == 2
        assert theirs.import_(str(exported), overwrite=True) == 2
        assert theirs.get("x") == 1

        document = json.loads(exported.read_text())
        document["entries"][0]["config"] = 5
        document["entries"].append("nonsense")
        exported.write_text(json.dumps(document))
        fresh = PersistentCache(tmp_path / "c")
        with caplog.at_level(logging.WARNING):
            assert fresh.import_(exported) == 1
        assert caplog.text.count("is left out") == 2

    def test_an_import_replaces_a_damaged_entry(self, tmp_path):
        ours = self.filled(tmp_path / "a", x=1)
        ours.export(tmp_path / "configs.json")
        (ours.path / files(ours)[0]).write_text("{")
        assert ours.get("x") is None
        assert ours.import_(tmp_path / "configs.json") == 1
        assert ours.get("x") == 1

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "entries": []}', '{"schema": 1, "entries": 3}'])
    def test_what_is_no_export_is_an_error(self, tmp_path, text):
        (tmp_path / "file").write_text(text)
        with pytest.raises(ValueError, match=r"."):
            PersistentCache(tmp_path / "c").import_(tmp_path / "file")
        with pytest.raises(OSError, match="nothing"):
            PersistentCache(tmp_path / "c").import_(tmp_path / "nothing")
        with pytest.raises(OSError, match="nothing"):
            PersistentCache(tmp_path / "c").export(tmp_path / "nothing" / "file")


def test_clear_leaves_what_is_not_ours(cache):
    for i in range(3):
        cache.put(i, i)
    damaged = cache.path / files(cache)[0]
    damaged.write_text("damaged")
    (cache.path / "notes.json").write_text("{}")
    (cache.path / "folder").mkdir()
    assert cache.clear() == 3
    assert files(cache) == ["folder", "notes.json"]
