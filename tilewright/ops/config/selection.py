"""The chain that selects the config of a call: one loop over named steps."""

import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import NoConfigError
from tilewright.ops.config import agreement, unbuilt
from tilewright.ops.config.chooser import ConfigChooser, Selection
from tilewright.ops.config.context import AutotunePolicy, Overrides, current_overrides
from tilewright.ops.config.job_store import is_distributed
from tilewright.ops.config.lockfile import ActiveLock, key_fields
from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.config.nearest import NearestTable
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.config.tuner import Tuner
from tilewright.ops.kernel.builds import Build
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.names import ConfigHolder, key_is_of, register_config_holder
from tilewright.ops.utils.describe import describe_key
from tilewright.ops.utils.hook import Hook
from tilewright.ops.utils.serialize import canonical_json
from tilewright.ops.utils.target import active_target
from tilewright.ops.utils.untraced import measurement_lock

logger = logging.getLogger(__name__)

Event = Callable[[Any], None]

# Steps whose configs were not measured for the call: they never block a tuning and are never stored on disk.
_GUESSES = ("simulated", "nearest", "heuristic")
# Steps whose configs the user did not ask for: those that must be compiled first are skipped.
_UNTUNED = ("shipped", *_GUESSES)


MEASURE: Hook[Callable[[Invocation[Any, Any], "ConfigSelectorChain", AutotunePolicy], AutotuningResult]] = Hook(
    "the autotuner"
)
"""The function by which a chain tunes a call where its policy allows that."""


class ConfigSelectorChain(ConfigChooser, ConfigHolder):
    """Takes the first answer of its steps.

    The steps: explicit, overlays, lock, what processes agreed on, memory, disk, shipped tables, autotuning if allowed,
    what was simulated, the nearest shape in the shipped tables, heuristic. In a program of several processes ``choose``
    returns what the leader of the call decides (`agreement`).

    A cached config that the kernel cannot run is logged and counts as a miss. From a shipped table's entry the fastest
    config that can run is taken, since the fastest of all may need a package that is not installed. A config from the
    tables or the heuristic, which the user did not ask for, is skipped if nvcc must compile it first: the best one that
    is already built runs instead, and that is reported once.

    Args:
      cache: the memory cache; a fresh one by default.
      persistent: the disk cache; ``None`` keeps everything in memory.
      autotune: shorthand for ``policy=AutotunePolicy(allow_autotune=autotune)``.
      policy: the limits when no cache answers; by default nothing is measured.
      tuner: settings of the measurements.
      on_event: called with a ``Selection`` for every choice and with the events of each tuning.
      tables: folder of tuned tables; by default the one in the package.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        *,
        autotune: bool | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        on_event: Event | None = None,
        tables: Path | None = None,
    ):
        if autotune is not None and policy is not None:
            raise ValueError(f"{autotune=} and {policy=} exclude each other; put allow_autotune into the policy")
        expected = {"cache": ConfigCache, "persistent": PersistentCache, "policy": AutotunePolicy, "tuner": Tuner}
        for name, given in (("cache", cache), ("persistent", persistent), ("policy", policy), ("tuner", tuner)):
            if given is not None and not isinstance(given, expected[name]):
                raise TypeError(f"{name}={given!r} must be None or of type {expected[name].__name__}")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"{on_event=} must be callable or None")
        self.cache = ConfigCache() if cache is None else cache
        self.persistent = persistent
        self.policy = policy or AutotunePolicy(allow_autotune=False if autotune is None else autotune)
        self.tuner = tuner
        self.on_event = on_event
        self._tables = tables
        self._shipped_keys: dict[tuple[str, str], frozenset[str]] = {}
        self._shipped: dict[tuple[str, str, str], TunedCall | None] = {}
        self._nearby: dict[tuple[str, str], NearestTable] = {}
        self._guesses = 0
        self._remembering = threading.Lock()
        self._steps = (
            ("overlay", self._overlay),
            ("lock", self._lock),
            (agreement.STEP, self._agreed),
            ("memory", self._memory),
            ("disk", self._disk),
            ("shipped", self._shipped_table),
        )
        register_config_holder(self)

    def forget(self, name: str, version: str) -> None:
        self.cache.discard([key for key in self.cache if key_is_of(key, name, version)])

    @property
    def version(self) -> int:
        with self._remembering:
            return self.cache.version - self._guesses

    def state(self, op: str, overrides: Overrides) -> str:
        entries = "" if self.persistent is None else self.persistent.state(op)
        if overrides.overlays or not entries:
            return ""
        lock = overrides.lock
        return repr((self.effective_policy(overrides), lock and lock.lock.sha256, entries))

    def effective_policy(self, overrides: Overrides | None = None) -> AutotunePolicy:
        """The policy with the environment and all overrides applied."""
        overrides = current_overrides() if overrides is None else overrides
        policy = self.policy
        if os.environ.get("TILEWRIGHT_AUTOTUNE", "") == "1":
            policy = dataclasses.replace(policy, allow_autotune=True)
        if os.environ.get("TILEWRIGHT_BACKGROUND_BUILDS", "") == "1":
            policy = dataclasses.replace(policy, build_in_background=True)
        if os.environ.get("TILEWRIGHT_AGREE", "") == "0":
            policy = dataclasses.replace(policy, agree=False)
        return overrides.apply(policy)

    def choose(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        overrides = current_overrides() if overrides is None else overrides
        lock = overrides.lock  # one that cannot be used raises at once, whichever step would answer
        selection = self._known(inv, cfg, overrides)
        given = selection is not None and selection.step in ("explicit", "overlay", "lock")
        if lock is not None and not given and overrides.token is None and (refused := _refusal(lock, inv)):
            raise NoConfigError(refused)
        leader = self.leader(inv, overrides)
        if leader is None or (selection is not None and selection.step in ("explicit", agreement.STEP)):
            selection = selection or self._miss(inv, overrides)
            self._chosen(inv, selection, overrides)
        elif selection is not None and given:
            everywhere = selection.step == "lock" and not overrides.locks
            selection = agreement.confirm(inv, leader, selection, everywhere=everywhere)
        else:
            selection = self._agreed_choice(inv, selection, leader, overrides)
        if self.on_event is not None:
            self.on_event(selection)
        return selection

    def _chosen(self, inv: Invocation[Any, Any], selection: Selection, overrides: Overrides) -> Selection:
        """Reports and remembers what this process has chosen itself."""
        if overrides.token is not None:  # a program lowered only to be inspected stores nothing
            return selection
        if (found := self.not_built(inv, selection)) is not None:
            in_background = self.effective_policy(overrides).build_in_background
            unbuilt.report_once(inv, selection.config, *found, in_background=in_background)
        if selection.step not in ("explicit", "overlay", "lock", agreement.STEP):
            self.remember(selection)
        return selection

    def leader(self, inv: Invocation[Any, Any], overrides: Overrides | None = None) -> int | None:
        """The process that decides the call for all; ``None`` if this one may choose for itself."""
        overrides = current_overrides() if overrides is None else overrides
        if not is_distributed() or overrides.token is not None or not self.effective_policy(overrides).agree:
            return None
        return agreement.leader_of(inv)

    def _agreed_choice(
        self, inv: Invocation[Any, Any], known: Selection | None, leader: int, overrides: Overrides
    ) -> Selection:
        """The choice of the leader of the call, which may be this process."""
        found: Selection = agreement.agree(
            inv,
            leader,
            own=lambda: known or self._guess(inv),
            choose=lambda: self._chosen(inv, known or self._miss(inv, overrides), overrides),
        )
        return found

    def lookup(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        overrides = current_overrides() if overrides is None else overrides
        return self._known(inv, cfg, overrides) or self._guess(inv)

    def not_built(self, inv: Invocation[Any, Any], selection: Selection) -> tuple[Any, tuple[Build, ...]] | None:
        """The config that would have been chosen if it were built, with its missing builds; None if there is none."""
        if selection.step not in _UNTUNED:
            return None
        better = itertools.takewhile(lambda config: config != selection.config, self._shipped_configs(inv))
        preferred = next((config for config in better if _can_run(inv, config, built=False)), selection.preferred)
        if preferred is None:
            return None
        missing = unbuilt.missing(inv, preferred)
        return (preferred, missing) if missing else None

    def remember(self, selection: Selection) -> None:
        """Puts a choice into the memory cache; a guess never replaces a measured config."""
        if selection.step in _UNTUNED and _assumes_packages():
            return
        if selection.step in _GUESSES:
            with self._remembering:
                if self.cache.get(selection.key) is None:
                    self.cache.put(selection.key, selection.config, origin=selection.step)
                    self._guesses += 1  # storing a guess changes no later choice
        elif selection.step != "memory":
            self.cache.put(selection.key, selection.config, origin=selection.step)

    def _known(self, inv: Invocation[Any, Any], cfg: object, overrides: Overrides) -> Selection | None:
        if cfg is not None:
            resolved = inv.kernel.resolve_config(cfg, inv)
            if resolved is not None:
                return Selection(resolved, "explicit")
        for step, answer in self._steps:
            found = answer(inv, overrides)
            if found is not None and (step == "shipped" or _fits(inv, found, step)):  # that step asked already
                return Selection(found, step, inv.key, detail=self._detail(inv, step, overrides))
        return None

    def _detail(self, inv: Invocation[Any, Any], step: str, overrides: Overrides) -> str:
        """More about the answer of a step."""
        if step == "lock":
            return "" if overrides.lock is None else overrides.lock.name
        agreed = agreement.decided(inv) if step == agreement.STEP else None
        return "" if agreed is None else agreed.detail

    def _overlay(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        answers = (cache.get(inv.key) for cache in reversed(overrides.overlays))
        return next((found for found in answers if found is not None), None)

    def _lock(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        lock = overrides.lock
        return None if lock is None else lock.answer(inv)[0]

    def lock_refusal(self, inv: Invocation[Any, Any]) -> str:
        """The error message if the lock in force forbids a call that it does not decide; empty if it does not."""
        lock = current_overrides().lock
        return "" if lock is None else _refusal(lock, inv)

    def _agreed(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        if not is_distributed() or not self.effective_policy(overrides).agree:
            return None
        found = agreement.decided(inv)
        return None if found is None else found.config

    def _memory(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        origin = self.cache.origin(inv.key)
        # Of a shipped table's entry the best config depends on the packages that are installed.
        is_for_here = origin in _GUESSES or (origin in _UNTUNED and _assumes_packages())
        return None if is_for_here else self.cache.get(inv.key)

    def _disk(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        # Reading a config may load all backends, so look for a file first.
        if self.persistent is None or (key := self._disk_key(inv)) is None:
            return None
        expected = inv.kernel.config_type(inv)
        found = self.persistent.get(key, expected_type=expected, source=inv.kernel.source)
        return None if found is None else inv.kernel.adapted_config(inv, found)

    def _disk_key(self, inv: Invocation[Any, Any]) -> str | None:
        """The key of the file for a call, which an earlier version may have written; ``None`` if there is none."""
        persistent = self.persistent
        if persistent is None:
            return None
        return next((key for key in (inv.key, *inv.former_keys) if persistent.has_file(key)), None)

    def _shipped_table(self, inv: Invocation[Any, Any], overrides: Overrides) -> Any:
        configs = self._shipped_configs(inv)
        return next((config for config in configs if _can_run(inv, config)), None)

    def _shipped_configs(self, inv: Invocation[Any, Any]) -> Iterator[Any]:
        """The configs of the shipped tables' entry for the call, best first."""
        entry = self.shipped(inv)
        return (inv.kernel.adapted_config(inv, config) for config in (() if entry is None else entry.ranked))

    def shipped(self, inv: Invocation[Any, Any]) -> TunedCall | None:
        """The shipped tables' entry for the call; only its configs are rebuilt, and the modules of these imported."""
        from tilewright.ops.config.tables import known_keys, load_tables  # reads files: not before it is needed

        place = (inv.target.fingerprint, inv.kernel.name)
        if place not in self._shipped_keys:
            self._shipped_keys[place] = known_keys(place[0], self._tables, op=place[1])
        known = self._shipped_keys[place]
        key = next((key for key in (inv.key, *inv.former_keys) if key in known), None) if known else None
        if key is None:
            return None
        if (*place, key) not in self._shipped:
            table = load_tables(place[0], self._tables, op=place[1], key=key)
            self._shipped[(*place, key)] = table.get(key)
        return self._shipped[(*place, key)]

    def _miss(self, inv: Invocation[Any, Any], overrides: Overrides) -> Selection:
        policy = self.effective_policy(overrides)
        may_tune = policy.allow_autotune and inv.target.present and overrides.token is None and not inv.is_symbolic
        if policy.cache_miss_fallback == "error" and overrides.token is None:
            raise NoConfigError(f"no cache holds a config of {inv.kernel.name} ({inv.direction}) for {inv.key}")
        if may_tune and policy.cache_miss_fallback == "autotune":
            return self._autotune(inv, policy, overrides)
        if policy.allow_heuristics or overrides.token is not None:
            return self._guess(inv)
        if may_tune:
            return self._autotune(inv, policy, overrides)
        raise NoConfigError(f"{policy=} forbids finding a config of {inv.kernel.name} ({inv.direction}) for {inv.key}")

    def _autotune(self, inv: Invocation[Any, Any], policy: AutotunePolicy, overrides: Overrides) -> Selection:
        with measurement_lock():  # two threads that miss on the same key measure it once
            found = self._known(inv, None, overrides)
            if found is not None:
                return found
            with agreement.measuring(inv, self.leader(inv, overrides)):
                result = MEASURE.function(inv, self, policy)
        if result.interrupted:
            raise KeyboardInterrupt
        if not result.entries:  # the budget ended before anything was measured
            return self._guess(inv)
        winner = result.entries[0].winner
        return Selection(winner.config, "autotune", inv.key, winner.time_ms)

    def _guess(self, inv: Invocation[Any, Any]) -> Selection:
        """The config that runs if nothing was measured for the call."""
        if (simulated := self._of_simulator(inv)) is not None:
            return simulated
        preferred = None
        for near in self._near(inv):
            if not unbuilt.missing(inv, near.config):
                return dataclasses.replace(near, preferred=preferred)
            preferred = near.config if preferred is None else preferred
        if preferred is None:
            preferred = inv.kernel.preferred_cfg(inv)
        config = inv.kernel.heuristic_cfg(inv)
        return Selection(config, "heuristic", inv.key, preferred=None if preferred == config else preferred)

    def _of_simulator(self, inv: Invocation[Any, Any]) -> Selection | None:
        """The config that a simulator found for the very call, while its source is what was simulated."""
        if self.persistent is None or inv.target.kind != "tpu" or not self.persistent.has_file(simulated_key(inv)):
            return None
        expected = inv.kernel.config_type(inv)
        found = self.persistent.get(simulated_key(inv), expected_type=expected, source=inv.kernel.source)
        return None if found is None or not _can_run(inv, found) else Selection(found, "simulated", inv.key)

    def _near(self, inv: Invocation[Any, Any]) -> Iterator[Selection]:
        """The configs of the nearest shapes in the shipped tables that can run the call, built or not."""
        if not inv.kernel.takes_near_shapes or inv.is_symbolic:
            return
        place = (inv.target.fingerprint, inv.kernel.name)
        if place not in self._nearby:
            from tilewright.ops.config.tables import load_tables

            table = load_tables(place[0], self._tables, op=place[1])
            self._nearby[place] = NearestTable((key, entry.ranked) for key, entry in table.items())
        for near in self._nearby[place].neighbours(inv.key):
            for config in (inv.kernel.adapted_config(inv, each) for each in near.configs):
                if _can_run(inv, config, built=False):
                    detail = f"measured for {describe_key(near.key)}, at a distance of {near.distance:.3g}"
                    yield Selection(config, "nearest", inv.key, detail=detail)

    def store(
        self, inv: Invocation[Any, Any], cfg: object, candidates: Sequence[Any], time_ms: float | None, complete: bool
    ) -> None:
        """Keeps a measured config, with all measurements, in memory and on disk."""
        self.cache.put(inv.key, cfg, origin="autotune")
        agreed = agreement.decided(inv)
        if agreed is not None and agreed.config != cfg:
            logger.warning(
                "%s (%s) was tuned after the processes of this job had agreed on its config: the result is used from "
                "the next job on", inv.kernel.name, inv.direction,
            )  # fmt: skip
        if self.persistent is None:
            return
        try:
            self.persistent.put(
                inv.key,
                cfg,
                measurements=[candidate.fields() for candidate in candidates],
                metadata={
                    "time_ms": time_ms,
                    "complete": complete,
                    "op": inv.kernel.name,
                    "direction": inv.direction,
                    "sources": measured_sources(inv, [candidate.config for candidate in candidates]),
                },
                source=inv.kernel.source(cfg),
            )
        except TypeError as error:  # a config without a JSON form is kept in memory only
            logger.warning("the config of %s cannot be stored on disk: %s", inv.kernel.name, error)

    def measurements(self, inv: Invocation[Any, Any]) -> tuple[Any, str, tuple[Any, ...]] | None:
        """The config, step and candidates of a complete, current tuning in the disk cache."""
        if self.persistent is None:
            return None
        config = self._disk(inv, Overrides())
        if config is None or not _fits(inv, config, "disk"):
            return None
        entry = self.persistent.entry(self._disk_key(inv) or inv.key)
        if entry is None or not entry.metadata.get("complete") or not entry.measurements:
            return None
        try:
            return config, "disk", tuple(Candidate(**fields) for fields in entry.measurements)
        except TypeError:  # written by another version, with other fields
            return None

    def stale_config(self, inv: Invocation[Any, Any]) -> Any:
        """The first candidate of the next tuning: an older toolchain's or source's winner, or the nearest shape's
        config.

        The nearest shape's config runs without tuning, so tuning must not choose anything slower.
        """
        stale = None
        if self.persistent is not None:
            expected = inv.kernel.config_type(inv)
            stale = self.persistent.stale_config(
                self._disk_key(inv) or inv.key, expected_type=expected, source=inv.kernel.source
            )
        if stale is not None:
            return stale
        return next((near.config for near in self._near(inv) if not unbuilt.missing(inv, near.config)), None)

    def measured_ms(self, inv: Invocation[Any, Any], cfg: object) -> float | None:
        """The time that the disk cache, or else a shipped table, holds for a config of this call."""
        entry = None if self.persistent is None else self.persistent.entry(self._disk_key(inv) or inv.key)
        if entry is not None and entry.config == cfg:
            return entry.metadata.get("time_ms")
        shipped = self.shipped(inv)
        return None if shipped is None else next((c.time_ms for c in shipped.candidates if c.config == cfg), None)


def simulated_key(inv: Invocation[Any, Any]) -> str:
    """The key under which the disk cache holds what was simulated for a call: of another device than all calls have."""
    fields = key_fields(inv.key)
    return canonical_json({**fields, "device": f"{fields['device']}, simulated"})


def measured_sources(inv: Invocation[Any, Any], configs: Iterable[Any]) -> str:
    """A hash of the code that the measurements of several configs depend on."""
    sources = sorted({inv.kernel.source(config) for config in configs})
    return hashlib.sha256(" ".join(sources).encode()).hexdigest()


def _assumes_packages() -> bool:
    """True if choices count packages as installed that may not be, so that no cache may hold them."""
    target = active_target()
    return target is not None and bool(target.packages)


def _refusal(lock: ActiveLock, inv: Invocation[Any, Any]) -> str:
    """The error message if a lock forbids a call that it does not decide; empty if it does not."""
    if lock.miss == "allow":
        return ""
    config, why = lock.answer(inv)
    if config is not None:
        why = "; ".join(inv.kernel.config_reasons(inv, config))
    return lock.refusal(inv, why) if why else ""


def _can_run(inv: Invocation[Any, Any], cfg: object, *, built: bool = True) -> bool:
    """True if a kernel can run a config and, if ``built``, everything that it needs is built."""
    return not (inv.kernel.config_reasons(inv, cfg) or (built and unbuilt.missing(inv, cfg)))


def _fits(inv: Invocation[Any, Any], cfg: object, step: str) -> bool:
    """True if a cached config can run; one that cannot is logged and counts as a miss."""
    why = inv.kernel.config_reasons(inv, cfg)
    if why:
        kernel = f"{inv.kernel.name} ({inv.direction})"
        logger.warning("%s cannot run %s, its config by the step %r: %s", kernel, cfg, step, "; ".join(why))
    return not why


@functools.cache
def default_chain() -> ConfigSelectorChain:
    """The chain behind ``kernel(...)``: memory, disk, shipped tables, heuristics; it tunes only when asked."""
    return ConfigSelectorChain(ConfigCache(), PersistentCache(), policy=AutotunePolicy(allow_autotune=False))
