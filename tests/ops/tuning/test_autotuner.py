"""Tuning: what is measured, what is refused, what wins, and what stays when it is cut short."""

import signal
import threading
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import FORMS, QUICK, A, B, Config, Pair, Product, Recomputing, watching
from tilewright.ops import (
    Autotuner,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
    default_executor,
    overlay_cache,
    policy_override,
)
from tilewright.ops.tuning.bench import LocalBench, OutOfTimeError
from tilewright.ops.types import MappedAxis


def tuner(*, events=None, chain=None, **kwargs):
    chain = ConfigSelectorChain() if chain is None else chain
    note = None if events is None else events.append
    return Autotuner(kwargs.pop("tuner", QUICK), chooser=chain, on_event=note, **kwargs)


class Scripted(Product):
    """Candidates that behave as they are told: {block: what to do}."""

    def __init__(self, script, name="tests.tuning.scripted"):
        super().__init__(name)
        self.script = script

    def config_space(self, inv):
        return [Config(block) for block in self.script]

    def run(self, a, b, *, cfg, scale=1.0):
        behaviour = self.script.get(cfg.block, "right")
        if behaviour == "raises":
            raise NotImplementedError(f"not with {cfg.block}")
        if behaviour == "fails":
            return jax.pure_callback(self.fail, jax.ShapeDtypeStruct((6, 4), jnp.float32)) + a @ b
        if behaviour == "wrong":
            return a @ b + 0.1
        if behaviour == "nan":
            return jnp.full((6, 4), jnp.nan)
        if behaviour == "shape":
            return (a @ b).T
        if behaviour == "structure":
            return a @ b, a
        return a @ b

    def fail(self):
        raise ValueError("out of memory")


class TestCandidates:
    def test_each_is_recorded(self):
        kernel = Scripted({1: "right", 2: "raises", 3: "wrong", 4: "nan", 5: "shape", 6: "structure", 7: "right"})
        events = []
        result = tuner(events=events).tune(Invocation(kernel, (A, B)))
        (call,) = result.entries
        by_block = {c.config.block: c for c in call.candidates}
        assert list(by_block) == [64, 1, 2, 3, 4, 5, 6, 7]
        assert {b for b, c in by_block.items() if c.eligible} == {64, 1, 7}
        assert {b: c.check for b, c in by_block.items()} == {
            64: "passed", 1: "passed", 2: "unchecked", 3: "failed", 4: "failed", 5: "failed", 6: "failed", 7: "passed",
        }  # fmt: skip
        assert isinstance(by_block[2].exception, NotImplementedError)
        assert by_block[2].error == "NotImplementedError: not with 2"
        assert "largest error 0.1" in by_block[3].error
        assert "non-finite" in by_block[4].error
        assert "shape (4, 6)" in by_block[5].error
        assert call.winner.eligible
        assert [c.heuristic for c in call.candidates] == [True] + [False] * 7
        names = [type(event).__name__ for event in events]
        assert names[:2] == ["TuningStarted", "CallStarted"]
        assert names[-1] == "CallTuned"
        assert names.count("CandidateStarted") == 8
        done = [event.candidate for event in events if type(event).__name__ == "CandidateDone"]
        assert sum(candidate.failed for candidate in done) == 5
        assert sum(candidate.eligible for candidate in done) == 3
        assert events[1].num_candidates == 8

    def test_that_fail_at_run_time(self):
        (call,) = tuner().tune(Invocation(Scripted({2: "fails"}), (A, B))).entries
        assert "out of memory" in call.candidates[1].error
        assert call.winner.config == Config(64)

    def test_a_heuristic_that_fails_is_replaced(self, clock):
        clock.update({64: 1.0, 1: 9.0})
        (call,) = tuner().tune(Invocation(Scripted({64: "wrong", 1: "right"}), (A, B))).entries
        assert call.winner.config == Config(1)

    @pytest.mark.parametrize("behaviour", ["raises", "wrong", "fails"])
    def test_when_all_fail_all_are_told(self, behaviour):
        kernel = Scripted({64: behaviour, 1: "raises", 2: "wrong"})
        run = lambda: tuner().tune(Invocation(kernel, (A, B)))
        with pytest.raises(ExceptionGroup, match=r"every candidate of tests.tuning.scripted \(forward\)") as caught:
            run()
        assert len(caught.value.exceptions) == 3
        assert any("not with 1" in str(e) for e in caught.value.exceptions)
        assert any("largest error" in str(e) for e in caught.value.exceptions)

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, lambda f: jax.grad(lambda a: f(a).sum())])
    def test_when_all_fail_in_a_call_it_fails_and_stores_nothing(self, transform, tmp_path):
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True, tuner=QUICK)
        executor = Executor(chain)
        kernel = Scripted({64: "wrong", 1: "raises"})
        with pytest.raises(ExceptionGroup, match="every candidate") as caught:
            transform(lambda a: executor(kernel, a, B))(A[None] if transform is jax.vmap else A)
        assert len(caught.value.exceptions) == 2
        assert len(chain.persistent) == 0
        with policy_override(autotune=False):
            assert executor(kernel, A, B).shape == (6, 4)

    @pytest.mark.parametrize(("given", "tried"), [([3, 3, 64], [64, 3]), ([], [64])])
    def test_each_once_with_the_heuristic_first(self, given, tried):
        (call,) = tuner().tune(Invocation(Product(), (A, B)), configs=list(map(Config, given))).entries
        assert [c.config.block for c in call.candidates] == tried

    def test_configs_of_one_value_and_several_types_are_kept_apart(self):
        class Loose(Product):
            def heuristic_cfg(self, inv):
                return 1

            def config_space(self, inv):
                return [1, 1.0, True]

        (call,) = tuner().tune(Invocation(Loose("tests.tuning.loose"), (A, B))).entries
        assert [type(c.config) for c in call.candidates] == [int, float, bool]

    def test_without_a_reference_nothing_is_checked(self):
        class Unchecked(Product):
            reference = None

        (call,) = tuner().tune(Invocation(Unchecked("tests.tuning.unchecked"), (A, B))).entries
        assert {c.check for c in call.candidates} == {"unchecked"}

    @pytest.mark.parametrize("how", ["argument", "policy"])
    def test_verification_can_be_left_out(self, how):
        kernel = Scripted({3: "wrong", 64: "wrong"}, f"tests.tuning.unverified.{how}")
        if how == "argument":
            (call,) = tuner(verify=False).tune(Invocation(kernel, (A, B))).entries
            assert all(c.eligible and c.check == "unchecked" for c in call.candidates)
        else:
            with policy_override(verify=False):
                assert autotune(kernel, A, B, num_iters=1) in (Config(3), Config(64))

    def test_a_kernel_may_allow_more_error(self):
        class Tolerant(Scripted):
            def reference(self, a, b, scale=1.0):
                return a @ b + 0.05

            def tolerance_factor(self, inv):
                return 1e9

        halves = [x.astype(jnp.bfloat16) for x in (A, B)]
        (call,) = tuner().tune(Invocation(Tolerant({1: "right"}), tuple(halves))).entries
        assert call.candidates[0].eligible


class Telling(Product):
    """Each config returns its own block."""

    reference = None

    def __init__(self, blocks):
        super().__init__("tests.tuning.telling")
        self.blocks = blocks

    def run(self, a, b, *, cfg):
        return jnp.full((2,), cfg.block, jnp.float32)

    def config_space(self, inv):
        return [Config(block) for block in self.blocks]


class TestWinner:
    def tune(self, clock, times):
        clock.update(times)
        kernel = Telling([b for b in times if b != 64])
        (call,) = tuner(tuner=Tuner(1, 5)).tune(Invocation(kernel, (A, B))).entries
        return call

    @pytest.mark.parametrize(
        ("times", "winner"),
        [
            ({64: 1.0, 1: 0.5}, 1),
            ({64: 1.0, 1: 2.0}, 64),
            ({64: 1.0, 1: 0.9, 2: 0.8, 3: 0.85}, 2),
            ({64: 1.0, 1: 0.99}, 64),  # within what medians repeat to
            ({64: 1.0, 1: 0.97}, 1),
            ({64: (0.8, 1.0, 1.2), 1: (0.75, 0.95, 1.15)}, 64),  # within the noise of its samples
            ({64: (0.99, 1.0, 1.01), 1: (0.85, 0.9, 0.92)}, 1),
            ({64: 5.0, 1: 1.0, 2: 1.0}, 1),
            ({64: 1.0}, 64),
        ],
    )
    def test_must_beat_the_heuristic_by_more_than_the_noise(self, times, winner, clock):
        call = self.tune(clock, times)
        assert call.winner.config == Config(winner)

    def test_measurements_are_those_of_the_clock(self, clock):
        call = self.tune(clock, {64: 4.0, 1: 1.0, 2: 100.0})
        assert [c.time_ms for c in call.candidates] == [4.0, 1.0, 100.0]
        assert call.speedup == 4.0
        assert call.heuristic.config == Config(64)
        # A hopeless candidate is sampled by itself, promising ones alternate.
        assert len(call.candidates[2].samples_ms) == 1
        assert len(call.candidates[1].samples_ms) == len(call.candidates[0].samples_ms) == 10
        assert clock.samples.count(2) == 2  # how long one call takes, and the sample

    def test_tuning_never_makes_a_call_slower(self, clock):
        generator = np.random.default_rng(0)
        for _ in range(20):
            true = {64: 1.0, 1: 1.0 + generator.uniform(0, 0.1), 2: 1.0 + generator.uniform(0, 0.1)}
            times = {b: tuple(t * generator.uniform(0.97, 1.03, 31)) for b, t in true.items()}
            call = self.tune(clock, times)
            assert call.winner.config == Config(64)


class TestBudget:
    def test_ends_the_search_but_not_before_the_heuristic(self, clock):
        clock.update({64: 1.0, 1: 0.1})
        (call,) = tuner(call_budget_s=1e-9).tune(Invocation(Telling([1]), (A, B))).entries
        assert not call.complete
        assert [(c.config, c.check) for c in call.candidates] == [(Config(64), "unchecked"), (Config(1), "left out")]
        assert call.candidates[1].error == "there was no time left to measure it"
        assert call.winner.time_ms == 1.0

    def test_of_all_calls_that_is_over_measures_nothing_and_says_so(self):
        events: list[Any] = []
        kernel = Telling([1])
        result = tuner(budget_s=1e-9, events=events).tune(Invocation(kernel, (A, B)))
        assert not result.entries
        assert [text.split()[0] for text in result.left_out] == [kernel.name]
        assert [type(event).__name__ for event in events] == ["TuningStarted", "CallLeftOut"]

    def test_that_ends_before_the_last_check_keeps_what_was_measured(self, monkeypatch):
        def out_of_time(*_):
            raise OutOfTimeError("there was no time left to measure it")

        monkeypatch.setattr(LocalBench, "recheck", out_of_time)
        (call,) = tuner(budget_s=1000.0).tune(Invocation(Product(), (A, B))).entries
        assert call.winner.eligible
        assert not call.complete  # the next tuning goes on with it

    def test_that_is_enough_changes_nothing(self):
        (call,) = tuner(budget_s=1000.0).tune(Invocation(Product(), (A, B))).entries
        assert call.complete


class TestInterrupt:
    """Ctrl-C reaches the thread that called; what was measured by then is kept."""

    def interrupting(self, events, after):
        """An event handler that sends SIGINT to the main thread once so many candidates were measured."""

        def note(event):
            events.append(type(event).__name__)
            if events.count("CandidateDone") == after and events[-1] == "CandidateDone":
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                # The next candidate waits until the signal was seen; how long that takes is up to the system.
                handled.wait(10)

        handled = threading.Event()
        previous = signal.getsignal(signal.SIGINT)

        def handler(number, frame):
            handled.set()
            signal.signal(signal.SIGINT, previous)
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, handler)
        return note

    @pytest.fixture(autouse=True)
    def restored(self):
        previous = signal.getsignal(signal.SIGINT)
        yield
        signal.signal(signal.SIGINT, previous)

    def test_keeps_what_was_measured(self, tmp_path):
        events, chain = [], ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        kernel = Product("tests.tuning.interrupted")
        invocations = [Invocation(kernel, (A, B)), Invocation(kernel, (A[:2], B))]
        owner = Autotuner(QUICK, chooser=chain, on_event=self.interrupting(events, 2))
        result = owner.tune(*invocations)
        assert result.interrupted
        assert len(result) == 1
        assert not result.entries[0].complete
        assert 2 <= len(result.entries[0].candidates) <= 3
        assert chain.cache.get(invocations[0].key) == result.entries[0].winner.config
        assert chain.persistent.get(invocations[0].key) == result.entries[0].winner.config
        assert chain.cache.get(invocations[1].key) is None
        # An incomplete measurement is not taken for a complete one.
        again = Autotuner(QUICK, chooser=chain).tune(invocations[0], reuse=True)
        assert again.entries[0].step == "measured"

    def test_ends_a_call_that_was_being_tuned(self):
        events = []
        chain = ConfigSelectorChain(autotune=True, tuner=QUICK, on_event=self.interrupting(events, 1))
        kernel = Product("tests.tuning.interrupted")
        with pytest.raises(KeyboardInterrupt):
            jax.jit(lambda a: Executor(chain)(kernel, a, B))(A)
        assert chain.cache.get(Invocation(kernel, (A, B)).key) is not None
        np.testing.assert_allclose(Executor(chain)(kernel, A, B), A @ B, rtol=1e-5)

    def test_autotune_raises(self, monkeypatch):
        from tilewright.ops.tuning import tuning

        events = []
        note = self.interrupting(events, 1)
        monkeypatch.setattr(tuning.Autotuner, "_emit", lambda self, event: note(event))
        with pytest.raises(KeyboardInterrupt):
            autotune(Product("tests.tuning.interrupted"), A, B)


class TestReuse:
    def test_takes_what_the_disk_knows(self, tmp_path):
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        inv = Invocation(Pair("tests.tuning.reuse"), (A, B))
        first = tuner(chain=chain).tune(inv, inv.backward())
        again = tuner(chain=chain).tune(inv, inv.backward(), reuse=True)
        assert [e.step for e in first] == ["measured", "measured"]
        assert [e.step for e in again] == ["disk", "disk"]
        assert [e.candidates for e in again] == [e.candidates for e in first]
        assert again.configs == first.configs
        assert [e.step for e in tuner(chain=chain).tune(inv)] == ["measured"]


class TestAutotune:
    def test_stores_the_winner_for_later_calls(self):
        kernel = Product("tests.tuning.autotune")
        best = autotune(kernel, A, B, configs=[Config(3)], num_warmup=0, num_iters=1)
        assert best in (Config(3), Config(64))
        assert default_executor().choose_config(kernel, A, B) == best

    def test_measures_the_arrays_that_were_given(self):
        seen = []

        class Looking(Product):
            def run(self, a, b, *, cfg):
                jax.debug.callback(lambda total: seen.append(float(total)), a.sum())
                return a @ b

        autotune(Looking("tests.tuning.looking"), jnp.full((2, 2), 3.0), jnp.ones((2, 2)), num_iters=1)
        jax.effects_barrier()
        assert set(seen) == {12.0}

    def test_keyword_arguments_reach_the_kernel(self):
        kernel = Product("tests.tuning.keywords")
        autotune(kernel, A, B, scale=3.0, num_iters=1)
        key = Invocation(kernel, (A, B), {"scale": 3.0}).key
        assert default_executor().chooser.cache.origin(key) == "autotune"

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"num_warmup": -1}, ValueError, "-1"),
            ({"num_iters": 0}, ValueError, "0"),
            ({"num_iters": 1.5}, TypeError, "1.5"),
            ({"configs": 3}, TypeError, "configs=3"),
        ],
    )
    def test_wrong_input(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            autotune(Product(), A, B, **kwargs)

    def test_what_is_no_kernel_or_invocation(self):
        with pytest.raises(TypeError, match="kernel='flash'"):
            autotune("flash", A, B)
        for call in (lambda: tuner().tune("flash"), lambda: autotune_recorded(["flash"])):
            with pytest.raises(TypeError, match="'flash'"):
                call()
        with pytest.raises(TypeError, match="invocations=3"):
            autotune_recorded(3)


class TestBackward:
    @pytest.mark.parametrize("form", [Recomputing, Pair])
    @pytest.mark.parametrize(
        "mapped",
        [
            (),
            (MappedAxis(3, (True, False)),),
            (MappedAxis(2, (False, True)), MappedAxis(3, (True, False))),
            (MappedAxis(2, (False, False)),),
        ],
    )
    def test_is_measured_and_checked(self, form, mapped):
        inv = Invocation(form(), (A, B), direction="backward", mapped=mapped)
        with watching() as seen:
            (call,) = tuner().tune(inv).entries
        assert all(c.check == "passed" for c in call.candidates)
        assert {s.cfg for s in seen if s.stage == "backward"} == {Config(16), Config(32), Config(64)}
        assert (call.direction, call.key) == ("backward", inv.key)
        assert call.candidates[0].config == Config(32)  # the heuristic of this direction
        assert all(f"× {axis.size}" in call.shapes for axis in mapped)

    @pytest.mark.parametrize("form", [Recomputing, Pair])
    def test_wrong_gradients_are_refused(self, form):
        class Wrong(form):
            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                return self.worse(super().custom_vjp(primals, cfg, kwargs, cotangents), cfg)

            def backward(self, *args, cfg, **kwargs):
                found = super().backward(*args, cfg=cfg, **kwargs)
                return dict(zip(found, self.worse(tuple(found.values()), cfg), strict=True))

            def worse(self, found, cfg):
                return (1.01 * found[0], *found[1:]) if cfg.block == 16 else found

        if form is Recomputing:
            del Wrong.backward
        else:
            del Wrong.custom_vjp
        (call,) = tuner().tune(Invocation(Wrong("tests.tuning.wrong"), (A, B), direction="backward")).entries
        assert {c.config.block: c.check for c in call.candidates} == {32: "passed", 64: "passed", 16: "failed"}

    def test_with_integers_and_gaps(self):
        (call,) = tuner().tune(Invocation(Gather(), (A, jnp.zeros(3, jnp.int32)), direction="backward")).entries
        assert [c.check for c in call.candidates] == ["passed", "passed"]

    def test_uses_the_forward_config_of_the_chain(self):
        chain, inv = ConfigSelectorChain(), Invocation(Pair("tests.tuning.chain"), (A, B))
        chain.cache.put(inv.key, Config(5))
        with watching() as seen:
            tuner(chain=chain).tune(inv.backward())
        assert {s.cfg for s in seen if s.stage == "forward"} == {Config(5)}


class Gather(Product):
    """Rows by index, with a mask of what was taken; samples are valid rows."""

    drawn: ClassVar[list] = []

    def __init__(self):
        super().__init__("tests.tuning.gather")

    def run(self, x, index, *, cfg):
        return x[index], index >= 0, {"sum": x.sum()}

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        (x, index), (rows, none, total) = primals, cotangents
        assert none is None
        return {"x": jnp.zeros_like(x).at[index].add(rows) + total["sum"]}

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2)]

    def sample_inputs(self, inv, key):
        x, index = inv.abstract_args
        drawn = jax.random.normal(key, x.shape, x.dtype), jax.random.randint(key, index.shape, 0, x.shape[0])
        Gather.drawn.append(np.asarray(drawn[1]))
        return drawn, {}

    def reference(self, x, index):
        return jnp.take(x, index, axis=0), index >= 0, {"sum": x.sum()}


class TestInputs:
    def test_are_drawn_by_the_kernel(self):
        Gather.drawn.clear()
        (call,) = tuner().tune(Invocation(Gather(), (A, jnp.full(50, 5, jnp.int32)))).entries
        assert all(c.check == "passed" for c in call.candidates)
        assert Gather.drawn[0].max() < 6
        assert len(set(Gather.drawn[0])) > 2

    def test_each_element_of_a_mapped_axis_is_its_own_draw(self):
        Gather.drawn.clear()
        index = jnp.zeros(5, jnp.int32)
        tuner().tune(Invocation(Gather(), (A, index), mapped=(MappedAxis(3, (False, True)),)))
        assert len(Gather.drawn) == 3
        assert not np.array_equal(Gather.drawn[0], Gather.drawn[1])

    def test_of_many_kinds(self):
        class Kinds(Product):
            def run(self, x, small, flags, key, half, *, cfg, extra):
                drawn = jax.random.normal(key, x.shape)
                return x + small.astype(x.dtype).sum() + flags.sum() + 0 * drawn + half.astype(x.dtype) + extra["e"]

            def reference(self, *args, extra):
                return self.run(*args, cfg=None, extra=extra)

        args = (A, A.astype(jnp.float8_e4m3fn), A > 0, jax.random.key(0), A.astype(jnp.float16))
        inv = Invocation(Kinds("tests.tuning.kinds"), args, {"extra": {"e": np.float32(3)}})
        (call,) = tuner().tune(inv).entries
        assert call.winner.check == "passed"

    @pytest.mark.parametrize(
        "result",
        [lambda a, b, block: a @ b + (2j if block == 64 else 1j) * (a @ b), lambda a, b, block: jax.random.key(block)],
        ids=["complex", "random key"],
    )
    def test_results_that_are_no_floats_are_checked_whole(self, result):
        class Odd(Scripted):
            def run(self, a, b, *, cfg, scale=1.0):
                return result(a, b, cfg.block)

            def reference(self, a, b, scale=1.0):
                return result(a, b, 64)

        (call,) = tuner().tune(Invocation(Odd({1: ""}), (A, B))).entries
        assert [c.check for c in call.candidates] == ["passed", "failed"]


class TestNumericContext:
    def test_x64(self):
        with jax.enable_x64(True):
            inv = Invocation(Product(), (A.astype(jnp.float64), B.astype(jnp.float64)))
            with watching() as seen:
                (call,) = tuner().tune(inv).entries
        assert seen
        assert '"float64"' in inv.key
        assert all(c.check == "passed" for c in call.candidates)

    def test_precision_device_and_context_variables(self):
        found = []

        class Looking(Product):
            def run(self, a, b, *, cfg):
                with_overlay = default_executor().choose_config(other, A, B)
                found.append((jax.config.jax_default_matmul_precision, with_overlay.block))
                jax.debug.callback(lambda: None)
                return a @ b

            def sample_inputs(self, inv, key):
                args, kwargs = super().sample_inputs(inv, key)
                found.append(args[0].devices())
                return args, kwargs

        other, cache = Product("tests.tuning.other"), ConfigCache()
        cache.put(Invocation(other, (A, B)).key, Config(5))
        device = jax.devices()[3]
        with jax.default_matmul_precision("highest"), jax.default_device(device), overlay_cache(cache):
            tuner().tune(Invocation(Looking("tests.tuning.looking"), (A, B)))
        assert set(map(str, found)) == {str(("highest", 5)), str({device})}

    def test_no_mesh_of_the_caller(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            (call,) = tuner().tune(Invocation(Pair(), (A, B))).entries
        assert all(c.check == "passed" for c in call.candidates)


class TestLaterCalls:
    """Winners reach calls and functions that ran before."""

    @pytest.fixture
    def kernel(self, clock):
        clock.update({64: 5.0, 1: 1.0})
        return Telling([1])

    @pytest.mark.parametrize("how", ["autotune", "tuner", "policy"])
    def test_eager(self, how, kernel):
        chain = ConfigSelectorChain(tuner=QUICK)
        executor = Executor(chain)
        assert executor(kernel, A, B)[0] == 64
        if how == "autotune":
            assert kernel(A, B)[0] == 64
            autotune(kernel, A, B, num_iters=1)
            executor = default_executor()
        elif how == "tuner":
            Autotuner(QUICK, chooser=chain).tune(Invocation(kernel, (A, B)))
        else:
            with policy_override(autotune=True):
                executor(kernel, A, B)
        assert executor(kernel, A, B)[0] == 1
        default_executor().chooser.cache.clear()
        default_executor().chooser.persistent.clear()

    def test_jitted(self, kernel):
        chain = ConfigSelectorChain(tuner=QUICK)
        executor = Executor(chain)
        function = jax.jit(lambda a: executor(kernel, a, B))
        assert function(A)[0] == 64
        Autotuner(QUICK, chooser=chain).tune(Invocation(kernel, (A, B)))
        assert function(A)[0] == 1
        with watching() as seen:
            function(A)
        assert seen == []

    def test_a_tuning_that_changes_nothing_retraces_nothing(self, clock, kernel):
        clock.update({64: 1.0, 1: 5.0})
        chain = ConfigSelectorChain(tuner=QUICK)
        traced = []
        function = jax.jit(lambda a: traced.append(a) or Executor(chain)(kernel, a, B))
        function(A)
        Autotuner(QUICK, chooser=chain).tune(Invocation(kernel, (A, B)))
        function(A)
        assert len(traced) == 1

    def test_tuning_on_a_miss_compiles_once(self):
        kernel, traced = Product("tests.tuning.once"), []
        executor = Executor(ConfigSelectorChain(autotune=True, tuner=QUICK))
        function = jax.jit(lambda a: traced.append(a) or executor(kernel, a, B))
        function(A)
        function(A)
        assert len(traced) == 1


@pytest.mark.parametrize("form", FORMS)
def test_recorded_invocations_are_tuned(form):
    inv = Invocation(form("tests.tuning.recorded"), (A, B))
    result = autotune_recorded([inv, inv.abstract()], tuner=QUICK)
    assert [e.key for e in result] == [inv.key]
