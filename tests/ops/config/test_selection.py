"""The selection chain, step by step."""

import contextlib
import json
import threading

import jax
import jax.numpy as jnp
import pytest

from tests.ops.kernel.samples import QUICK, A, B, Config, Pair, Product, watching
from tests.support.threads import together
from tilewright import NoConfigError
from tilewright.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigChooser,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Selection,
    default_executor,
    overlay_cache,
    policy_override,
    use_lock,
)
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.kernel.candidates import Candidate


@pytest.fixture
def kernel():
    return Product("tests.selection")


@pytest.fixture
def inv(kernel):
    return Invocation(kernel, (A, B))


def tuned(inv, cfg):
    """What a tuning returns."""
    call = TunedCall.of(inv, [Candidate(cfg, (1.0,))], 0, source=inv.kernel.source(cfg))
    return AutotuningResult((call,), device=inv.device_fingerprint)


def table(folder, inv, cfg, name="table.json"):
    """A tuned table as it ships."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(tuned(inv, cfg).to_json())
    return folder


def stored(path, inv, cfg, **kwargs):

    cache = PersistentCache(path)
    assert cache.put(inv.key, cfg, source=inv.kernel.source(cfg), **kwargs)
    return cache


class TestOrder:
    STEPS = ("explicit", "overlay", "lock", "memory", "disk", "shipped", "autotune", "nearest", "heuristic")

    def chain(self, first, inv, tmp_path, events):
        """A chain in which every step from ``first`` on has an answer, and the context and config to ask it with."""
        has = lambda step: self.STEPS.index(step) >= self.STEPS.index(first)
        cache, overlay = ConfigCache(), ConfigCache()
        if has("overlay"):
            overlay.put(inv.key, Config(2))
        lock = tuned(inv, Config(3)).to_lock() if has("lock") else None
        if has("memory"):
            cache.put(inv.key, Config(4))
        path = tmp_path / "disk"
        if has("disk"):
            stored(path, inv, Config(5))
        folder, near = tmp_path / "tables", Invocation(inv.kernel, (A[:3], B))
        if has("nearest"):
            table(folder, near, Config(8), "near.json")
        if has("shipped"):
            table(folder, inv, Config(6))
        policy = AutotunePolicy(allow_autotune=has("autotune"))
        chain = ConfigSelectorChain(
            cache, PersistentCache(path), policy=policy, tuner=QUICK, on_event=events.append, tables=folder
        )

        @contextlib.contextmanager
        def context():
            with overlay_cache(overlay), use_lock(lock):
                yield

        return chain, context, Config(1) if has("explicit") else None

    @pytest.mark.parametrize("first", STEPS)
    def test_the_first_answer_counts(self, first, inv, tmp_path):
        events = []
        chain, context, cfg = self.chain(first, inv, tmp_path, events)
        with context():
            selection = chain.choose(inv, cfg=cfg)
        assert selection.step == first
        if first not in ("autotune", "heuristic"):
            assert selection.config == Config(self.STEPS.index(first) + 1)
        assert [event for event in events if isinstance(event, Selection)] == [selection]
        assert selection.key == ("" if first == "explicit" else inv.key)
        assert (selection.time_ms is not None) == (first == "autotune")

    @pytest.mark.parametrize("first", STEPS)
    def test_what_is_remembered_where(self, first, inv, tmp_path):
        chain, context, cfg = self.chain(first, inv, tmp_path, [])
        before = len(chain.persistent)
        with context():
            config = chain.choose(inv, cfg=cfg).config
        if first in ("explicit", "overlay", "lock"):
            assert chain.cache.get(inv.key) == Config(4)
        else:
            assert chain.cache.get(inv.key) == config
            assert chain.cache.origin(inv.key) == {"memory": "user"}.get(first, first)
        assert len(chain.persistent) == before + (first == "autotune")

    @pytest.mark.parametrize("first", STEPS)
    def test_lookup_leaves_no_trace(self, first, inv, tmp_path):
        events = []
        chain, context, cfg = self.chain(first, inv, tmp_path, events)
        size, files, version = len(chain.cache), len(chain.persistent), chain.version
        with context():
            assert chain.lookup(inv, cfg=cfg).step == ("nearest" if first == "autotune" else first)
        assert (len(chain.cache), len(chain.persistent), chain.version, events) == (size, files, version, [])


class TestHeuristics:
    def test_never_block_a_tuning(self, kernel, inv):
        events = []
        chain = ConfigSelectorChain(tuner=QUICK, on_event=lambda e: isinstance(e, Selection) and events.append(e.step))
        executor = Executor(chain)
        executor(kernel, A, B)
        with policy_override(autotune=True):
            executor(kernel, A, B)
            executor(kernel, A, B)
        executor(kernel, A, B)
        assert events[:2] == ["heuristic", "autotune"]
        assert set(events[2:]) <= {"memory"}

    def test_never_replace_a_measurement(self, inv):
        chain = ConfigSelectorChain()
        chain.cache.put(inv.key, Config(9), origin="autotune")
        chain.remember(Selection(Config(64), "heuristic", inv.key))
        assert chain.cache.get(inv.key) == Config(9)

    def test_leave_the_version_as_it_is(self, inv):
        chain = ConfigSelectorChain()
        version = chain.version
        chain.choose(inv)
        assert len(chain.cache) == 1
        assert chain.version == version
        chain.cache.put(inv.key, Config(3))
        assert chain.version > version


class TestDirections:
    def test_a_config_of_one_never_answers_for_the_other(self, tmp_path):
        pair = Pair("tests.selection.pair")
        inv = Invocation(pair, (A, B))
        chain = ConfigSelectorChain(
            persistent=stored(tmp_path / "disk", inv, Config(4)), tables=table(tmp_path / "tables", inv, Config(5))
        )
        chain.cache.put(inv.key, Config(3))
        overlay = ConfigCache()
        overlay.put(inv.key, Config(2))
        with overlay_cache(overlay):
            assert chain.choose(inv.backward()) == Selection(Config(32), "heuristic", inv.backward().key)
            with watching() as seen:
                jax.grad(lambda a: Executor(chain)(pair, a, B).sum())(A)
        assert {(s.stage, s.cfg) for s in seen} >= {("forward", Config(2)), ("backward", Config(32))}
        assert ("backward", Config(2)) not in {(s.stage, s.cfg) for s in seen}


class TestStaleEntries:
    def chain(self, path, **kwargs):
        return ConfigSelectorChain(persistent=PersistentCache(path), tuner=QUICK, **kwargs)

    def test_another_source_is_no_hit_but_the_first_candidate(self, inv, tmp_path):
        PersistentCache(tmp_path).put(inv.key, Config(8), source="another")
        assert self.chain(tmp_path).choose(inv).step == "heuristic"
        started = []
        chain = self.chain(
            tmp_path,
            autotune=True,
            on_event=lambda e: type(e).__name__ == "CandidateStarted" and started.append(e.config),
        )
        assert chain.choose(inv).step == "autotune"
        # The heuristic goes before it: without its time no other could be judged.
        assert started == [Config(64), Config(8), Config(16), Config(32)]

    def test_another_toolchain(self, inv, tmp_path, monkeypatch):
        from tilewright.ops.config import persistent

        stored(tmp_path, inv, Config(8))
        assert self.chain(tmp_path).choose(inv).config == Config(8)
        monkeypatch.setattr(persistent, "toolchain_fingerprint", lambda: {"jax": "0.0.1"})
        chain = self.chain(tmp_path)
        assert chain.choose(inv).step == "heuristic"
        assert chain.stale_config(inv) == Config(8)

    def test_a_config_of_another_type_is_a_miss(self, inv, tmp_path):
        stored(tmp_path, inv, AutotunePolicy())
        assert self.chain(tmp_path).choose(inv).step == "heuristic"


class TestPolicy:
    @pytest.mark.parametrize(
        ("policy", "step"),
        [
            ({}, "autotune"),
            ({"allow_autotune": False}, "heuristic"),
            ({"cache_miss_fallback": "heuristics"}, "heuristic"),
            ({"cache_miss_fallback": "heuristics", "allow_heuristics": False}, "autotune"),
            ({"allow_heuristics": False}, "autotune"),
            ({"cache_miss_fallback": "heuristics", "allow_autotune": False}, "heuristic"),
            ({"allow_autotune": False, "allow_heuristics": False}, NoConfigError),
            ({"cache_miss_fallback": "error"}, NoConfigError),
            ({"cache_miss_fallback": "error", "allow_autotune": False}, NoConfigError),
        ],
    )
    def test_on_a_miss(self, policy, step, kernel, inv):
        chain = ConfigSelectorChain(policy=AutotunePolicy(**policy), tuner=QUICK)
        plain = ConfigSelectorChain(tuner=QUICK)
        for each, context in ((chain, {}), (plain, {"autotune": True} | policy)):
            if "allow_autotune" in context:
                context.pop("autotune")
            with policy_override(**context):
                if step is NoConfigError:
                    for call in (lambda: each.choose(inv), lambda: Executor(each)(kernel, A, B)):  # noqa: B023
                        with pytest.raises(NoConfigError, match=r"tests\.selection \(forward\)"):
                            call()
                else:
                    assert each.choose(inv).step == step
        chain.cache.put(inv.key, Config(3))
        assert chain.choose(inv).step == "memory"
        assert chain.choose(inv, cfg=Config(1)).step == "explicit"

    def test_budget_and_verification_reach_the_tuning(self, inv):
        seen = []
        chain = ConfigSelectorChain(policy=AutotunePolicy(budget_s=1e-9), tuner=QUICK, on_event=seen.append)
        assert chain.choose(inv).step == "heuristic"
        assert "CandidateStarted" not in [type(e).__name__ for e in seen]
        chain = ConfigSelectorChain(policy=AutotunePolicy(verify=False), tuner=QUICK, on_event=seen.append)
        assert chain.choose(inv).step == "autotune"
        tuned = next(e.call for e in seen if type(e).__name__ == "CallTuned")
        assert {c.check for c in tuned.candidates} == {"unchecked"}

    def test_the_environment_allows_tuning(self, inv, monkeypatch):
        chain = ConfigSelectorChain(tuner=QUICK)
        assert chain.choose(inv).step == "heuristic"
        monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "1")
        with policy_override(autotune=False):
            assert chain.choose(inv).step == "heuristic"
        with policy_override(verify=False):  # says nothing of tuning
            assert ConfigSelectorChain(tuner=QUICK).choose(inv).step == "autotune"
        assert chain.choose(inv).step == "autotune"
        monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "0")
        assert ConfigSelectorChain(tuner=QUICK).choose(inv).step == "heuristic"

    def test_the_default_executor_tunes_only_when_asked(self):
        kernel = Product("tests.selection.default")
        inv = Invocation(kernel, (A, B))
        chain = default_executor().chooser
        kernel(A, B)
        assert chain.cache.origin(inv.key) == "heuristic"
        assert chain.persistent.get(inv.key) is None
        with policy_override(autotune=True):
            kernel(A, B)
        assert chain.cache.origin(inv.key) == "autotune"
        entry = chain.persistent.entry(inv.key)
        assert entry.config == chain.cache.get(inv.key)
        assert len(entry.measurements) == 3
        assert json.loads(json.dumps(entry.metadata))["complete"] is True


class TestExplicitConfigs:
    def test_do_not_disturb_each_other(self, kernel):
        executor = Executor(ConfigSelectorChain())
        for cfg in (Config(1), Config(2), Config(1), None):
            with watching() as seen:
                executor(kernel, A, B, cfg=cfg)
            assert {s.cfg for s in seen} <= {cfg or Config(64)}

    def test_a_kernel_may_leave_a_direction_to_selection(self):
        class OneWay(Pair):
            def resolve_config(self, cfg, inv):
                return cfg if inv.direction == "forward" else None

        kernel = OneWay("tests.selection.oneway")
        with watching() as seen:
            jax.grad(lambda a: kernel(a, B, cfg=Config(7)).sum())(A)
        assert {(s.stage, s.cfg) for s in seen} == {
            ("run", Config(7)),
            ("forward", Config(7)),
            ("backward", Config(32)),
        }


class TestStorage:
    def test_a_new_process_finds_what_was_measured(self, inv, tmp_path):
        first = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True, tuner=QUICK)
        winner = first.choose(inv)
        assert winner.step == "autotune"
        second = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        assert second.choose(inv) == Selection(winner.config, "disk", inv.key)
        assert second.choose(inv).step == "memory"
        assert second.measured_ms(inv, winner.config) > 0
        assert second.measured_ms(inv, Config(12345)) is None

    def test_a_config_without_a_json_form_stays_in_memory(self, tmp_path, caplog):
        class Odd(Product):
            def heuristic_cfg(self, inv):
                return marker

            def config_space(self, inv):
                return [marker]

        marker = Marker()
        kernel = Odd("tests.selection.odd")
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True, tuner=QUICK)
        Executor(chain)(kernel, A, B)
        assert chain.choose(Invocation(kernel, (A, B))) == Selection(marker, "memory", Invocation(kernel, (A, B)).key)
        assert "cannot be stored on disk" in caplog.text


class Marker:
    pass


class TestThreads:
    def test_one_key_is_measured_once(self, kernel):
        started = []
        note = lambda event: type(event).__name__ == "CallStarted" and started.append(event.inv.key)
        executor = Executor(ConfigSelectorChain(autotune=True, tuner=QUICK, on_event=note))

        together(lambda i: executor(kernel, A * i, B), range(8))
        assert len(started) == 1

    def test_sixteen_threads_call_one_kernel(self, kernel):
        executor = Executor(ConfigSelectorChain())
        gradient = jax.grad(lambda a: executor(kernel, a, B).sum())

        def work(i):
            for rows in (2, 3, 4):
                a = jnp.full((rows, 5), float(i))
                assert jnp.allclose(executor(kernel, a, B), a @ B, rtol=1e-4, atol=1e-4)
            assert jnp.allclose(gradient(A), jnp.ones((6, 4)) @ B.T, rtol=1e-4, atol=1e-4)

        together(work, range(16))

    def test_a_kernel_inside_a_kernel_is_tuned_within_its_turn(self):
        inner = Product("tests.selection.inner")

        class Outer(Kernel):
            def run(self, a, b, *, cfg):
                return inner(a, b) + 1.0

            def heuristic_cfg(self, inv):
                return Config()

            def config_space(self, inv):
                return [Config(1), Config(2)]

        outer, done = Outer("tests.selection.outer"), []

        def work():
            with policy_override(autotune=True):
                done.append(outer(A, B))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert done, "the inner tuning waits for the outer one"


class TestOtherChoosers:
    def test_any_chooser_will_do(self, kernel):
        class Always(ConfigChooser):
            def choose(self, inv, *, cfg=None, overrides=None):
                return Selection(cfg or Config(99), "mine", inv.key)

            lookup = choose

            @property
            def version(self):
                return 0

        executor = Executor(Always())
        with watching() as seen:
            executor(kernel, A, B)
            jax.jit(lambda a: executor(kernel, a, B))(A)
        assert seen[-1].cfg == Config(99)
        assert executor.choose_config(kernel, A, B) == Config(99)
        assert executor.explain(kernel, A, B, quiet=True).step == "mine"


class TestWrongInput:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"cache": "memory"}, "cache='memory'"),
            ({"cache": PersistentCache("/nowhere")}, "cache="),
            ({"persistent": "/tmp"}, "persistent='/tmp'"),
            ({"policy": "autotune"}, "policy='autotune'"),
            ({"tuner": 3}, "tuner=3"),
            ({"on_event": 3}, "on_event=3"),
            ({"autotune": True, "policy": AutotunePolicy()}, "autotune=True"),
            ({"autotune": "yes"}, "autotune='yes'"),
        ],
    )
    def test_chain(self, kwargs, message):
        with pytest.raises((TypeError, ValueError), match=message):
            ConfigSelectorChain(**kwargs)

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"cache_miss_fallback": "guess"}, ValueError, "cache_miss_fallback='guess'"),
            ({"budget_s": 0}, ValueError, "budget_s=0"),
            ({"budget_s": -1.0}, ValueError, r"budget_s=-1\.0"),
            ({"budget_s": float("nan")}, ValueError, "budget_s=nan"),
            ({"budget_s": "long"}, TypeError, "budget_s='long'"),
            ({"allow_autotune": 1}, TypeError, "allow_autotune=1"),
            ({"allow_heuristics": None}, TypeError, "allow_heuristics=None"),
            ({"verify": "no"}, TypeError, "verify='no'"),
        ],
    )
    def test_policy(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            AutotunePolicy(**kwargs)
        with pytest.raises(error, match=message), policy_override(**kwargs):
            pass
