"""Tuning when something goes wrong around its candidates: the oracle, and the time."""

import threading
from typing import Any

import pytest

from tests.ops.kernel.samples import A, B, Config, Product
from tests.support.clock import Clock
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.tuning import schedule

TIMES = {64: 1.0, 32: 2.0, 16: 3.0}


def tuned(kernel: Product, *shapes: Any, **options: Any) -> Any:
    tuner = Autotuner(Tuner(warmup=0, iters=3), chooser=ConfigSelectorChain(), **options)
    return tuner.tune(*(Invocation(kernel, (a, B)) for a in shapes or (A,)))


class TestOracle:
    def test_it_answers_while_candidates_are_compiled(self, clock: Clock) -> None:
        """Neither waits for the other: each is traced in a thread of its own."""
        clock.update(TIMES)
        both = threading.Barrier(2, timeout=30)
        seen: set[str] = set()

        class Meeting(Product):
            def run(self, a: Any, b: Any, *, cfg: Any) -> Any:
                self.meet("compiler")
                return super().run(a, b, cfg=cfg)

            def reference(self, a: Any, b: Any) -> Any:
                self.meet("oracle")
                return a @ b

            def meet(self, who: str) -> None:
                if who not in seen:
                    seen.add(who)
                    both.wait()

        (call,) = tuned(Meeting("tests.tuning.oracle.beside"))
        assert call.winner.config == Config(64)

    def test_its_failure_is_none_of_the_candidates(self, clock: Clock) -> None:
        clock.update(TIMES)

        class Broken(Product):
            def reference(self, a: Any, b: Any) -> Any:
                raise RuntimeError("the oracle is out of memory")

        with pytest.raises(RuntimeError, match="the oracle is out of memory"):
            tuned(Broken("tests.tuning.oracle.broken"))


class TestBudgetAndInterrupts:
    def test_a_call_is_given_time_for_more_than_its_heuristic(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even shares of a small budget would decide nothing: fewer calls are tuned instead."""
        clock.update(TIMES)
        given: list[float] = []
        set_clock = schedule.Schedule._set_clock

        def remembering(self: Any, call: Any, seconds: float) -> None:
            given.append(seconds)
            set_clock(self, call, seconds)

        monkeypatch.setattr(schedule.Schedule, "_set_clock", remembering)
        calls = [A[:rows] for rows in (1, 2, 3, 4)]
        result = tuned(Product("tests.tuning.shares"), *calls, budget_s=2.5 * schedule.MIN_CALL_S)
        assert given[0] == pytest.approx(schedule.MIN_CALL_S)
        assert len(result.entries) == 4  # these take no time
