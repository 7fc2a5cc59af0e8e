import sys

from tests.support.threads import together
from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.utils.datacarrier import FwdParams


def test_the_documented_use():
    cache = ConfigCache()
    config = FwdParams(num_warps=4)
    cache.put("key", config)
    assert cache.get("key") is config
    assert cache.get("other") is None
    assert "key" in cache
    assert "other" not in cache
    assert len(cache) == 1
    assert list(cache) == ["key"]


def test_origin():
    cache = ConfigCache()
    cache.put("a", 1)
    cache.put("b", 1, origin="heuristic")
    assert [cache.origin(key) for key in "abc"] == ["user", "heuristic", None]
    cache.put("b", 1, origin="autotune")
    assert cache.origin("b") == "autotune"


def test_version_grows_with_every_change_and_only_then():
    cache = ConfigCache()
    versions = [cache.version]
    changes = [
        lambda: cache.put("a", 1),
        lambda: cache.put("a", True),
        lambda: cache.put("a", True, origin="disk"),
        lambda: cache.put("b", 1),
        cache.clear,
    ]
    for change in changes:
        change()
        versions.append(cache.version)
    assert sorted(set(versions)) == versions
    cache.clear()
    cache.get("a")
    assert cache.version == versions[-1]
    cache.put("a", FwdParams(num_warps=1))
    after = cache.version
    cache.put("a", FwdParams(num_warps=1))
    assert cache.version == after


def test_iteration_is_over_a_snapshot():
    cache = ConfigCache()
    for i in range(10):
        cache.put(i, i)
    for key in cache:
        cache.put(key + 100, key)
    for key, _ in cache.items():
        cache.put(key + 1000, key)
    assert len(cache) == 40


def test_sixteen_threads():
    cache = ConfigCache()

    def work(number):
        for i in range(300):
            cache.put((number, i), (number, i))
            cache.put("shared", number, origin=str(number))
            assert cache.get((number, i)) == (number, i)
            assert cache.get("shared") in range(16)
            if i % 100 == 0:
                list(cache)
                cache.items()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(work, range(16))
    finally:
        sys.setswitchinterval(interval)
    assert len(cache) == 16 * 300 + 1
    assert cache.version >= 16 * 300
    assert cache.origin("shared") == str(cache.get("shared"))
