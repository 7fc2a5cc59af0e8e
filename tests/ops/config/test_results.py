"""What a tuning found, as a value: merged, entered, written down and read back."""

import asyncio
import dataclasses
import json

import jax
import pytest

from tests.ops.kernel.samples import A, B, Config, Pair, Product, watching
from tests.support.threads import together
from tilewright.cli.report.calls import ReportedCall
from tilewright.ops import (
    Autotuner,
    AutotuningResult,
    Candidate,
    ConfigSelectorChain,
    Executor,
    Invocation,
    TunedCall,
    Tuner,
)


def call(key, cfg, **kwargs):
    candidates = (Candidate(Config(64), (2.0, 3.0), "passed", heuristic=True), Candidate(cfg, (1.0,)))
    return TunedCall("op", "forward", key, "shapes", candidates, 1, **kwargs)


@dataclasses.dataclass(frozen=True)
class Named:
    """A config of a backend."""

    backend: str
    block: int


@pytest.fixture(scope="module")
def tuned():
    inv = Invocation(Pair("tests.results"), (A, B))
    return Autotuner(Tuner(0, 1), chooser=ConfigSelectorChain()).tune(inv, inv.backward())


class TestValues:
    def test_of_a_call(self):
        found = call("k", Config(1))
        assert found.winner.config == Config(1)
        assert found.heuristic.config == Config(64)
        assert found.speedup == 2.5
        assert Candidate(Config(1)).time_ms is None
        assert not Candidate(Config(1)).eligible
        assert not Candidate(Config(1), (1.0,), error="x").eligible

    def test_its_essence_has_the_fastest_of_every_implementation(self):
        """And the heuristic, however slow; whatever is wrong, or was not measured, is left out."""
        found = [("xla", 2.0), ("xla", 1.5), ("triton", 4.0), ("triton", 3.0), ("cuda", 0.5), ("xla", 1.0)]
        candidates = [
            Candidate(Named(name, block), (ms,), "failed" if name == "cuda" else "passed", heuristic=block == 0)
            for block, (name, ms) in enumerate(found)
        ]
        candidates[4] = dataclasses.replace(candidates[4], error="wrong")
        compact = TunedCall("op", "forward", "k", "shapes", (*candidates, Candidate(Named("fa4", 9))), 5).compact()
        assert [candidate.config.block for candidate in compact.candidates] == [0, 3, 5]
        assert compact.winner.config == Named("xla", 5)

    def test_regret_is_over_the_fastest_that_is_right(self):
        wrong, broken = Candidate(Config(2), (0.5,), "failed", "wrong"), Candidate(Config(3), (float("nan"),))
        right = Candidate(Config(4), (0.8,), "passed")
        found = call("k", Config(1))
        assert (found.fastest, found.regret_ms, found.regret) == (found.winner, 0.0, 0.0)
        found = dataclasses.replace(found, candidates=(*found.candidates, wrong, broken, right))
        assert found.fastest == right
        assert found.regret_ms == pytest.approx(0.2)
        assert found.regret == pytest.approx(0.25)
        reported = ReportedCall(found, "", {}, "")
        assert (reported.call.fastest, reported.call.regret_ms) == (found.fastest, found.regret_ms)
        assert dataclasses.replace(found, chosen=2).regret_ms is None
        assert dataclasses.replace(found, chosen=2).regret is None

    def test_of_a_tuning(self, tuned):
        assert len(tuned) == 2
        assert [e.direction for e in tuned] == ["forward", "backward"]
        assert set(tuned.configs) == {e.key for e in tuned.entries}
        assert tuned.device
        assert "jax" in tuned.toolchain
        assert "tests.results backward" in repr(tuned)
        assert repr(AutotuningResult()) == "AutotuningResult(0 calls on no device: )"


class TestMerging:
    def test_the_right_one_counts(self):
        left = AutotuningResult((call("a", Config(1)), call("b", Config(2))), device="cpu", toolchain={"jax": "1"})
        right = AutotuningResult((call("b", Config(3)), call("c", Config(4))), device="cpu", interrupted=True)
        merged = left | right
        assert merged.configs == {"a": Config(1), "b": Config(3), "c": Config(4)}
        assert merged.interrupted
        assert merged.toolchain == {"jax": "1"}
        assert left | AutotuningResult() == left

    def test_with_something_else_is_an_error(self):
        with pytest.raises(TypeError):
            AutotuningResult() | {}


class TestContext:
    def test_makes_the_winners_count(self):
        kernel = Product("tests.results.context")
        inv = Invocation(kernel, (A, B))
        result = AutotuningResult((call(inv.key, Config(5)),))
        executor = Executor(ConfigSelectorChain())
        function = jax.jit(lambda a: executor(kernel, a, B))
        function(A)
        with result as entered, watching() as seen:
            assert entered is result
            executor(kernel, A, B)
            function(A)
            with result:
                function(A)
            assert executor.explain(kernel, A, B, quiet=True).step == "overlay"
        assert {s.cfg for s in seen} >= {Config(5)}
        assert executor.choose_config(kernel, A, B) == Config(64)
        with result, watching() as seen:
            function(A)
        assert seen == []  # the program of the first time is still there
        assert executor.choose_config(kernel, A, B) == Config(64)

    def test_in_threads_and_tasks_at_once(self):
        kernel = Product("tests.results.threads")
        result = AutotuningResult((call(Invocation(kernel, (A, B)).key, Config(5)),))
        executor, found = Executor(ConfigSelectorChain()), []

        def work(i):
            for _ in range(10 + i):
                with result:
                    found.append(executor.choose_config(kernel, A, B))
                found.append(executor.choose_config(kernel, A, B))

        together(work, range(4))
        assert found.count(Config(5)) == found.count(Config(64)) == 46

        async def task(pauses):
            with result:
                for _ in range(pauses):
                    await asyncio.sleep(0)
                inside = executor.choose_config(kernel, A, B)
            return inside, executor.choose_config(kernel, A, B)

        async def main():
            return await asyncio.gather(*(task(pauses) for pauses in (3, 1, 2)))

        assert asyncio.run(main()) == [(Config(5), Config(64))] * 3


class TestJson:
    def test_round_trip(self, tuned):
        text = tuned.to_json()
        again = AutotuningResult.from_json(text)
        assert again == tuned
        assert again.configs == tuned.configs
        assert AutotuningResult.from_json(again.to_json()).to_json() == text
        assert json.loads(text)["entries"][0]["candidates"][0]["config"]

    def test_exceptions_become_messages(self):
        failed = Candidate(Config(1), error="ValueError: no", exception=ValueError("no"))
        result = AutotuningResult((dataclasses.replace(call("k", Config(2)), candidates=(failed,), chosen=0),))
        (candidate,) = AutotuningResult.from_json(result.to_json()).entries[0].candidates
        assert candidate.error == "ValueError: no"
        assert candidate.exception is None

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "3", "null", "{}", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "entries": [{}]}'],
    )
    def test_anything_else_is_an_error(self, text):
        with pytest.raises(ValueError, match=r"AutotuningResult|schema"):
            AutotuningResult.from_json(text)

    def test_a_type_that_cannot_be_found_is_an_error(self, tuned):
        with pytest.raises(ValueError, match=r"tests\.ops\.kernel\.samples:Gone"):
            AutotuningResult.from_json(tuned.to_json().replace("samples:Config", "samples:Gone"))

    @pytest.mark.parametrize("damage", [{"chosen": 99}, {"chosen": "0"}, {"candidates": []}, {"key": 3}])
    def test_values_are_checked(self, tuned, damage):
        said = json.loads(tuned.to_json())
        said["entries"][0] |= damage
        with pytest.raises(ValueError, match=r"key=3|chosen="):
            AutotuningResult.from_json(json.dumps(said))
