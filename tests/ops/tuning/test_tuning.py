"""Tuning: what is measured, what may win, what is kept when something goes wrong."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import FORMS, Config, Pair, Product, Recomputing, operands
from tilewright.ops import (
    Autotuner,
    AutotuningResult,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
    default_executor,
    tune,
)
from tilewright.ops.lowering.labels import extract_labels_from_hlo_text, parse_label
from tilewright.ops.tuning import schedule, timing, workload
from tilewright.ops.tuning.events import CallStarted, CandidateDone

QUICK = Tuner(warmup=0, iters=3)


class Blocks(Kernel[Config, jax.Array]):
    """Adds one; what a config does to it is up to the test."""

    def __init__(self, name: str, *, blocks: tuple[int, ...] = (64, 32, 16), **broken: Any):
        super().__init__(name)
        self.blocks = blocks
        self.raises_at_trace = broken.get("raises_at_trace", ())
        self.raises_at_run = broken.get("raises_at_run", ())
        self.wrong = broken.get("wrong", ())

    def run(self, x, *, cfg):
        if cfg.block in self.raises_at_trace:
            raise RuntimeError(f"no tile of {cfg.block}")
        if cfg.block in self.raises_at_run:

            def refuse(y):
                raise RuntimeError(f"illegal address at {cfg.block}")

            x = jax.pure_callback(refuse, x, x)
        return x + (1.001 if cfg.block in self.wrong else 1)

    def heuristic_cfg(self, inv):
        return Config(self.blocks[0])

    def config_space(self, inv):
        return [Config(block) for block in self.blocks]

    def reference(self, x):
        return x + 1


def failures(events: list[Any]) -> list[CandidateDone]:
    return [event for event in events if isinstance(event, CandidateDone) and event.candidate.failed]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """A clock that says what the test wants: milliseconds, or a list of them, by the block of the candidate."""
    times: dict[int, Any] = {}
    compiled: dict[Any, int] = {}
    compile_ = workload.Workload.compile

    def remembering(self: Any, config: Any, *turn: Any) -> Any:
        function = compile_(self, config)
        compiled[id(function)] = config.block
        keep.append(function)
        return function

    keep: list[Any] = []
    taken: dict[int, int] = {}

    def fake(function: Any, args: Any, calls: int) -> float:
        jax.block_until_ready(function(*args))
        block = compiled[id(function)]
        value = times[block]
        if isinstance(value, list):
            taken[block] = taken.get(block, -1) + 1
            return value[taken[block] % len(value)]
        return value

    monkeypatch.setattr(workload.Workload, "compile", remembering)
    monkeypatch.setattr(timing, "sample_ms", fake)
    return times


def invocation(kernel: Kernel[Any, Any], *shapes: tuple[int, ...], direction: Any = "forward") -> Invocation[Any, Any]:
    return Invocation(kernel, tuple(operands(*(shapes or ((8,),)))), direction=direction)


def tuned(kernel: Kernel[Any, Any], *shapes: tuple[int, ...], direction: Any = "forward", **options: Any) -> Any:
    (call,) = Autotuner(QUICK, chooser=ConfigSelectorChain(), **options).tune(
        invocation(kernel, *shapes, direction=direction)
    )
    return call


class TestWinner:
    def test_the_fastest_wins(self, clock: Any) -> None:
        clock.update({64: 2.0, 32: 1.0, 16: 3.0})
        call = tuned(Blocks("t.fastest"))
        assert call.winner.config == Config(32)
        assert call.speedup == pytest.approx(2.0)
        assert [c.check for c in call.candidates] == ["passed"] * 3

    @pytest.mark.parametrize(
        ("heuristic", "other", "winner"),
        [
            (1.00, 0.99, 64),  # within two per cent: the heuristic keeps its place
            (1.00, 0.90, 32),
            ([0.8, 1.0, 1.2, 1.0], [0.75, 0.95, 1.15, 0.95], 64),  # the spread is wider than the difference
            ([1.0, 1.0, 1.01, 1.0], [0.95, 0.95, 0.96, 0.95], 32),
        ],
    )
    def test_the_heuristic_stays_unless_beaten_by_more_than_the_noise(
        self, clock: Any, heuristic: Any, other: Any, winner: int
    ) -> None:
        clock.update({64: heuristic, 32: other, 16: 9.0})
        assert tuned(Blocks("t.noise")).winner.config == Config(winner)

    def test_the_heuristic_is_a_candidate_even_if_the_space_leaves_it_out(self, clock: Any) -> None:
        clock.update({64: 1.0, 32: 2.0})
        kernel = Blocks("t.left.out")
        result = Autotuner(QUICK, chooser=ConfigSelectorChain()).tune(invocation(kernel), configs=[Config(32)])
        assert result.entries[0].winner.config == Config(64)
        assert result.entries[0].heuristic == result.entries[0].candidates[0]

    def test_a_hopeless_candidate_is_not_measured_again(self, clock: Any) -> None:
        clock.update({64: 1.0, 32: 1.1, 16: 10.0})
        counts = {c.config.block: len(c.samples_ms) for c in tuned(Blocks("t.hopeless")).candidates}
        assert counts[16] == 1 < counts[32]


class TestFailures:
    def test_what_raises_or_is_wrong_is_recorded_and_never_wins(self, clock: Any) -> None:
        clock.update({64: 5.0, 32: 1.0, 16: 1.0, 8: 1.0})
        kernel = Blocks("t.broken", blocks=(64, 32, 16, 8), raises_at_trace=(32,), wrong=(16,), raises_at_run=(8,))
        events: list[Any] = []
        call = tuned(kernel, on_event=events.append)
        assert call.winner.config == Config(64)
        by_block = {c.config.block: c for c in call.candidates}
        assert "RuntimeError: no tile of 32" in by_block[32].error
        assert isinstance(by_block[32].exception, RuntimeError)
        assert by_block[16].check == "failed"
        assert "largest error 0.001" in by_block[16].error
        assert "illegal address at 8" in by_block[8].error
        assert [e.candidate.config.block for e in failures(events)] == [32, 16, 8]

    def test_without_verification_the_wrong_one_may_win(self, clock: Any) -> None:
        clock.update({64: 5.0, 16: 1.0})
        call = tuned(Blocks("t.unverified", blocks=(64, 16), wrong=(16,)), verify=False)
        assert (call.winner.config, call.winner.check) == (Config(16), "unchecked")

    def test_a_failing_heuristic_is_replaced(self, clock: Any) -> None:
        clock.update({64: 1.0, 32: 9.0})
        assert tuned(Blocks("t.bad.heuristic", blocks=(64, 32), wrong=(64,))).winner.config == Config(32)

    @pytest.mark.parametrize("eager", [True, False])
    def test_when_all_fail_all_exceptions_come(self, eager: bool) -> None:
        kernel = Blocks("t.all.fail", blocks=(32, 16), raises_at_run=(32,), wrong=(16,))
        with pytest.raises(ExceptionGroup) as caught:
            autotune(kernel, jnp.ones(8)) if eager else tuned(kernel)
        assert len(caught.value.exceptions) == 2
        assert "illegal address at 32" in str(caught.value.exceptions[0])
        assert "largest error" in str(caught.value.exceptions[1])

    def test_a_failed_tuning_stores_nothing(self, tmp_path: Any) -> None:
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True)
        kernel = Blocks("t.nothing", blocks=(32,), wrong=(32,))
        with pytest.raises(ExceptionGroup):
            Executor(chain)(kernel, jnp.ones(8))
        assert len(chain.cache) == len(chain.persistent or ()) == 0


class TestOracle:
    def test_it_answers_while_candidates_are_compiled(self, clock: Any) -> None:
        """Neither waits for the other: each is traced in a thread of its own."""
        clock.update({64: 1.0, 32: 2.0, 16: 3.0})
        both = threading.Barrier(2, timeout=30)
        seen: set[str] = set()

        class Meeting(Blocks):
            def run(self, x: Any, *, cfg: Any) -> Any:
                self.meet("compiler")
                return super().run(x, cfg=cfg)

            def reference(self, x: Any) -> Any:
                self.meet("oracle")
                return x + 1

            def meet(self, who: str) -> None:
                if who not in seen:
                    seen.add(who)
                    both.wait()

        assert tuned(Meeting("t.oracle.beside")).winner.config == Config(64)

    def test_its_failure_is_none_of_the_candidates(self, clock: Any) -> None:
        clock.update({64: 1.0, 32: 2.0, 16: 3.0})

        class Broken(Blocks):
            def reference(self, x: Any) -> Any:
                raise RuntimeError("the oracle is out of memory")

        with pytest.raises(RuntimeError, match="the oracle is out of memory"):
            tuned(Broken("t.oracle.broken"))


class TestBudgetAndInterrupts:
    def test_a_spent_budget_leaves_the_heuristic_and_says_so(self, clock: Any) -> None:
        clock.update({64: 1.0, 32: 0.1, 16: 0.1})
        call = tuned(Blocks("t.budget"), call_budget_s=1e-9)
        assert {c.config.block: c.check for c in call.candidates} == {64: "passed", 32: "left out", 16: "left out"}
        assert not call.complete

    def test_a_call_is_given_time_for_more_than_its_heuristic(
        self, clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even shares of a small budget would decide nothing: fewer calls are tuned instead."""
        clock.update({64: 1.0, 32: 2.0, 16: 3.0})
        given: list[float] = []
        set_clock = schedule.Schedule._set_clock

        def remembering(self: Any, call: Any, seconds: float) -> None:
            given.append(seconds)
            set_clock(self, call, seconds)

        monkeypatch.setattr(schedule.Schedule, "_set_clock", remembering)
        calls = [Invocation(Blocks("t.shares"), (jnp.ones(8 + i),)) for i in range(4)]
        result = Autotuner(QUICK, chooser=ConfigSelectorChain(), budget_s=2.5 * schedule.MIN_CALL_S).tune(*calls)
        assert given[0] == pytest.approx(schedule.MIN_CALL_S)
        assert len(result.entries) == 4  # these take no time

    def test_an_interrupt_keeps_what_was_measured(self, tmp_path: Any) -> None:
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        kernel = Blocks("t.interrupt")

        def interrupt(event: Any) -> None:
            if isinstance(event, CandidateDone) and event.index == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # until the main thread has taken it

        first, second = invocation(kernel, (8,)), invocation(kernel, (16,))
        assert threading.current_thread() is threading.main_thread()
        # A shell without job control has what runs in its background ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = Autotuner(QUICK, chooser=chain, on_event=interrupt).tune(first, second)
        finally:
            signal.signal(signal.SIGINT, before)
        assert result.interrupted
        assert [entry.complete for entry in result.entries] == [False]
        assert chain.lookup(first).step in ("memory", "disk")
        assert chain.lookup(second).step == "heuristic"
        again = Autotuner(QUICK, chooser=chain).tune(first, second, reuse=True)
        assert [(entry.step, entry.complete) for entry in again] == [("measured", True)] * 2


@pytest.mark.parametrize("form", FORMS[1:])
class TestBackward:
    def test_both_forms(self, form: type[Product]) -> None:
        call = tuned(form(), (16, 8), (8, 4), direction="backward")
        assert [c.check for c in call.candidates] == ["passed"] * 3
        assert call.candidates[0].config == Config(32)

    def test_a_wrong_gradient_is_found(self, form: type[Product]) -> None:
        class Wrong(form):  # type: ignore[misc, valid-type]
            def backward(self, *args, cfg, **kwargs):
                gradients = super().backward(*args, cfg=cfg, **kwargs)
                return gradients | {"a": gradients["a"] * (1.01 if cfg.block == 16 else 1)}

            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                a, b = super().custom_vjp(primals, cfg, kwargs, cotangents)
                return a * (1.01 if cfg.block == 16 else 1), b

        if form is Recomputing:
            del Wrong.backward
        call = tuned(Wrong(f"t.wrong.{form.__name__}"), (16, 8), (8, 4), direction="backward")
        assert {c.config.block: c.check for c in call.candidates} == {32: "passed", 16: "failed", 64: "passed"}

    def test_under_vmap_with_an_argument_that_is_shared(self, form: type[Product]) -> None:
        seen: list[Any] = []
        executor = Executor(ConfigSelectorChain(autotune=True, tuner=QUICK, on_event=seen.append))
        a, b = operands((3, 16, 8), (8, 4))
        mapped = jax.vmap(jax.grad(lambda x, y: executor(form(), x, y).sum(), (0, 1)), in_axes=(0, None))
        for got, want in zip(
            mapped(a, b), jax.vmap(jax.grad(lambda x, y: (x @ y).sum(), (0, 1)), (0, None))(a, b), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-5)
        started = [event for event in seen if isinstance(event, CallStarted)]
        assert [event.inv.direction for event in started] == ["forward", "backward"]
        assert all("× 3" in event.shapes for event in started)
        assert not failures(seen)


class TestPrograms:
    @pytest.mark.parametrize("jitted", [True, False])
    def test_every_call_of_a_function_is_tuned_once(self, jitted: bool) -> None:
        chain, kernel = ConfigSelectorChain(), Pair("t.program")
        a, b = operands((8, 8), (8, 8))

        def loss(x: Any) -> Any:
            executor = Executor(chain)
            steps = jax.lax.scan(lambda c, _: (executor(kernel, c, b), None), x, None, length=3)[0]
            return (executor(kernel, steps, b) + executor(kernel, x, b, cfg=Config(7))).sum()

        step = jax.grad(loss)
        result = tune(jax.jit(step) if jitted else step, a, tuner=QUICK, chooser=chain)
        assert sorted(entry.direction for entry in result) == ["backward", "forward"]
        assert all(chain.lookup(inv).step == "memory" for inv in [invocation(kernel, (8, 8), (8, 8))])

    def test_shapes_are_enough(self) -> None:
        struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        result = tune(lambda a: Product("t.structs")(a, a), struct, tuner=QUICK, chooser=ConfigSelectorChain())
        assert len(result) == 1

    def test_a_traced_function_takes_the_winners(self, clock: Any) -> None:
        clock.update({64: 9.0, 32: 1.0, 16: 9.0})
        chain, kernel = ConfigSelectorChain(), Blocks("t.retrace")
        step = jax.jit(lambda x: Executor(chain)(kernel, x))
        step(jnp.ones(8))
        assert [s.config for s in configs_of(step)] == [Config(64)]
        tune(step, jnp.ones(8), tuner=QUICK, chooser=chain)
        step(jnp.ones(8))
        assert [s.config for s in configs_of(step)] == [Config(32)]

    def test_results_as_contexts_decide_inside_and_only_there(self, clock: Any) -> None:
        clock.update({64: 9.0, 32: 1.0, 16: 9.0})
        kernel, chain = Blocks("t.context"), ConfigSelectorChain()
        result = Autotuner(QUICK, chooser=ConfigSelectorChain()).tune(invocation(kernel))
        executor = Executor(chain)
        with result:
            assert executor.choose_config(kernel, jnp.ones(8)) == Config(32)
            with AutotuningResult():
                assert executor.choose_config(kernel, jnp.ones(8)) == Config(32)
        assert executor.choose_config(kernel, jnp.ones(8)) == Config(64)


def configs_of(step: Any) -> list[Any]:
    return [parse_label(text) for text in extract_labels_from_hlo_text(step.lower(jnp.ones(8)).as_text())]


@pytest.fixture(scope="module")
def result() -> AutotuningResult:
    kernel = Blocks("t.results", blocks=(64, 32, 16), wrong=(16,))
    return Autotuner(QUICK, chooser=ConfigSelectorChain()).tune(invocation(kernel), invocation(kernel, (4,)))


class TestResults:
    def test_json_round_trip(self, result: AutotuningResult) -> None:
        again = AutotuningResult.from_json(result.to_json())
        assert again == result
        assert again.configs == result.configs
        assert again.to_json() == result.to_json()

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "entries": 3}'])
    def test_other_text_is_a_value_error(self, text: str) -> None:
        with pytest.raises(ValueError):
            AutotuningResult.from_json(text)

    def test_merging_takes_the_right_one_where_both_know_a_call(self, result: AutotuningResult) -> None:
        first, second = (AutotuningResult((entry,), device="d") for entry in result.entries)
        assert set((first | second).configs) == set(result.configs)
        other = AutotuningResult((dataclasses.replace(result.entries[0], chosen=1),))
        assert (first | other).entries == other.entries
        assert (other | first).entries == first.entries
        with pytest.raises(TypeError):
            first | 3  # type: ignore[operator]

    def test_nothing_is_measured_twice_with_reuse(self, tmp_path: Any) -> None:
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        kernel = Blocks("t.reuse", wrong=(16,))
        first = Autotuner(QUICK, chooser=chain).tune(invocation(kernel))
        fresh = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        again = Autotuner(QUICK, chooser=fresh).tune(invocation(kernel), reuse=True)
        assert again.entries[0].step == "disk"
        assert again.entries[0].candidates == first.entries[0].candidates


def test_recorded_invocations(clock: Any) -> None:
    clock.update({64: 9.0, 32: 1.0, 16: 9.0})
    kernel = Blocks("t.recorded")
    result = autotune_recorded([invocation(kernel).abstract()], tuner=QUICK)
    assert [entry.winner.config for entry in result] == [Config(32)]
    assert kernel(jnp.ones(8)).shape == (8,)


def test_autotune_measures_the_given_arrays_and_later_calls_use_the_winner(clock: Any) -> None:
    clock.update({64: 9.0, 32: 1.0, 16: 9.0})
    kernel = Blocks("t.autotune")
    assert autotune(kernel, jnp.ones(8), num_warmup=0, num_iters=1) == Config(32)
    assert default_executor().choose_config(kernel, jnp.ones(8)) == Config(32)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda k: Tuner(warmup=-1), ValueError),
        (lambda k: Tuner(iters=0), ValueError),
        (lambda k: Tuner(iters=1.5), TypeError),
        (lambda k: autotune(k, jnp.ones(8), num_iters=0), ValueError),
        (lambda k: Autotuner(budget_s=0), ValueError),
        (lambda k: Autotuner(3), TypeError),
        (lambda k: Autotuner(chooser=ConfigSelectorChain()).tune(k), TypeError),
    ],
)
def test_bad_arguments_are_named(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"=|invocations"):
        call(Blocks("t.bad"))
