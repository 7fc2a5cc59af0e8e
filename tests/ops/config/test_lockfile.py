"""The lock file: its bytes, what damages it, and the choices that it makes, in this process and in others."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.ops.kernel.samples import A, B, Config, Product, watching
from tilewright import LockError, NoConfigError
from tilewright.kernels.op.choice import Choice
from tilewright.modules import flash_attention
from tilewright.ops import (
    AutotunePolicy,
    Autotuner,
    AutotuningResult,
    BwdParams,
    Candidate,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Lock,
    PersistentCache,
    TunedCall,
    Tuner,
    autotune,
    find_invocations,
    overlay_cache,
    policy_override,
    use_lock,
)
from tilewright.ops.config import lockfile
from tilewright.ops.config.lockfile import Decision
from tilewright.ops.utils.fingerprint import toolchain_fingerprint

ROOT = Path(__file__).parents[3]
KERNEL = Product("tests.lockfile")
INV = Invocation(KERNEL, (A, B))
OTHER = Invocation(KERNEL, (A[:3], B))
DEVICE = INV.device_fingerprint


def result(*decided, device=DEVICE, toolchain=None):
    """What a tuning would return that had found these configs."""
    entries = [TunedCall.of(i, [Candidate(cfg, (1.0,))], 0, source=i.kernel.source(cfg)) for i, cfg in decided]
    toolchain = toolchain_fingerprint() if toolchain is None else toolchain
    return AutotuningResult(tuple(entries), device=device, toolchain=toolchain)


def lock_of(*decided, **rest):
    return result(*decided, **rest).to_lock()


def changed(lock, field, value):
    """The lock with a field of its only decision replaced."""
    (decision,) = lock.decisions
    return Lock(lock.device, lock.toolchain, (dataclasses.replace(decision, **{field: value}),))


@pytest.fixture
def environment(monkeypatch):
    """Sets what the environment says of locks, as a new process would see it."""

    def say(path, miss=None):
        for name, value in (("TILEWRIGHT_LOCK", path), ("TILEWRIGHT_LOCK_MISS", miss)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        lockfile._read_environment.cache_clear()

    yield say
    monkeypatch.undo()
    lockfile._read_environment.cache_clear()


class TestBytes:
    def test_come_back(self, tmp_path):
        made = result((INV, Config(1)), (INV.backward(), Config(2))).save_lock(tmp_path / "a.json")
        read = Lock.load(tmp_path / "a.json")
        assert read == made
        assert hash(read) == hash(made)
        assert (read.device, read.toolchain, read.decisions) == (made.device, made.toolchain, made.decisions)
        assert [d.direction for d in read.decisions] == ["backward", "forward"]
        assert read.get(INV.key).source == INV.kernel.source(Config(1))
        assert read.get(INV.key).shapes == "f32[6,5] f32[5,4]"
        assert read.get(OTHER.key) is None
        assert os.listdir(tmp_path) == ["a.json"]
        assert f"2 decisions on {DEVICE}" in repr(read)

    def test_depend_on_the_decisions_alone(self):
        there = lock_of((INV, Config(1)), (OTHER, Config(2)))
        back = lock_of((OTHER, Config(2)), (INV, Config(1)))
        merged = lock_of((OTHER, Config(2))) | lock_of((INV, Config(1)))
        slower = result((INV, Config(1)), (OTHER, Config(2)))
        slower.entries = tuple(
            dataclasses.replace(e, candidates=(Candidate(e.winner.config, (9.0,)),)) for e in slower.entries
        )
        texts = {lock.to_json() for lock in (there, back, merged, slower.to_lock())}
        assert len(texts) == 1
        assert texts.pop().endswith("}\n")

    def test_do_not_depend_on_white_space(self, tmp_path):
        lock = lock_of((INV, Config(1)))
        said = json.loads(lock.to_json())
        (tmp_path / "a.json").write_text(json.dumps(dict(reversed(said.items())), indent=7).replace("\n", "\r\n"))
        assert Lock.load(tmp_path / "a.json") == lock

    def test_writing_is_atomic(self, tmp_path, monkeypatch):
        file = tmp_path / "a.json"
        lock_of((INV, Config(1))).save(file)

        def fail(*arguments):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="No space left"):
                lock_of((INV, Config(2))).save(file)
        assert Lock.load(file) == lock_of((INV, Config(1)))
        assert os.listdir(tmp_path) == ["a.json"]


class TestMerging:
    def test_the_right_one_counts(self):
        merged = lock_of((INV, Config(1)), (OTHER, Config(2))) | lock_of((OTHER, Config(3)))
        assert merged == lock_of((INV, Config(1)), (OTHER, Config(3)))
        assert len(merged) == 2

    def test_other_devices_and_toolchains_do_not_mix(self):
        lock = lock_of((INV, Config(1)))
        with pytest.raises(ValueError, match="two devices"):
            lock | Lock("gpu:other", lock.toolchain, ())
        with pytest.raises(ValueError, match=r"two toolchains do not merge: jax .* there and 0 here"):
            lock | Lock(lock.device, lock.toolchain | {"jax": "0"}, ())
        with pytest.raises(TypeError):
            lock | {}

    def test_what_cannot_be_locked(self):
        with pytest.raises(ValueError, match="without calls"):
            AutotuningResult(device=DEVICE).to_lock()
        with pytest.raises(ValueError, match="one device"):
            lock_of((INV, Config(1)), device="gpu:other")
        with pytest.raises(ValueError, match="fingerprint"):
            lock_of((INV, Config(1)), device="")
        with pytest.raises(TypeError, match="no JSON form"):
            lock_of((INV, object()))
        entry = TunedCall.of(INV, [Candidate(Config(1), (1.0,))], 0)
        with pytest.raises(ValueError, match=r"what source of tests\.lockfile \(forward\) was measured for f32\[6,5\]"):
            AutotuningResult((entry,), device=DEVICE).to_lock()

    def test_the_source_is_that_which_was_measured(self, monkeypatch, tmp_path):
        """Not that of the process in which the result becomes a lock, where the kernel need not even be."""
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        measured = INV.kernel.source(Config(1))
        tuned = Autotuner(Tuner(0, 1), chooser=chain).tune(INV)
        monkeypatch.setattr(Product, "source", lambda self, cfg: "edited since", raising=False)
        assert tuned.to_lock().get(INV.key).source == measured
        text = tuned.to_json().replace(KERNEL.name, "tests.lockfile.gone")
        (decision,) = AutotuningResult.from_json(text).to_lock().decisions
        assert (decision.op, decision.source) == ("tests.lockfile.gone", measured)
        # An entry on disk is of the present source; otherwise the call is measured again.
        again = Autotuner(Tuner(0, 1), chooser=ConfigSelectorChain(persistent=PersistentCache(tmp_path)))
        for step in ("measured", "disk"):
            (call,) = again.tune(INV, reuse=True)
            assert (call.step, call.source) == (step, "edited since")


class TestAdding:
    def test_keeps_what_the_file_decides_and_the_later_one_counts(self, tmp_path):
        file = tmp_path / "a.json"
        assert lock_of((INV, Config(1))).add_to(file) == lock_of((INV, Config(1)))
        whole = lock_of((INV, Config(1)), (OTHER, Config(2)))
        assert lock_of((OTHER, Config(2))).add_to(file) == whole == Lock.load(file)
        lock_of((INV, Config(3))).add_to(file)
        assert Lock.load(file) == lock_of((INV, Config(3)), (OTHER, Config(2)))
        assert os.listdir(tmp_path) == ["a.json"]

    def test_leaves_what_cannot_be_added_to_as_it_was(self, tmp_path):
        file = tmp_path / "a.json"
        Lock("gpu:other", {}, ()).save(file)
        before = file.read_bytes()
        with pytest.raises(ValueError, match="two devices"):
            lock_of((INV, Config(1))).add_to(file)
        file.write_text("rubbish")
        with pytest.raises(LockError, match="cannot be used"):
            lock_of((INV, Config(1))).add_to(file)
        assert file.read_text() == "rubbish" != before
        assert os.listdir(tmp_path) == ["a.json"]


class TestHostileFiles:
    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "tilewright.lock.json"
        lock_of((INV, FwdParams(num_warps=4)), (OTHER, Config(2))).save(file)
        return file

    def refused(self, file, match=None):
        with pytest.raises(LockError, match=match) as caught:
            Lock.load(file)
        assert str(file) in str(caught.value)
        assert "tilewright tune TARGET --lock" in str(caught.value) or "cannot be read" in str(caught.value)

    @pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
    def test_what_cannot_be_read(self, file, tmp_path, monkeypatch):
        self.refused(tmp_path / "none.json", "there is no lock file")
        self.refused(tmp_path, "not a regular file")
        os.mkfifo(tmp_path / "fifo")
        self.refused(tmp_path / "fifo", "not a regular file")

        def fail(*arguments):
            raise PermissionError(13, "denied")

        monkeypatch.setattr(os, "open", fail)
        self.refused(file, "cannot be read: denied")

    def test_any_byte_missing_or_changed(self, file):
        content = file.read_bytes()
        for i in range(len(content) - 1):  # the last is a line feed
            for damaged in (content[:i], content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :]):
                file.write_bytes(damaged)
                self.refused(file)

    def test_rubbish(self, file):
        said = json.loads(file.read_text())
        for content in (b"", b"\xff\xfe", b"null", b"[]", b"{}", b'{"schema": 1}', b"[" * 100_000, b"{" * 9):
            file.write_bytes(content)
            self.refused(file)
        for field in ("schema", "device", "toolchain", "decisions", "sha256"):
            for value in (None, True, 2, "1", [], {}, [3], {"a": 1}, [[]], [{}]):
                file.write_text(json.dumps(said | {field: value}))
                self.refused(file, "its schema is" if field == "schema" else None)

    @pytest.mark.parametrize("field", ["op", "direction", "shapes", "key", "source"])
    @pytest.mark.parametrize("value", [None, 3, "x", ["x"]])
    def test_wrong_types_of_a_decision_under_right_hashes(self, file, field, value):
        lock_of((INV, Config(2))).save(file)
        said = json.loads(file.read_text())
        decision = {n: v for n, v in said["decisions"][0].items() if n != "sha256"} | {field: value}
        said["decisions"][0] = decision | {"sha256": lockfile._sha256(decision)}
        content = {name: said[name] for name in ("schema", "device", "toolchain", "decisions")}
        file.write_text(json.dumps(content | {"sha256": lockfile._sha256(content)}))
        if isinstance(value, str) and field in ("shapes", "source"):
            assert Lock.load(file).decisions[0].sha256 == said["decisions"][0]["sha256"]
        else:
            self.refused(file)

    def test_a_decision_altered_by_hand_is_named(self, file):
        file.write_text(file.read_text().replace('"num_warps": 4', '"num_warps": 8'))
        self.refused(file, r"tests.lockfile \(forward\) for f32\[6,5\] f32\[5,4\] was altered")

    def test_one_call_decided_twice(self):
        source = INV.kernel.source(Config(1))
        twice = (Decision.of(INV.key, Config(1), source), Decision.of(INV.key, Config(2), source))
        with pytest.raises(ValueError, match="decides each call once"):
            Lock(DEVICE, {}, twice)

    def test_names_no_type_that_is_not_loaded(self, caplog):
        """A lock makes no process import anything."""
        lock = lock_of((INV, Config(1)))
        evil = changed(lock, "config", {"$dataclass": "antigravity:Config", "fields": {}})
        with use_lock(evil):
            assert ConfigSelectorChain().choose(INV).step == "heuristic"
        assert "antigravity" not in sys.modules
        assert "cannot be rebuilt" in caplog.text


class TestChoices:
    def test_the_lock_stands_between_overlay_and_memory(self, tmp_path):
        cache = ConfigCache()
        cache.put(INV.key, Config(3))
        overlay = ConfigCache()
        overlay.put(INV.key, Config(1))
        chain, lock = ConfigSelectorChain(cache), lock_of((INV, Config(2)))
        lock.save(tmp_path / "a.json")
        for given in (lock, tmp_path / "a.json", str(tmp_path / "a.json")):
            with use_lock(given) as entered:
                assert entered == lock
                chosen = chain.choose(INV)
                assert (chosen.step, chosen.config, chosen.key) == ("lock", Config(2), INV.key)
                assert (str(given) if given is not lock else lock.sha256[:12]) in chosen.detail
                assert chain.lookup(INV) == chosen
                with overlay_cache(overlay):
                    assert chain.choose(INV).config == Config(1)
                assert chain.choose(INV, cfg=Config(9)).config == Config(9)
                assert chain.choose(OTHER).step == "heuristic"
            assert chain.choose(INV).config == Config(3)

    def test_the_innermost_alone_counts(self):
        chain = ConfigSelectorChain()
        with use_lock(lock_of((INV, Config(1)), (OTHER, Config(1)))), use_lock(lock_of((INV, Config(2)))):
            assert chain.choose(INV).config == Config(2)
            assert chain.choose(OTHER).step == "heuristic"
            with use_lock(None) as none:
                assert none is None
                assert chain.choose(INV).step == "heuristic"

    def test_takes_part_in_the_traces_of_jax(self):
        executor = Executor(ConfigSelectorChain())
        eager = lambda a: executor(KERNEL, a, B)
        jitted = jax.jit(eager)

        def ran(call):
            with watching() as seen:
                call(A)
            return [each.cfg.block for each in seen][-1:]

        lock = lock_of((INV, Config(5)))
        for call in (eager, jitted):
            assert ran(call) == [64]
            with use_lock(lock):
                assert ran(call) == [5]
                assert ran(call) == []
            with use_lock(Lock.from_json(lock.to_json())):
                assert ran(call) == []  # an equal lock
            assert ran(call) == []

    def test_a_config_that_cannot_run_is_a_miss(self, caplog):
        class Picky(Product):
            def config_reasons(self, inv, cfg):
                return ["it is odd"] if cfg.block % 2 else []

        inv = Invocation(Picky("tests.lockfile.picky"), (A, B))
        lock = lock_of((inv, Config(3)))
        with use_lock(lock):
            assert ConfigSelectorChain().choose(inv).step == "heuristic"
        assert "it is odd" in caplog.text
        with use_lock(lock, miss="error"), pytest.raises(NoConfigError, match="it is odd"):
            ConfigSelectorChain().choose(inv)

    @pytest.mark.parametrize("wrong", [{}, 3, ConfigCache(), AutotuningResult()])
    def test_wrong_input(self, wrong):
        with pytest.raises(TypeError, match="must be a Lock, the path"), use_lock(wrong):
            pass
        with pytest.raises(ValueError, match="must be 'allow' or 'error'"), use_lock(lock_of((INV, Config(1))), "no"):
            pass


class TestMissIsAnError:
    def test_names_the_call_the_file_and_the_command(self, tmp_path):
        file = tmp_path / "my lock.json"
        lock_of((INV, Config(2))).save(file)
        events = []
        chain = ConfigSelectorChain(autotune=True, tuner=Tuner(0, 1), on_event=events.append)
        with use_lock(file, miss="error"):
            assert chain.choose(INV).step == "lock"
            events.clear()
            with pytest.raises(NoConfigError) as caught:
                chain.choose(OTHER)
            with pytest.raises(NoConfigError, match="it lacks the call"):
                Executor(chain)(KERNEL, A[:3], B)
            with pytest.raises(NoConfigError, match="it lacks the call"):
                jax.jit(lambda a: Executor(chain)(KERNEL, a, B))(A[:3])
        for said in ("tests.lockfile (forward) for f32[3,5] f32[5,4]", str(file), f"tune TARGET --lock '{file}'"):
            assert said in str(caught.value)
        assert events == []
        assert chain.choose(OTHER).step == "autotune"

    def test_also_of_what_memory_knows(self):
        chain = ConfigSelectorChain()
        chain.cache.put(OTHER.key, Config(7))
        with use_lock(lock_of((INV, Config(2))), miss="error"):
            with pytest.raises(NoConfigError):
                chain.choose(OTHER)
            overlay = ConfigCache()
            overlay.put(OTHER.key, Config(8))
            with overlay_cache(overlay):
                assert chain.choose(OTHER).config == Config(8)
            assert chain.choose(OTHER, cfg=Config(9)).step == "explicit"

    def test_a_function_that_was_traced_before_is_an_error_too(self):
        function = jax.jit(lambda a: KERNEL(a, B))
        function(A[:3])
        with use_lock(lock_of((INV, Config(2))), miss="error"):
            function(A)
            with pytest.raises(NoConfigError):
                function(A[:3])

    @pytest.mark.parametrize("what", ["source", "toolchain", "device"])
    def test_of_elsewhere(self, what, caplog):
        """It is said once, and a miss but for another toolchain, which is an error where a miss is one."""
        lock = lock_of((INV, Config(2)))
        if what == "source":
            lock, message = changed(lock, "source", "of old"), "but of old was locked"
        elif what == "toolchain":
            lock = Lock(DEVICE, toolchain_fingerprint() | {"jax": "0.0.1", "mine": "2"}, lock.decisions)
            message = "jax 0.0.1 there and .* here, mine 2 there and absent here"
        else:
            key = json.dumps(json.loads(INV.key) | {"device": "gpu:other:9.0"})
            lock = Lock("gpu:other:9.0", {}, (Decision.of(key, Config(2), INV.kernel.source(Config(2))),))
            message = "it is of gpu:other:9.0, which this process does not have"
        with use_lock(lock), caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert ConfigSelectorChain().choose(INV).step == ("lock" if what == "toolchain" else "heuristic")
        (record,) = caplog.records
        assert re.search(message, record.getMessage())
        assert "the lock given in the program" in record.getMessage()
        with use_lock(lock, miss="error"), pytest.raises(NoConfigError, match=message):
            ConfigSelectorChain().choose(INV)

    def test_a_call_on_another_device_of_the_process_is_not_the_locks_business(self, monkeypatch):
        elsewhere = dataclasses.replace(INV, device=dataclasses.replace(INV.target, fingerprint="cpu:elsewhere"))
        with use_lock(lock_of((INV, Config(2))), miss="error"):
            assert ConfigSelectorChain().choose(elsewhere).step == "heuristic"

    def test_explaining_says_so(self, capsys):
        executor = Executor(ConfigSelectorChain())
        with use_lock(lock_of((INV, Config(2))), miss="error"):
            decided = executor.explain(KERNEL, A, B)
            assert (decided.step, decided.config) == ("lock", Config(2))
            assert "(lock, given in the program (sha256 " in capsys.readouterr().out
            missed = executor.explain(KERNEL, A[:3], B, quiet=True)
        assert missed.step.startswith("heuristic, but the call is an error: the lock given in the program")
        assert missed.config == Config(64)

    def test_tuning_goes_on_in_spite_of_it(self):
        """Whoever asks for a measurement gets it; it is how a lock is made."""
        chain = ConfigSelectorChain()
        with use_lock(lock_of((INV, Config(2))), miss="error"):
            found = Autotuner(Tuner(0, 1), chooser=chain).tune(OTHER)
            assert autotune(KERNEL, A[:3], B, num_warmup=0, num_iters=1) in (Config(16), Config(32), Config(64))
            with pytest.raises(NoConfigError):
                chain.choose(OTHER)
        with use_lock(found.to_lock(), miss="error"):
            assert chain.choose(OTHER).config == found.entries[0].winner.config


class TestEnvironment:
    def test_names_the_lock(self, environment, tmp_path):
        environment("", "")  # empty variables are none
        assert ConfigSelectorChain().choose(INV).step == "heuristic"
        file = tmp_path / "a.json"
        lock_of((INV, Config(2))).save(file)
        environment(file)
        chain = ConfigSelectorChain()
        assert (chain.choose(INV).config, chain.choose(INV).detail) == (Config(2), str(file))
        assert chain.choose(OTHER).step == "heuristic"
        with watching() as seen:
            KERNEL(A, B)
        assert seen[-1].cfg == Config(2)
        with use_lock(lock_of((INV, Config(4)))):
            assert chain.choose(INV).config == Config(4)
        with use_lock(None):
            assert chain.choose(INV).step == "heuristic"
        file.unlink()  # read once
        assert chain.choose(INV).config == Config(2)

    def test_what_cannot_be_used_is_an_error_before_any_work(self, environment, tmp_path):
        overlay = ConfigCache()
        overlay.put(INV.key, Config(1))
        broken = tmp_path / "broken.json"
        broken.write_text("{")
        for path, miss, match in (
            (tmp_path / "none.json", None, "there is no lock file"),
            (broken, None, "cannot be used"),
            (broken, "sometimes", "'sometimes' must be 'allow' or 'error'"),
            ("", "error", "TILEWRIGHT_LOCK_MISS=error needs a lock"),
        ):
            environment(path, miss)
            for _ in range(2):
                with pytest.raises(LockError, match=match):
                    ConfigSelectorChain().choose(INV)
            with pytest.raises(LockError, match=match), overlay_cache(overlay):
                Executor(ConfigSelectorChain())(KERNEL, A, B)
            with use_lock(None):
                assert ConfigSelectorChain().choose(INV).step == "heuristic"

    def test_a_lock_wins_over_a_policy(self, environment, tmp_path):
        lock_of((INV, Config(2))).save(tmp_path / "a.json")
        environment(tmp_path / "a.json", "error")
        chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="error"))
        assert chain.choose(INV).step == "lock"
        with policy_override(autotune=True), pytest.raises(NoConfigError, match=r"a\.json does not decide"):
            ConfigSelectorChain().choose(OTHER)
        environment(tmp_path / "a.json", "allow")
        assert ConfigSelectorChain().choose(OTHER).step == "heuristic"


# What each of several processes does: chooses for some calls, with its lock and without, and says what it was.
PROGRAM = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import jax
import jax.numpy as jnp

from tests.ops.config.test_lockfile import OPERANDS, PROCESSES, step
from tilewright.ops import use_lock
from tilewright.ops.lowering.labels import extract_labels_from_hlo_text, is_call_label, parse_label


def say(what):
    lowered = jax.jit(jax.value_and_grad(step)).lower(*OPERANDS)
    lowered.compile()(*(jnp.ones(x.shape) for x in OPERANDS))
    for label in extract_labels_from_hlo_text(lowered.as_text(debug_info=True)):
        if is_call_label(label):
            said = parse_label(label)
            print(what, said.op, said.direction, said.step, said.config)


say("with")
with use_lock(None):
    say("without")
PROCESSES(jnp.ones((2, 4)), jnp.ones((4, 8)))
"""

PROCESSES = Product("tests.lockfile.processes")
OPERANDS = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 64, 2, 16), (8, 4), (4, 8)))


def step(query, a, b):
    return flash_attention(query, query, query, causal=True).sum() + PROCESSES(a, b).sum()


def config_of(inv, size):
    """A config that no heuristic says."""
    if inv.kernel is PROCESSES:
        return Config(size)
    params = FwdParams if inv.direction == "forward" else BwdParams
    return Choice("xla", params=params(q_blocksize=size, kv_blocksize=size))


# What each of several processes does that add to one file: decisions of its own, one after the other.
ADDING = f"""
import json, sys

sys.path.insert(0, {str(ROOT)!r})
from tilewright.ops import FwdParams, Lock
from tilewright.ops.config.lockfile import Decision

file, device = sys.argv[1:]
print("ready", flush=True)
for key in json.loads(sys.stdin.readline()):
    Lock(device, {{}}, (Decision.of(key, FwdParams(), "source"),)).add_to(file)
"""


class TestProcesses:
    def test_that_add_to_one_file_lose_nothing(self, tmp_path):
        file = tmp_path / "lock.json"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ADDING, str(file), DEVICE],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        for n, process in enumerate(processes):  # all at once
            keys = [json.dumps(json.loads(INV.key) | {"op": f"tests.{n}.{i}"}) for i in range(12)]
            process.stdin.write(json.dumps(keys) + "\n")
            process.stdin.flush()
        for process in processes:
            process.communicate(timeout=300)
        assert [process.returncode for process in processes] == [0] * 3
        assert len(Lock.load(file)) == 36
        assert os.listdir(tmp_path) == ["lock.json"]

    def test_make_the_same_choices_although_their_caches_differ(self, tmp_path):
        """They would not without it, and with a strict lock a process ends with the error."""
        calls = find_invocations(jax.value_and_grad(step), *OPERANDS)
        assert {(inv.kernel.name, inv.direction) for inv in calls} == {
            ("flash_attention", "forward"), ("flash_attention", "backward"), (PROCESSES.name, "forward")
        }  # fmt: skip
        lock_of(*((inv, config_of(inv, 32)) for inv in calls)).save(tmp_path / "lock.json")
        processes, sizes = [], (8, 16)
        for size, miss in zip(sizes, ("allow", "error"), strict=True):
            cache = PersistentCache(tmp_path / str(size) / "configs")
            for inv in calls:
                assert cache.put(inv.key, config_of(inv, size), source=inv.kernel.source(config_of(inv, size)))
            environment = {
                "TILEWRIGHT_CACHE_DIR": str(tmp_path / str(size)),
                "TILEWRIGHT_LOCK": str(tmp_path / "lock.json"),
                "TILEWRIGHT_LOCK_MISS": miss,
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM],
                    env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        said = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 1], said
        for size, (output, _) in zip(sizes, said, strict=True):
            assert set(output.splitlines()) == {
                f"{what} {inv.kernel.name} {inv.direction} {step} {config_of(inv, chosen)}"
                for what, step, chosen in (("with", "lock", 32), ("without", "disk", size))
                for inv in calls
            }
        assert "NoConfigError: the lock" in said[1][1]
        assert "does not decide tests.lockfile.processes (forward) for f32[2,4] f32[4,8]" in said[1][1]
