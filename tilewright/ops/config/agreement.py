"""Choices that all processes of a program share: one process decides the config of a call, the others follow it.

The processes that ``jax.distributed`` connects compile one program together. Caches, locks and measurements of their
own could make them choose different configs, hence different programs: a collective hangs, or results differ. So the
first process among those that run the program and have the call's kind of device, its leader (mostly process 0),
decides, and publishes its choice in the key-value store of JAX's coordination service. The others wait for it. No
collective takes part, the order of the calls does not matter, and a decision holds until the job ends.

The cases are those of "Several processes" in docs/caches.md. Besides, nothing is agreed on where nothing runs or each
process exports for itself: in an inspection, with symbolic sizes, and under ``target_device``.

A leader that decides by the environment's lock also publishes its choice for processes that lack the lock. Other locks
and overlays are in force in parts of a program, and what they decide counts only there. Calls are named by their keys
with the kind of device as JAX names it, so devices of different kinds have leaders of their own; what differs between
hosts of one kind, such as the number of a CPU's cores, is left out.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax

from tilewright.errors import AgreementError
from tilewright.ops.config import job_store
from tilewright.ops.config.chooser import Selection
from tilewright.ops.config.job_store import StoreError, is_distributed
from tilewright.ops.config.persistent import REBUILD_ERRORS, rebuild_config, tagged_config
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.serialize import canonical_json

logger = logging.getLogger("tilewright.ops.config.selection")

TIMEOUT_S = 600.0
TUNING_S = 3600.0
POLL_S = 2.0
"""Seconds of one wait: an interrupt is noticed between two."""

STEP = "agreed"
"""The step of the chain to which a shared choice belongs, the leader's own included."""


# The processes whose devices run the program that is being lowered; None where that is not known.
_PROCESSES: ContextVar[frozenset[int] | None] = ContextVar("tilewright_processes", default=None)

# Entered by every eager call, which takes microseconds: cheap where there is no job.
_ALONE = contextlib.nullcontext()


def run_by(devices: Callable[[], Iterable[jax.Device] | None]) -> AbstractContextManager[None]:
    """States which devices run the program whose calls are decided in the context; ``None``: those stated before."""
    return _run_by(devices) if is_distributed() else _ALONE


@contextlib.contextmanager
def _run_by(devices: Callable[[], Iterable[jax.Device] | None]) -> Iterator[None]:
    found = devices()
    if found is None:
        yield
        return
    reset = _PROCESSES.set(frozenset(device.process_index for device in found))
    try:
        yield
    finally:
        _PROCESSES.reset(reset)


@functools.cache
def _processes_with(kind: str, name: str) -> tuple[int, ...]:
    """The processes that have devices of a kind, in order."""
    try:
        devices = jax.devices(kind)
    except RuntimeError:
        return ()
    return tuple(sorted({device.process_index for device in devices if device.device_kind == name}))


def leader_of(inv: Invocation[Any, Any]) -> int | None:
    """The process that decides a call for the others and this one; ``None`` without a process to agree with."""
    if not is_distributed() or inv.is_symbolic or not inv.target.present:
        return None
    running = _PROCESSES.get()
    concerned = [p for p in _processes_with(inv.target.kind, inv.target.name) if running is None or p in running]
    return concerned[0] if len(concerned) > 1 and jax.process_index() in concerned else None


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """One call that processes agree on.

    Attributes:
      leader: the process that decides.
      scope: empty, or the hash of the config that an overlay or a lock decides: such a choice is compared only with the
        leader's choices of the same kind.
    """

    inv: Invocation[Any, Any]
    leader: int
    scope: str = ""

    @property
    def leads(self) -> bool:
        return self.leader == jax.process_index()

    @property
    def memory_key(self) -> tuple[int, str, str]:
        return self.leader, self.inv.key, self.scope

    @property
    def name(self) -> str:
        """The name of the decision in the store."""
        inv = self.inv
        call = {
            "op": inv.kernel.name,
            "version": inv.kernel.version,
            "direction": inv.direction,
            "device": f"{inv.target.kind}:{inv.target.name}",
            **inv.description,
        }
        digest = hashlib.sha256(canonical_json(call).encode()).hexdigest()
        return "/".join(["tilewright", "config", str(self.leader), digest, *([self.scope] if self.scope else [])])

    def __str__(self) -> str:
        return f"{self.inv.kernel.name} ({self.inv.direction}) for {describe_key(self.inv.key)}"


class _Memory:
    """The decisions that this process knows, of one coordination service."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.service: object = None
        self.known: dict[tuple[int, str, str], Selection] = {}
        self.latest: dict[str, Selection] = {}

    def of_job(self) -> "_Memory":
        """The memory, emptied if ``jax.distributed`` was initialised anew."""
        service = job_store.service()
        if service is not self.service:
            with self.lock:
                self.service = service
                self.known, self.latest = {}, {}
                _processes_with.cache_clear()
        return self

    def put(self, topic: Topic, selection: Selection) -> Selection:
        with self.lock:
            self.known[topic.memory_key] = selection
            if not topic.scope:
                self.latest[topic.inv.key] = selection
        return selection


_MEMORY = _Memory()


def decided(inv: Invocation[Any, Any]) -> Selection | None:
    """The shared choice of a call that this process knows already; never asks another process."""
    if not is_distributed():
        return None
    memory = _MEMORY.of_job()
    if not memory.latest:
        return None
    if _PROCESSES.get() is None:
        return memory.latest.get(inv.key)
    leader = leader_of(inv)
    return None if leader is None else memory.known.get((leader, inv.key, ""))


def agree(inv: Invocation[Any, Any], leader: int, own: Callable[[], Selection], choose: Callable[[], Selection]) -> Any:
    """The choice of a call that no explicit config, overlay or lock decides.

    Args:
      own: what this process would choose without measuring, to compare with the leader's.
      choose: what it chooses as the leader; may measure.

    Raises:
      AgreementError: the leader's choice does not come, or cannot run here.
    """
    topic = Topic(inv, leader)
    if topic.leads:
        found = choose()
        return _follow(topic, found, _publish(topic, found))
    return _follow(topic, own(), _wait(topic))


def confirm(inv: Invocation[Any, Any], leader: int, selection: Selection, *, everywhere: bool) -> Selection:
    """Returns a choice that an overlay or a lock made, after the leader has made it too.

    Args:
      everywhere: it holds in the whole program, so that a process without it follows.

    Raises:
      AgreementError: the leader has not decided alike, or has not decided in time.
    """
    topic = Topic(inv, leader, _digest(selection.config))
    memory = _MEMORY.of_job()
    if topic.memory_key in memory.known:
        return selection
    if topic.leads:
        _publish(topic, selection)
        if everywhere and (leader, inv.key, "") not in memory.known:
            plain = dataclasses.replace(topic, scope="")
            _follow(plain, selection, _publish(plain, selection))
    else:
        _wait(topic, selection)
    return memory.put(topic, selection)


@contextlib.contextmanager
def measuring(inv: Invocation[Any, Any], leader: int | None) -> Iterator[None]:
    """Lets the others wait longer while this process, as the leader, measures a call."""
    if leader is None or not (topic := Topic(inv, leader)).leads:
        yield
        return
    name = f"{topic.name}/measuring"
    with _reaching(topic):
        job_store.put(name, "1")
    try:
        yield
    except BaseException:
        job_store.remove(name)
        raise


# From here on: the format of what is stored.


def _digest(config: object) -> str:
    return hashlib.sha256(_payload(Selection(config, "")).encode()).hexdigest()[:32]


def _payload(selection: Selection) -> str:
    """A choice as text. A config without a JSON form is named by its ``repr``, by which others recognise theirs."""
    fields: dict[str, Any] = {"step": selection.step, "detail": selection.detail}
    try:
        fields["config"] = tagged_config(selection.config)
    except TypeError:
        fields["repr"] = repr(selection.config)
    return canonical_json(fields)


def _publish(topic: Topic, selection: Selection) -> dict[str, Any]:
    """Publishes the leader's choice; returns what the others read, which may be an earlier choice of this process."""
    with _reaching(topic):
        text = job_store.put_first(topic.name, _payload(selection))
    found: dict[str, Any] = json.loads(text)
    return found


def _wait(topic: Topic, own: Selection | None = None) -> dict[str, Any]:
    """Waits for the leader's choice, and longer while the leader says that it measures."""
    began = time.monotonic()
    usual, tuning = _seconds("TILEWRIGHT_AGREE_TIMEOUT_S", TIMEOUT_S), _seconds("TILEWRIGHT_AGREE_TUNING_S", TUNING_S)
    waited, measured = 0.0, False
    while waited < (max(usual, tuning) if measured else usual):
        left = (usual if waited < usual else tuning) - waited
        with _reaching(topic):
            text = job_store.wait_for(topic.name, min(left, POLL_S))
            if text is not None:
                found: dict[str, Any] = json.loads(text)
                return found
            waited = time.monotonic() - began
            measured = waited >= usual and job_store.get(f"{topic.name}/measuring") is not None
    raise AgreementError(_unanswered(topic, own, waited, measured))


@contextlib.contextmanager
def _reaching(topic: Topic) -> Iterator[None]:
    """Turns a failure of the coordination service into an error for users."""
    try:
        yield
    except StoreError as error:
        raise AgreementError(
            f"the processes cannot agree on the config of {topic}: JAX's coordination service, which process 0 runs, "
            f"fails ({error}). See whether process 0 still runs. {_REMEDY}"
        ) from error


def _follow(topic: Topic, own: Selection, published: dict[str, Any]) -> Selection:
    """The published choice as this process's own; a difference is logged."""
    inv, leader = topic.inv, f"process {topic.leader}"
    origin = f"{published['step']}, {published['detail']}" if published["detail"] else published["step"]
    if "config" not in published:
        if published["repr"] != repr(own.config):
            raise AgreementError(
                f"{leader} runs {topic} with {published['repr']}, which has no JSON form and so cannot be handed to "
                f"process {jax.process_index()}, whose choice is {own.config!r}. {_REMEDY}"
            )
        config = own.config
    else:
        try:
            config = rebuild_config(published["config"], inv.kernel.config_type(inv))
        except (*REBUILD_ERRORS, TypeError) as error:
            raise AgreementError(
                f"process {jax.process_index()} cannot read the config by which {leader} runs {topic}: {error}. "
                "Install the same version of Tilewright for all processes"
            ) from error
    why = inv.kernel.config_reasons(inv, config)
    if why:
        raise AgreementError(
            f"{leader} runs {topic} with {describe_config(config)} (from: {origin}), which process "
            f"{jax.process_index()} cannot run: {'; '.join(why)}. Install the same packages for all processes. "
            f"{_REMEDY}"
        )
    just_measured = published["step"] == "autotune" and own.step in ("simulated", "nearest", "heuristic")
    if (type(own.config) is not type(config) or own.config != config) and not just_measured:
        own_origin = f"{own.step}, {own.detail}" if own.detail else own.step
        logger.warning(
            "%s runs by %s, the choice of %s (from: %s), also in process %d, which would have chosen %s (from: %s): "
            "all processes must run the same program. One lock file for all of them (TILEWRIGHT_LOCK) avoids the "
            "difference",
            topic, describe_config(config), leader, origin, jax.process_index(), describe_config(own.config),
            own_origin,
        )  # fmt: skip
    return _MEMORY.of_job().put(
        topic, Selection(config, STEP, inv.key, detail=f"by {leader}, whose choice came from: {origin}")
    )


_REMEDY = (
    "To choose in each process without asking: give all of them one lock file and set TILEWRIGHT_AGREE=0, or use "
    "policy_override(agree=False) around calls that not all processes make"
)


def _unanswered(topic: Topic, own: Selection | None, waited_s: float, measured: bool) -> str:
    if measured:
        return (
            f"process {topic.leader} has been measuring {topic} for {waited_s:.0f} s, and process "
            f"{jax.process_index()} does not wait any longer for its choice: tune before the job starts "
            "(tilewright tune TARGET --lock FILE), or raise TILEWRIGHT_AGREE_TUNING_S"
        )
    what = "a config" if own is None else f"{describe_config(own.config)} (from: {own.step})"
    likewise = "" if own is None else ", which this process's overlay or lock decides: give all processes the same one"
    return (
        f"process {topic.leader} did not decide {topic} within {waited_s:.0f} s, so process {jax.process_index()} "
        f"cannot choose {what} for it{likewise}. All processes must run the same program; see whether process "
        f"{topic.leader} still runs and makes this call. If it is only slow, raise TILEWRIGHT_AGREE_TIMEOUT_S. "
        f"{_REMEDY}"
    )


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{variable}={text!r} must be a positive number of seconds")
    return seconds
