"""Ids by which files name classes, and the names by which earlier files do."""

import dataclasses
import sys

import jax.numpy as jnp
import pytest

from tests.ops.kernel.samples import Product
from tilewright.ops import AutotuningResult, Candidate, Invocation, Lock, PersistentCache, TunedCall, from_json, to_json
from tilewright.ops.config.lockfile import Decision
from tilewright.ops.utils.serialize import qualified_name, resolve, tagged, untagged
from tilewright.ops.utils.stable_ids import find_class, stable_id, with_current_names, with_former_names

OLD = "tests.gone.module:Tile"
OLDER = "tests.long.gone:Tile"


@stable_id("tests/stable_ids.Tile", formerly=(OLD, OLDER))
@dataclasses.dataclass(frozen=True)
class Tile:
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Child(Tile):
    pass


@dataclasses.dataclass(frozen=True)
class Holder:
    tile: Tile | Child


def test_an_id_is_written_and_read():
    assert qualified_name(Tile) == "tests/stable_ids.Tile"
    assert tagged(Tile(3)) == {"$dataclass": "tests/stable_ids.Tile", "fields": {"size": 3}}
    assert untagged(tagged(Tile(3))) == Tile(3)


@pytest.mark.parametrize("name", ["tests/stable_ids.Tile", OLD, OLDER])
def test_former_names_are_read(name):
    assert resolve(name) is Tile
    assert untagged({"$dataclass": name, "fields": {"size": 2}}) == Tile(2)
    assert from_json(to_json(Holder(Tile(2))).replace("tests/stable_ids.Tile", name), Holder) == Holder(Tile(2))


def test_a_subclass_has_no_id_of_its_base():
    assert qualified_name(Child) == f"{__name__}:Child"


@pytest.mark.parametrize("id", ["Tile", "tests.module:Tile", "/Tile", "tests/", "tests/a b"])
def test_malformed_ids(id):
    with pytest.raises(ValueError, match="package/Name"):
        stable_id(id)


def test_an_id_belongs_to_one_class():
    with pytest.raises(ValueError, match="is the id of"):
        stable_id("tests/stable_ids.Tile")(Holder)
    assert resolve("tests/stable_ids.Tile") is Tile


@pytest.mark.parametrize("name", ["tests/stable_ids.Nobody", "nonesuch_package/Name", "__main__:Nobody", "a:b"])
def test_names_of_nothing(name):
    assert find_class(name) is None
    with pytest.raises(ValueError, match="cannot find"):
        resolve(name)


def test_a_package_defines_its_classes_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "has_ids").mkdir()
    (tmp_path / "has_ids" / "__init__.py").write_text("")
    (tmp_path / "has_ids" / "stable_ids.py").write_text("def load(name):\n    import has_ids.inner\n")
    (tmp_path / "has_ids" / "inner.py").write_text(
        "from tilewright.ops.utils.stable_ids import stable_id\n"
        "@stable_id('has_ids/Late', formerly=['has_ids.earlier:Late'])\nclass Late: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("has_ids.earlier:Late") is sys.modules["has_ids.inner"].Late
    assert resolve("has_ids/Late") is sys.modules["has_ids.inner"].Late


def test_text_in_both_directions():
    text = '{"a":"tests/stable_ids.Tile","b":"x:y","c":"tests/stable_ids.Other"}'
    former = with_former_names(text)
    assert former == [text.replace("tests/stable_ids.Tile", name) for name in (OLD, OLDER)]
    assert list(map(with_current_names, former)) == [text, text]


class TestFilesOfEarlierVersions:
    """Each was written when the class had another name."""

    KERNEL = Product("tests.stable_ids")
    INV = Invocation(KERNEL, (jnp.ones((2, 3)), jnp.ones((3, 2))), {"tile": Tile(7)})

    @pytest.fixture(params=[OLD, OLDER])
    def old_key(self, request):
        assert "tests/stable_ids.Tile" in self.INV.key
        return self.INV.key.replace("tests/stable_ids.Tile", request.param)

    def test_tuned_calls(self, old_key):
        call = TunedCall("op", "forward", old_key, "shapes", (Candidate(Tile(4), (1.0,)),), 0)
        text = AutotuningResult((call,)).to_json().replace('"tests/stable_ids.Tile"', f'"{OLD}"')
        assert AutotuningResult.from_json(text).configs == {self.INV.key: Tile(4)}

    def test_a_cache(self, old_key, tmp_path):
        cache = PersistentCache(tmp_path)
        cache.put(old_key, Tile(4))
        assert cache.get(self.INV.key) == cache.get(self.INV.key, expected_type=Tile) == Tile(4)
        assert cache.has_file(self.INV.key)
        cache.put(self.INV.key, Tile(8))
        assert cache.get(self.INV.key) == Tile(8)
        assert cache.remove(self.INV.key)
        assert cache.get(self.INV.key) is None

    def test_a_lock(self, old_key):
        lock = Lock("cpu:test", {}, ())
        key = old_key.replace(self.INV.device_fingerprint, "cpu:test")
        wanted = self.INV.key.replace(self.INV.device_fingerprint, "cpu:test")
        decision = Decision.of(key, Tile(4), "source")
        lock = Lock.from_json(Lock("cpu:test", {}, (decision,)).to_json())
        assert lock.get(wanted) == decision
        assert lock.get(wanted.replace('"size":7', '"size":8')) is None
