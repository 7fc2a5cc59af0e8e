"""The nearest shape in a tuned table, against a walk over all of it."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.kernel.samples import QUICK, Config, Product, operands
from tilewright import NoConfigError
from tilewright.ops import (
    AutotunePolicy,
    AutotuningResult,
    Candidate,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    TunedCall,
    overlay_cache,
    policy_override,
)
from tilewright.ops.config.nearest import MAX_DISTANCE, MAX_OCTAVES, NearestTable
from tilewright.ops.types import MappedAxis


class Picky(Product):
    """Runs no config whose block is odd."""

    def __init__(self, name="tests.nearest"):
        super().__init__(name)

    def config_reasons(self, inv, cfg):
        return [f"{cfg.block=} is odd"] if cfg.block % 2 else []


KERNEL = Picky()


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(rows, width, columns, *, dtype=jnp.float32, **rest):
    return Invocation(KERNEL, (struct(rows, width, dtype=dtype), struct(width, columns, dtype=dtype)), **rest)


def tables(folder, *entries):
    """A folder with one tuned table: calls and their configs, fastest first."""
    folder.mkdir(exist_ok=True)
    calls = [
        TunedCall(
            inv.kernel.name, inv.direction, inv.key, "", tuple(Candidate(c, (1.0 + i,)) for i, c in enumerate(cfgs)), 0
        )
        for inv, *cfgs in entries
    ]
    (folder / "t.json").write_text(AutotuningResult(tuple(calls), device=entries[0][0].device_fingerprint).to_json())
    return folder


def walked(entries, key):
    """``NearestTable.neighbours`` as its documentation says it, one entry after the other."""

    def parts(said):
        """What must be equal, and the sizes."""
        sizes = []

        def walk(part):
            if isinstance(part, dict) and "$array" in part:
                array = part["$array"]
                sizes.extend(array["shape"])
                return {**array, "shape": [size == 0 for size in array["shape"]]}
            if isinstance(part, dict):
                return {name: walk(part[name]) for name in sorted(part)}
            return [walk(item) for item in part] if isinstance(part, list) else part

        axes = []
        for size, which in said.get("mapped", []):
            sizes.extend([size] * sum(which))
            axes.append((size == 0, which))
        return [walk({name: said[name] for name in sorted(said) if name != "mapped"}), axes], sizes

    wanted, mine = parts(json.loads(key))
    found = []
    for other, config in entries:
        same, theirs = parts(json.loads(other))
        if other == key or json.dumps(same) != json.dumps(wanted):
            continue
        octaves = [abs(math.log2(a / b)) for a, b in zip(mine, theirs, strict=True) if a]
        distance = round(math.fsum(octaves), 9)
        if distance <= MAX_DISTANCE and all(round(o, 9) <= MAX_OCTAVES for o in octaves):
            found.append((distance, other, config))
    return sorted(found, key=lambda each: each[:2])


sizes = st.one_of(st.sampled_from([0, 1, 2, 3, 4, 8, 16]), st.integers(1, 70))
calls = st.builds(
    call,
    sizes,
    sizes,
    sizes,
    dtype=st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16]),
    kwargs=st.sampled_from([{}, {}, {"scale": 2.0}]),
    direction=st.sampled_from(["forward", "forward", "backward"]),
    mapped=st.one_of(
        st.just(()), st.just(()), st.builds(lambda n: (MappedAxis(n, (True, False)),), sizes),
        st.builds(lambda n, m: (MappedAxis(n, (True, True)), MappedAxis(m, (False, True))), sizes, sizes),
    ),
)  # fmt: skip


class TestDistance:
    @given(st.lists(calls, max_size=60), calls)
    def test_is_what_a_walk_finds(self, known, wanted):
        entries = list({inv.key: (i,) for i, inv in enumerate(known)}.items())
        found = [(n.distance, n.key, n.configs) for n in NearestTable(entries).neighbours(wanted.key)]
        assert found == walked(entries, wanted.key)

    @pytest.mark.parametrize(
        ("other", "distance"),
        [
            (call(64, 32, 16), None),  # itself
            (call(32, 32, 16), 1),
            (call(128, 32, 16), 1),
            (call(64, 64, 16), 2),  # both arrays have the width
            (call(64, 128, 16), 4),
            (call(256, 128, 16), 6),
            (call(256, 128, 17), None),  # too far
            (call(512, 32, 16), None),  # one dimension too far
            (call(0, 32, 16), None),
            (call(64, 32, 16, dtype=jnp.bfloat16), None),
            (call(32, 32, 16, direction="backward"), None),
            (call(32, 32, 16, kwargs={"scale": 2.0}), None),
            (call(32, 32, 16, mapped=(MappedAxis(2, (True, True)),)), None),
            (Invocation(Picky("tests.nearest.other"), call(32, 32, 16).args), None),
            (Invocation(KERNEL, (struct(32, 32),)), None),
            (Invocation(KERNEL, (struct(32, 32), struct(32))), None),
        ],
    )
    def test_of_a_product(self, other, distance):
        found = [n.distance for n in NearestTable([(other.key, ())]).neighbours(call(64, 32, 16).key)]
        assert found == ([] if distance is None else [distance])

    def test_what_is_no_call_is_left_out(self):
        rubbish = ["", "{", "[]", "3", "null", '{"args": []}', 7, ("a",), None]
        table = NearestTable([(key, ()) for key in rubbish] + [(call(4, 4, 4).key, (1,))])
        assert [n.configs for n in table.neighbours(call(4, 4, 2).key)] == [(1,)]
        for key in ("", "{", "null"):
            assert list(table.neighbours(key)) == []


class TestChain:
    def test_comes_after_the_table_and_before_the_heuristic(self, tmp_path):
        folder = tables(tmp_path / "t", (call(64, 32, 16), Config(2)), (call(32, 32, 16), Config(4)))
        chain = ConfigSelectorChain(tables=folder)
        exact, near, far = (chain.choose(call(rows, 32, 16)) for rows in (64, 63, 1000))
        assert (exact.step, near.step, far.step) == ("shipped", "nearest", "heuristic")
        assert (exact.config, near.config, far.config) == (Config(2), Config(2), Config(64))
        assert near.detail == "measured for f32[64,32] f32[32,16], at a distance of 0.0227"
        assert near.key == call(63, 32, 16).key
        assert chain.lookup(call(63, 32, 16)) == near

    def test_is_not_taken_by_a_kernel_that_refuses_it(self, tmp_path, monkeypatch):
        folder = tables(tmp_path / "t", (call(64, 32, 16), Config(2)))
        monkeypatch.setattr(Picky, "takes_near_shapes", False)
        chain = ConfigSelectorChain(tables=folder)
        assert [chain.choose(call(rows, 32, 16)).step for rows in (64, 63)] == ["shipped", "heuristic"]

    def test_passes_over_what_cannot_run(self, tmp_path, caplog):
        folder = tables(tmp_path / "t", (call(64, 32, 16), Config(3)), (call(32, 32, 16), Config(4)))
        chain = ConfigSelectorChain(tables=folder)
        assert chain.choose(call(63, 32, 16)).config == Config(4)
        assert caplog.text == ""
        folder = tables(tmp_path / "u", (call(64, 32, 16), Config(3)))
        assert ConfigSelectorChain(tables=folder).choose(call(63, 32, 16)).step == "heuristic"

    def test_takes_the_fastest_that_can_run(self, tmp_path, caplog):
        """As of a table whose winner is by a package that is not installed."""
        folder = tables(tmp_path / "t", (call(64, 32, 16), Config(3), Config(5), Config(4), Config(2)))
        chain = ConfigSelectorChain(tables=folder)
        for rows, step in ((64, "shipped"), (63, "nearest")):
            chosen = chain.choose(call(rows, 32, 16))
            assert (chosen.step, chosen.config) == (step, Config(4))
        assert caplog.text == ""

    def test_never_blocks_a_tuning_nor_reaches_the_disk(self, tmp_path):
        a, b = operands((6, 5), (5, 4))
        folder = tables(tmp_path / "t", (Invocation(KERNEL, operands((8, 5), (5, 4))), Config(2)))
        events = []
        chain = ConfigSelectorChain(
            persistent=PersistentCache(tmp_path / "disk"), tuner=QUICK, on_event=events.append, tables=folder
        )
        executor, version = Executor(chain), chain.version
        executor(KERNEL, a, b)
        inv = Invocation(KERNEL, (a, b))
        assert chain.cache.origin(inv.key) == "nearest"
        assert chain.version == version
        assert len(chain.persistent) == 0
        assert chain.choose(inv).step == "nearest"
        with policy_override(autotune=True):
            assert chain.choose(inv).step == "autotune"
        # What would have run without tuning was among the candidates.
        tried = {event.config for event in events if type(event).__name__ == "CandidateStarted"}
        assert tried == {Config(2), Config(16), Config(32), Config(64)}
        assert chain.choose(inv).step == "memory"

    def test_obeys_the_policy(self, tmp_path):
        folder = tables(tmp_path / "t", (call(8, 8, 8), Config(2)))
        for policy in (AutotunePolicy(False, False), AutotunePolicy(False, cache_miss_fallback="error")):
            chain = ConfigSelectorChain(policy=policy, tables=folder)
            assert chain.choose(call(8, 8, 8)).step == "shipped"
            with pytest.raises(NoConfigError):
                chain.choose(call(8, 8, 4))

    def test_is_explained(self, tmp_path, capsys):
        a, b = operands((6, 5), (5, 4))
        folder = tables(tmp_path / "t", (Invocation(KERNEL, operands((12, 5), (5, 4))), Config(2)))
        executor = Executor(ConfigSelectorChain(tables=folder))
        choice = executor.explain(KERNEL, a, b).forward
        assert (choice.step, choice.config) == ("nearest", Config(2))
        said = "(nearest, measured for f32[12,5] f32[5,4], at a distance of 1)"
        assert said in capsys.readouterr().out
        with overlay_cache(AutotuningResult().cache()):
            assert executor.explain(KERNEL, a, b, quiet=True).step == "nearest"
