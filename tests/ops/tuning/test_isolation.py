"""Candidates that crash, hang, leak or lie, in a process of their own."""

import dataclasses
import logging
import os
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.draws import array
from tests.support.hostile import SIZE, Halting, Hostile, Way
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, PersistentCache, Tuner
from tilewright.ops.tuning import isolation, worker
from tilewright.ops.tuning.bench import CandidateError, OutOfTimeError, Trial
from tilewright.ops.tuning.events import CandidateDone
from tilewright.ops.utils.known_devices import find_device

X = array(np.linspace(-1.0, 1.0, SIZE * SIZE).reshape(SIZE, SIZE), jnp.float32)
ISOLATED = Tuner(0, 2, isolation="process", timeout_s=15.0)


def tuned(kernel: Hostile, tuner: Tuner = ISOLATED, **options: Any) -> Any:
    options.setdefault("chooser", ConfigSelectorChain())
    (call,) = Autotuner(tuner, **options).tune(Invocation(kernel, (X,)))
    return call


def errors(call: Any) -> dict[str, str]:
    return {candidate.config.name: candidate.error for candidate in call.candidates}


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[isolation.Worker]:
    """Every worker that is started."""
    made: list[isolation.Worker] = []

    class Counted(isolation.Worker):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(isolation, "Worker", Counted)
    return made


def have_ended(workers: list[isolation.Worker]) -> bool:
    return all(each._process.poll() is not None for each in workers)


def test_everything_that_a_candidate_may_not_do(
    workers: list[isolation.Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(isolation, "LEAK_LIMIT", 200 << 20)
    events: list[Any] = []
    ways = ("right", "leak", "abort", "nan", "sleep", "wrong in one tile", "exit", "raise", "also right")
    with caplog.at_level(logging.INFO, "tilewright"):
        call = tuned(Hostile(*ways), dataclasses.replace(ISOLATED, timeout_s=12.0), on_event=events.append)
    said = errors(call)
    assert {name for name, error in said.items() if not error} == {"right", "leak", "also right"}
    assert "killed by SIGABRT" in said["abort"]
    assert "<b>dying</b> of a deliberate abort" in said["abort"]
    assert "did not answer within 12 s" in said["sleep"]
    assert "exited with code 7" in said["exit"]
    assert "ValueError: <script>a deliberate error</script>" in said["raise"]
    assert "non-finite" in said["nan"]
    assert "largest error" in said["wrong in one tile"]
    assert call.complete
    assert not call.winner.error
    assert "is replaced" in caplog.text
    failed = [e.candidate.config.name for e in events if isinstance(e, CandidateDone) and e.candidate.failed]
    assert failed == [n for n in ways if said[n]]
    assert len(workers) > 3
    assert have_ended(workers)  # what hung, too
    # This process has not noticed anything.
    assert float((X + 1).sum()) == pytest.approx(float(X.sum()) + SIZE * SIZE)


def test_what_leaks_is_measured_to_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "LEAK_LIMIT", 200 << 20)
    call = tuned(Hostile("leak", "raise"))  # the heuristic is never dropped, however slow
    assert call.winner.config == Way("leak")
    assert len(call.winner.samples_ms) == 2
    assert not call.winner.error


@pytest.mark.parametrize("way", ["lose", "lose later"])
def test_a_lost_device_is_the_fault_of_one_alone(way: str, caplog: pytest.LogCaptureFixture):
    tuner = dataclasses.replace(ISOLATED, iters=6, timer=Halting())
    with caplog.at_level(logging.INFO, "tilewright"):
        call = tuned(Hostile("right", way, "also right"), tuner)
    assert "has lost its device" in caplog.text
    assert {name for name, error in errors(call).items() if error} == {way}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in errors(call)[way]


@pytest.mark.parametrize(("last", "processes"), [("right", 1), ("abort", 2), ("lose", 2)])
def test_calls_share_a_process_as_long_as_it_is_well(last: str, processes: int, workers: list[isolation.Worker]):
    kernel = Hostile("right", "also right", last)
    calls = [Invocation(kernel, (X[:rows],)) for rows in (64, 32, 16)]
    tuner = dataclasses.replace(ISOLATED, timer=Halting())
    result = Autotuner(tuner, chooser=ConfigSelectorChain()).tune(*calls[: 3 if processes == 1 else 1], calls[0])
    for call in result:
        assert errors(call)["right"] == errors(call)["also right"] == ""
    assert len(workers) == processes
    assert have_ended(workers)  # none outlives the tuning


def test_memory_is_counted_in_bytes():
    before = worker.held_bytes()
    held = np.ones(512 << 20, np.uint8)
    assert worker.held_bytes() - before > 256 << 20  # the rest is what other threads may give back meanwhile
    del held


def test_a_task_that_cannot_be_begun_is_said_and_the_process_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "reason_not_sendable", lambda task: "")
    monkeypatch.setattr(isolation.pickle, "dumps", lambda task: b"nonsense")
    with pytest.raises(RuntimeError, match=r"UnpicklingError|pickle"):
        tuned(Hostile("right"))


class Slow(isolation.Worker):
    """Answers nothing, and is ended when the time is."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.held_bytes = self.initial_bytes = 0

    def begin(self, task: Any, timeout_s: float) -> None:
        pass

    def ask(self, timeout_s: float, *request: Any) -> Any:
        self.asked.append(request)
        if request[0] == "start":
            return Trial("passed", "", 1.0)
        time.sleep(timeout_s)
        raise isolation.WorkerDied(f"it did not answer within {timeout_s:.3g} s")


@pytest.mark.parametrize("late", [True, False], ids=["before it is asked", "while it is asked"])
@pytest.mark.parametrize("request_", ["sample_ms", "recheck"])
def test_the_end_of_the_time_is_no_fault_of_a_candidate(request_: str, late: bool):
    idle, slow = isolation.IdleWorker(), Slow()
    idle.give_back(slow)
    deadline = time.monotonic() + 0.3
    bench = isolation.ProcessBench(None, timeout_s=60.0, idle=idle, deadline=deadline)  # type: ignore[arg-type]
    assert not bench.start(0).error
    if late:
        time.sleep(max(0.0, deadline - time.monotonic()))
    with pytest.raises(OutOfTimeError):
        getattr(bench, request_)(0)
    assert len(slow.asked) == (1 if late else 2)


def test_who_does_not_answer_within_its_own_time_is_at_fault():
    idle = isolation.IdleWorker()
    idle.give_back(Slow())
    bench = isolation.ProcessBench(None, timeout_s=0.2, idle=idle, deadline=time.monotonic() + 60)  # type: ignore[arg-type]
    assert not bench.start(0).error
    with pytest.raises(CandidateError, match="is no more") as caught:
        bench.recheck(0)
    assert not isinstance(caught.value, OutOfTimeError)


def test_a_tpu_belongs_to_this_process(workers: list[isolation.Worker]):
    tpu = dataclasses.replace(find_device("TPU v6e").device, present=True)
    call = Invocation(Hostile("right", "raise"), (X,), device=tpu)
    (found,) = Autotuner(Tuner(0, 2, isolation="auto"), chooser=ConfigSelectorChain()).tune(call)
    assert found.winner.config == Way("right")
    assert not workers
    with pytest.raises(ValueError, match="a TPU v6 lite belongs to one process"):
        Autotuner(ISOLATED, chooser=ConfigSelectorChain()).tune(call)
    assert not workers


def test_every_candidate_may_fail():
    with pytest.raises(ExceptionGroup) as caught:
        tuned(Hostile("exit", "raise"))
    assert [str(e)[:20] for e in caught.value.exceptions] == ["the process that ran", "ValueError: <script>"]


@pytest.mark.parametrize("said_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_broken_clock_measures_nothing(said_ms: float):
    tuner = dataclasses.replace(ISOLATED, isolation="none", timer=Halting(said_ms))
    with pytest.raises(ExceptionGroup) as caught:
        tuned(Hostile("right", "also right"), tuner)
    assert all("the clock is broken" in str(error) for error in caught.value.exceptions)


def test_a_timer_is_taken_along():
    call = tuned(Hostile("right", "also right"), dataclasses.replace(ISOLATED, timer=Halting(3.0)))
    assert [candidate.time_ms for candidate in call.candidates] == [3.0, 3.0]
    assert call.winner.config == Way("right")


def test_arrays_and_the_results_are_those_of_this_process(tmp_path: Any):
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    call = tuned(Hostile("right", "nan"), chooser=chain)
    kept = PersistentCache(tmp_path).get(call.key)
    assert kept == Way("right")
    inputs = ((X,), {})
    (given,) = Autotuner(ISOLATED, chooser=chain).tune(Invocation(Hostile("right"), (X,)), inputs=inputs)
    assert given.winner.check == "passed"


class Hidden(Hostile):
    """Has something that no other process can be given."""

    def __init__(self) -> None:
        super().__init__("right")
        self.secret = lambda: os.getpid()


def test_what_cannot_be_sent_is_said():
    with pytest.raises(ValueError, match=r"tests\.hostile cannot be tuned in another process: it cannot be pickled"):
        tuned(Hidden())

    class Local(Hostile):
        op_name = "tests.local"

    with pytest.raises(ValueError, match="Local cannot be imported there"):
        tuned(Local("right"))
    assert tuned(Local("right"), dataclasses.replace(ISOLATED, isolation="auto")).winner.config == Way("right")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"isolation": "thread"}, ValueError),
        ({"search": "genetic"}, ValueError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": float("inf")}, ValueError),
        ({"timeout_s": True}, ValueError),
        ({"timer": 3}, TypeError),
    ],
)
def test_a_tuner_checks_its_fields(fields: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=next(iter(fields))):
        Tuner(**fields)
