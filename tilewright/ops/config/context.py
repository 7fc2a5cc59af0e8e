"""Overlay caches and policy overrides in force, per thread and per async task."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal

import jax

from tilewright.ops.config.lockfile import ActiveLock, Lock, Miss, active_lock, environment_lock
from tilewright.ops.config.memory import ConfigCache

Fallback = Literal["autotune", "heuristics", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class AutotunePolicy:
    """Limits what a selection may do when no cache holds the call.

    Attributes:
      allow_autotune: measure candidates.
      allow_heuristics: fall back to the nearest shape in a tuned table, or the kernel's heuristic.
      cache_miss_fallback: the first fallback to try; "error" raises ``NoConfigError`` at once.
      budget_s: seconds that one tuning may take; ``None`` for no limit.
      verify: check every candidate against the kernel's reference, if it has one.
      build_in_background: if nvcc must compile the preferred implementation first, start that build in another process,
        for later programs; this program runs the best choice that is already built.
      agree: in a program of several processes, take the config that all of them run; ``False`` lets each choose and
        measure for itself.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    budget_s: float | None = None
    verify: bool = True
    build_in_background: bool = False
    agree: bool = True

    def __post_init__(self) -> None:
        for name in ("allow_autotune", "allow_heuristics", "verify", "build_in_background", "agree"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"AutotunePolicy needs a bool, got {name}={getattr(self, name)!r}")
        if self.cache_miss_fallback not in ("autotune", "heuristics", "error"):
            raise ValueError(f"{self.cache_miss_fallback=} must be 'autotune', 'heuristics' or 'error'")
        check_budget(self.budget_s)


def check_budget(budget_s: float | None, name: str = "budget_s") -> None:
    """Raises unless the budget is ``None`` or a positive number."""
    if budget_s is None:
        return
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float):
        raise TypeError(f"{name}={budget_s!r} must be a number of seconds or None")
    if not budget_s > 0:
        raise ValueError(f"{name}={budget_s!r} must be positive or None")


@dataclasses.dataclass(frozen=True, slots=True)
class Overrides:
    """The overrides of ``overlay_cache``, ``use_lock``, ``policy_override`` and ``tune`` in force, innermost last.

    Attributes:
      overlays: caches that answer before any other.
      policy: fields of ``AutotunePolicy`` to replace, in order.
      token: set while a program is lowered only for inspection, so that its trace is not reused for a real call.
      locks: the last one applies, ``None`` meaning no lock; without any the environment's lock applies.
    """

    overlays: tuple[ConfigCache, ...] = ()
    policy: tuple[tuple[str, Any], ...] = ()
    token: object = None
    locks: tuple[ActiveLock | None, ...] = ()

    def apply(self, policy: AutotunePolicy) -> AutotunePolicy:
        """The policy with the overridden fields replaced."""
        return dataclasses.replace(policy, **dict(self.policy)) if self.policy else policy

    @property
    def lock(self) -> ActiveLock | None:
        """The lock that selection must follow.

        Raises:
          LockError: the environment names a lock that cannot be used.
        """
        return self.locks[-1] if self.locks else environment_lock()

    @property
    def version(self) -> int:
        """A number that grows whenever an overlay changes."""
        return sum(cache.version for cache in self.overlays)


_NONE = Overrides()
_CURRENT: ContextVar[Overrides] = ContextVar("tilewright_overrides", default=_NONE)


# Part of the keys of JAX's trace caches. Created on import, because creating a context is not thread-safe.
_TRACE_CONTEXT = jax.make_user_context(None)


# Counts explicit tunings that changed what would be chosen.
_GENERATIONS = itertools.count(1)
_generation = 0


def choices_changed() -> None:
    """Makes ``jax.jit`` retrace functions traced before, at once in this thread and on their next call in others."""
    global _generation
    _generation = next(_GENERATIONS)
    synchronise()


def current_overrides() -> Overrides:
    """The overrides in force in this thread or async task."""
    return _CURRENT.get()


def synchronise() -> None:
    """Copies the overrides of the running async task into JAX's trace context, which JAX keeps per thread.

    Called on every change and by every call of an executor. Between two calls an async task may still get a trace that
    another task of its thread made; that affects speed only, since every config gives the same values.
    """
    overrides = _CURRENT.get()
    wanted = None if overrides == _NONE and not _generation else (overrides, overrides.version, _generation)
    if _TRACE_CONTEXT.value != wanted:
        # Never exited: exiting would restore the overrides of another task of this thread.
        _TRACE_CONTEXT(wanted).__enter__()


without_overrides: Callable[[], AbstractContextManager[object]] = functools.partial(_TRACE_CONTEXT, None)
"""Makes a context in which JAX's cache keys carry no overrides, for code that no config choice affects."""


def overrides_key() -> Hashable:
    """The overrides in the form that JAX's cache keys hold."""
    key: Hashable = _TRACE_CONTEXT.value
    return key


@contextlib.contextmanager
def applied_overrides(overrides: Overrides) -> Iterator[None]:
    """Applies overrides to selection and to JAX's trace caches."""
    reset = _CURRENT.set(overrides)
    synchronise()
    try:
        yield
    finally:
        _CURRENT.reset(reset)
        synchronise()


@contextlib.contextmanager
def inspection_only() -> Iterator[None]:
    """Traces and lowers without tuning or keeping the trace, so that a later real call sees the tuned configs."""
    with applied_overrides(dataclasses.replace(current_overrides(), token=object())):
        yield


@contextlib.contextmanager
def overlay_cache(cache: ConfigCache) -> Iterator[ConfigCache]:
    """Makes a cache answer before every other, in this thread or async task, while the context lasts.

    Functions that ``jax.jit`` traced outside are traced again inside, and vice versa.
    """
    if not isinstance(cache, ConfigCache):
        raise TypeError(f"overlay_cache needs a ConfigCache, got {cache!r} of type {type(cache).__name__}")
    now = current_overrides()
    with applied_overrides(dataclasses.replace(now, overlays=(*now.overlays, cache))):
        yield cache


@contextlib.contextmanager
def use_lock(lock: Lock | str | os.PathLike[str] | None, miss: Miss = "allow") -> Iterator[Lock | None]:
    """Makes a lock decide before memory and disk, in this thread or async task, while the context lasts.

    Of nested locks and the environment's lock, only the innermost applies.

    Args:
      lock: a lock, or the path of its file; ``None`` disables every lock, the environment's included.
      miss: "error" raises ``NoConfigError`` for every call on the lock's device that the lock does not decide.

    Raises:
      LockError: the file is missing, damaged, altered, or of another schema.
    """
    lock_to_follow = None if lock is None else active_lock(lock, miss)
    now = current_overrides()
    with applied_overrides(dataclasses.replace(now, locks=(*now.locks, lock_to_follow))):
        yield None if lock_to_follow is None else lock_to_follow.lock


_ALIASES = {"autotune": "allow_autotune", "heuristics": "allow_heuristics"}


@contextlib.contextmanager
def policy_override(**fields: Any) -> Iterator[None]:
    """Replaces fields of every selector's ``AutotunePolicy``, in this thread or async task.

    Args:
      **fields: fields of ``AutotunePolicy``; ``autotune`` and ``heuristics`` are short for the ``allow_`` fields.

    Raises:
      TypeError: ``AutotunePolicy`` has no such field.
    """
    replaced = {_ALIASES.get(name, name): value for name, value in fields.items()}
    known = [field.name for field in dataclasses.fields(AutotunePolicy)]
    unknown = [name for name in replaced if name not in known]
    if unknown:
        raise TypeError(f"policy_override got {unknown}; it takes {[*known, *_ALIASES]}")
    AutotunePolicy(**replaced)  # bad values fail here, before anything is in force
    now = current_overrides()
    merged = dict(now.policy) | replaced
    with applied_overrides(dataclasses.replace(now, policy=tuple(sorted(merged.items())))):
        yield
