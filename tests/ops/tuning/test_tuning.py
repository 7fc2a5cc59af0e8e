"""Tuning when something goes wrong: what may win then, and what is kept."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.ops.kernel.samples import Config
from tests.support.clock import Clock
from tilewright.ops import (
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
)
from tilewright.ops.tuning import schedule
from tilewright.ops.tuning.events import CandidateDone

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


def tuned(kernel: Kernel[Any, Any], **options: Any) -> Any:
    tuner = Autotuner(QUICK, chooser=ConfigSelectorChain(), **options)
    (call,) = tuner.tune(Invocation(kernel, (jnp.ones(8),)))
    return call


class TestFailures:
    def test_what_raises_or_is_wrong_is_recorded_and_never_wins(self, clock: Clock) -> None:
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

    def test_a_failing_heuristic_is_replaced(self, clock: Clock) -> None:
        clock.update({64: 1.0, 32: 9.0})
        assert tuned(Blocks("t.bad.heuristic", blocks=(64, 32), wrong=(64,))).winner.config == Config(32)

    def test_a_failed_tuning_stores_nothing(self, tmp_path: Any) -> None:
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True)
        kernel = Blocks("t.nothing", blocks=(32,), wrong=(32,))
        with pytest.raises(ExceptionGroup):
            Executor(chain)(kernel, jnp.ones(8))
        assert len(chain.cache) == len(chain.persistent or ()) == 0


class TestOracle:
    def test_it_answers_while_candidates_are_compiled(self, clock: Clock) -> None:
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

    def test_its_failure_is_none_of_the_candidates(self, clock: Clock) -> None:
        clock.update({64: 1.0, 32: 2.0, 16: 3.0})

        class Broken(Blocks):
            def reference(self, x: Any) -> Any:
                raise RuntimeError("the oracle is out of memory")

        with pytest.raises(RuntimeError, match="the oracle is out of memory"):
            tuned(Broken("t.oracle.broken"))


class TestBudgetAndInterrupts:
    def test_a_spent_budget_leaves_the_heuristic_and_says_so(self, clock: Clock) -> None:
        clock.update({64: 1.0, 32: 0.1, 16: 0.1})
        call = tuned(Blocks("t.budget"), call_budget_s=1e-9)
        assert {c.config.block: c.check for c in call.candidates} == {64: "passed", 32: "left out", 16: "left out"}
        assert not call.complete

    def test_a_call_is_given_time_for_more_than_its_heuristic(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
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
