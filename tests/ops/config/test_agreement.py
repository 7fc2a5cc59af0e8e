"""Choices that several processes share, with a store in place of JAX's coordination service."""

import contextlib
import dataclasses
import logging
import threading
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.errors import AgreementError
from tilewright.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    overlay_cache,
    policy_override,
)
from tilewright.ops.config import agreement, job_store
from tilewright.ops.config.context import inspection_only
from tilewright.ops.utils.known_devices import KNOWN_DEVICES


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    size: Any


class Adds(Kernel[Step, jax.Array]):
    """Adds the number in its config, so that its result tells which config ran."""

    def run(self, x, *, cfg):
        return x + cfg.size

    def heuristic_cfg(self, inv):
        return Step(0)


class Store:
    """What a job's processes write and read, and the errors of JAX's client."""

    def __init__(self):
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []
        self.down = ""

    def _reach(self, name):
        self.asked.append(name)
        if self.down:
            raise jax.errors.JaxRuntimeError(f"{self.down}: socket closed")

    def key_value_set(self, name, text, allow_overwrite=False):
        self._reach(name)
        if name in self.texts and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {name} already exists.")
        self.texts[name] = text

    def key_value_try_get(self, name):
        self._reach(name)
        if name not in self.texts:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {name} not found.")
        return self.texts[name]

    def blocking_key_value_get(self, name, timeout_in_ms):
        self._reach(name)
        until = time.monotonic() + timeout_in_ms / 1e3
        while name not in self.texts:
            if time.monotonic() >= until:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {name}")
            time.sleep(1e-3)
        return self.texts[name]

    def key_value_delete(self, name):
        self.texts.pop(name, None)


class Job:
    """Lets this process be each process of a job in turn."""

    def __init__(self, monkeypatch):
        self.store, self.index, self.memories = Store(), 0, {}
        state = types.SimpleNamespace(client=self.store, num_processes=3)
        monkeypatch.setattr(job_store, "distributed", types.SimpleNamespace(global_state=state))
        monkeypatch.setattr(agreement, "_processes_with", CachedList((0, 1, 2)))
        monkeypatch.setattr(agreement, "POLL_S", 0.01)
        monkeypatch.setattr(jax, "process_index", lambda: self.index)
        monkeypatch.setenv("TILEWRIGHT_AGREE_TIMEOUT_S", "0.05")
        self.state, self._monkeypatch = state, monkeypatch

    @contextlib.contextmanager
    def process(self, index):
        self.index = index
        self._monkeypatch.setattr(agreement, "_MEMORY", self.memories.setdefault(index, agreement._Memory()))
        yield


class CachedList:
    def __init__(self, processes):
        self.processes = processes

    def __call__(self, kind, name):
        return self.processes

    def cache_clear(self):
        pass


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


ADDS = Adds("tests.agreement.adds")


def inv_of(size=3, **fields):
    return Invocation(ADDS, (jax.ShapeDtypeStruct((size,), jnp.float32),), **fields)


def chain_of(number=None, inv=None, **options):
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), **options)
    if number is not None:
        chain.cache.put((inv or inv_of()).key, Step(number))
    return chain


def test_others_follow_the_first_process_and_say_so_once(job, caplog):
    chains = [chain_of(10), chain_of(11), chain_of(10)]
    with caplog.at_level(logging.WARNING):
        for index in (0, 1, 2):
            with job.process(index):
                found = [chains[index].choose(inv_of()) for _ in range(3)]
                assert [(s.config.size, s.step) for s in found] == [(10, "agreed")] * 3
                assert found[0].detail == found[2].detail == "by process 0, whose choice came from: memory"
                assert chains[index].lookup(inv_of()).config == Step(10)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "tests.agreement.adds (forward) for f32[3]" in warning
    assert "also in process 1" in warning
    assert "by size=10, the choice of process 0 (from: memory)" in warning
    assert "would have chosen size=11 (from: memory)" in warning


def test_a_decided_call_asks_nobody_again_and_no_other_job_does(job):
    with job.process(0):
        chain_of(10).choose(inv_of())
    with job.process(1):
        chain = chain_of(11)
        chain.choose(inv_of())
        asked = len(job.store.asked)
        assert chain.choose(inv_of()).config == chain.lookup(inv_of()).config == Step(10)
        assert len(job.store.asked) == asked
        job.state.client = other = Store()  # jax.distributed was shut down and initialised again
        assert chain.lookup(inv_of()).config == Step(11)
        job.state.client, job.state.num_processes = other, 1
        assert chain.choose(inv_of()) == chain.lookup(inv_of())
        assert other.asked == []


def test_directions_shapes_and_kinds_of_devices_are_decided_separately(job):
    kinds = [KNOWN_DEVICES[name] for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")]
    here = inv_of().target
    targets = [dataclasses.replace(here, name=str(i), fingerprint=f"cpu:{i}") for i in range(len(kinds))]
    calls = [inv_of(), inv_of(4), inv_of().backward(), *(inv_of(device=target) for target in targets)]
    assert len({agreement.Topic(each, 0).name for each in calls}) == len(calls)
    # Hosts of one kind differ in the number of cores that a process may use.
    cores = dataclasses.replace(here, fingerprint="cpu:x86_64:another:64")
    assert agreement.Topic(inv_of(device=cores), 0).name == agreement.Topic(inv_of(), 0).name


def test_the_leader_is_the_first_process_that_runs_the_program(job, monkeypatch):
    def devices(*processes):
        return lambda: [types.SimpleNamespace(process_index=p) for p in processes]

    with job.process(1):
        assert agreement.leader_of(inv_of()) == 0
        with agreement.run_by(devices(2, 1)):
            assert agreement.leader_of(inv_of()) == 1
        with agreement.run_by(devices(1, 1)):
            assert agreement.leader_of(inv_of()) is None
        with agreement.run_by(devices(0, 2)):  # not run here
            assert agreement.leader_of(inv_of()) is None
        with agreement.run_by(lambda: None):
            assert agreement.leader_of(inv_of()) == 0
        monkeypatch.setattr(agreement, "_processes_with", CachedList((1, 2)))  # process 0 has other devices
        assert agreement.leader_of(inv_of()) == 1
        absent = dataclasses.replace(inv_of().target, present=False)
        assert agreement.leader_of(inv_of(device=absent)) is None


def test_a_program_of_one_process_chooses_for_itself(job):
    with job.process(0):
        chain_of(10).choose(inv_of())
    with job.process(1), agreement.run_by(lambda: [types.SimpleNamespace(process_index=1)]):
        assert chain_of(11).choose(inv_of()).config == Step(11)


@pytest.mark.parametrize("how", ["policy", "environment"])
def test_each_process_chooses_for_itself_if_asked(job, monkeypatch, how):
    with job.process(0):
        chain_of(10).choose(inv_of())
    with job.process(1):
        chain = chain_of(11)
        assert chain.choose(inv_of()).config == Step(10)
        if how == "environment":
            monkeypatch.setenv("TILEWRIGHT_AGREE", "0")
        with policy_override(agree=False) if how == "policy" else contextlib.nullcontext():
            assert chain.choose(inv_of()).config == chain.lookup(inv_of()).config == Step(11)
        with policy_override(agree=True):
            assert chain.choose(inv_of()).config == Step(10)


@pytest.mark.parametrize("text", ["soon", "0", "-1"])
def test_a_timeout_that_is_no_time_is_an_error(job, monkeypatch, text):
    monkeypatch.setenv("TILEWRIGHT_AGREE_TIMEOUT_S", text)
    with job.process(1), pytest.raises(ValueError, match=r"TILEWRIGHT_AGREE_TIMEOUT_S=.* positive number of seconds"):
        chain_of(11).choose(inv_of())


def test_a_service_that_does_not_answer_is_an_error_at_once(job, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_AGREE_TIMEOUT_S", "100")
    job.store.down = "UNAVAILABLE"
    for index in (0, 1):
        with job.process(index), pytest.raises(AgreementError, match=r"UNAVAILABLE: socket closed.* process 0"):
            chain_of(11).choose(inv_of())


class Tuned(ConfigSelectorChain):
    """A chain that is told what a tuning finds."""

    def __init__(self, number, during=lambda: None):
        super().__init__(policy=AutotunePolicy(allow_autotune=True))
        self.number, self.during, self.count = number, during, 0

    @contextlib.contextmanager
    def measures(self, monkeypatch):
        def measure(inv, chain, policy):
            self.count += 1
            self.during()
            winner = types.SimpleNamespace(config=Step(self.number), time_ms=1.0)
            return types.SimpleNamespace(interrupted=False, entries=[types.SimpleNamespace(winner=winner)])

        from tilewright.ops.config import selection

        with monkeypatch.context() as patch:
            patch.setattr(selection, "MEASURE", types.SimpleNamespace(function=measure))
            yield


def test_only_the_leader_measures_and_the_others_wait_for_its_tuning(job, monkeypatch, caplog):
    zero, one = Tuned(5), Tuned(6)
    name = agreement.Topic(inv_of(), 0).name
    zero.during = lambda: announced.append(f"{name}/measuring" in job.store.texts)
    announced: list[bool] = []
    with job.process(0), zero.measures(monkeypatch):
        assert zero.choose(inv_of()).config == Step(5)
    assert announced == [True]
    with job.process(1), one.measures(monkeypatch), caplog.at_level(logging.WARNING):
        assert one.choose(inv_of()).config == Step(5)
    assert (zero.count, one.count) == (1, 0)
    assert caplog.records == []  # a guess may differ from a measurement


def test_an_announced_tuning_is_waited_for_longer(job, monkeypatch):
    name = agreement.Topic(inv_of(), 0).name
    job.store.texts[f"{name}/measuring"] = "1"
    with job.process(0):
        text = agreement._payload(chain_of(5).lookup(inv_of()))
    threading.Timer(0.3, lambda: job.store.texts.update({name: text})).start()
    with job.process(1):
        monkeypatch.setenv("TILEWRIGHT_AGREE_TUNING_S", "0.1")
        with pytest.raises(AgreementError, match=r"process 0 has been measuring .* TILEWRIGHT_AGREE_TUNING_S"):
            chain_of().choose(inv_of())
        monkeypatch.setenv("TILEWRIGHT_AGREE_TUNING_S", "20")
        assert chain_of().choose(inv_of()).config == Step(5)


def test_a_tuning_that_fails_is_not_waited_for_any_longer(job, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_AGREE_TUNING_S", "100")
    announced = f"{agreement.Topic(inv_of(), 0).name}/measuring"
    job.store.texts[announced] = "1"
    threading.Timer(0.3, lambda: job.store.texts.clear()).start()
    began = time.monotonic()
    with job.process(1), pytest.raises(AgreementError, match="process 0 did not decide"):
        chain_of().choose(inv_of())
    assert 0.2 < time.monotonic() - began < 10


def test_a_tuning_that_fails_is_no_longer_announced(job, monkeypatch):
    def fail():
        raise KeyboardInterrupt

    zero = Tuned(5, fail)
    with job.process(0), zero.measures(monkeypatch), pytest.raises(KeyboardInterrupt):
        zero.choose(inv_of())
    assert job.store.texts == {}


def test_a_tuning_after_the_decision_is_for_the_next_job(job, caplog):
    with job.process(0), caplog.at_level(logging.WARNING):
        chain = chain_of(10)
        chain.choose(inv_of())
        chain.store(inv_of(), Step(12), (), 1.0, complete=True)
        assert chain.choose(inv_of()).config == chain.lookup(inv_of()).config == Step(10)
        assert chain.cache.get(inv_of().key) == Step(12)
    assert "the result is used from the next job on" in caplog.text


def test_a_leader_that_was_restarted_keeps_its_choice(job):
    with job.process(0):
        chain_of(10).choose(inv_of())
        job.memories.clear()
    with job.process(0):
        assert chain_of(12).choose(inv_of()).config == Step(10)


class Opaque:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Opaque({self.name})"


def test_a_config_without_a_json_form_is_recognised_by_its_repr(job):
    with job.process(0):
        chain_of(Opaque("a")).choose(inv_of())
    with job.process(1):
        mine = Opaque("a")
        assert chain_of(mine).choose(inv_of()).config.size is mine
    with job.process(2), pytest.raises(AgreementError, match=r"Opaque\(a\).* which has no JSON form.*Opaque\(b\)"):
        chain_of(Opaque("b")).choose(inv_of())


def test_overlays_must_decide_alike(job):
    def overlay(number):
        cache = ConfigCache()
        cache.put(inv_of().key, Step(number))
        return overlay_cache(cache)

    with job.process(0), overlay(10):
        assert chain_of().choose(inv_of()).step == "overlay"
    with job.process(1), overlay(10):
        found = chain_of().choose(inv_of())
        assert (found.config, found.step) == (Step(10), "overlay")
    with job.process(2), overlay(11), pytest.raises(AgreementError, match="decides: give all processes the same one"):
        chain_of().choose(inv_of())
    with job.process(0):
        with overlay(11):  # another overlay later in the program
            assert chain_of().choose(inv_of()).config == Step(11)
        assert chain_of(12).choose(inv_of()).config == Step(12)  # and none
    with job.process(2):
        assert chain_of(13).choose(inv_of()).config == Step(12)


def test_an_explicit_config_or_an_inspected_program_asks_nobody(job):
    with job.process(1):
        assert chain_of(11).choose(inv_of(), cfg=Step(3)).config == Step(3)
        with inspection_only():
            assert chain_of(11).choose(inv_of()).config == Step(11)
        assert job.store.asked == []


def test_explain_says_that_another_process_decides(job):
    with job.process(0):
        zero = chain_of(10)
        assert Executor(zero).explain(ADDS, jnp.zeros(3), quiet=True).step == "memory"
        zero.choose(inv_of())
    with job.process(1):
        executor = Executor(chain_of(11))
        step = executor.explain(ADDS, jnp.zeros(3), quiet=True).step
        assert step == "memory, unless process 0 decides otherwise when the program is compiled"
        executor.chooser.choose(inv_of())
        found = executor.explain(ADDS, jnp.zeros(3), quiet=True)
        assert (found.config, found.step) == (Step(10), "agreed")


def test_without_other_processes_nothing_is_asked():
    assert not job_store.is_distributed()
    assert agreement.leader_of(inv_of()) is None
    assert agreement.decided(inv_of()) is None
