"""The result of a tuning: every candidate with its times, its check and its exception."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilewright.ops.config.context import overlay_cache
from tilewright.ops.config.lockfile import Decision, Lock
from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.config.persistent import REBUILD_ERRORS
from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.candidates import Candidate, Timing, kind_of
from tilewright.ops.kernel.kernel import Invocation, Kernel
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.stable_ids import with_current_names
from tilewright.ops.utils.text import as_text, lines, milliseconds, table

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1

type Lost = Callable[[Exception], None]

# The results entered as context managers in this thread or async task.
_ENTERED: ContextVar[tuple[AbstractContextManager[Any], ...]] = ContextVar("tilewright_results", default=())


@dataclasses.dataclass(frozen=True, slots=True)
class TunedCall:
    """The candidates of one invocation.

    Attributes:
      key: the cache key of the call.
      shapes: the call in short form, for people.
      chosen: index of the winner.
      step: "measured", or the cache that already held the result: "memory", "disk" or "overlay".
      complete: ``False`` if the tuning was cut short by its budget or an interrupt.
      source: hash of the code that the winner depended on when it was measured; empty if unknown.
    """

    op: str
    direction: str
    key: str
    shapes: str
    candidates: tuple[Candidate, ...]
    chosen: int
    step: str = "measured"
    complete: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f"{self.key=} must be a string")
        if not isinstance(self.chosen, int) or not 0 <= self.chosen < len(self.candidates):
            raise ValueError(f"{self.chosen=} must be the index of one of {len(self.candidates)} candidates")

    @classmethod
    def of(
        cls,
        inv: Invocation[Any, Any],
        candidates: Iterable[Candidate],
        chosen: int,
        step: str = "measured",
        complete: bool = True,
        source: str = "",
    ) -> "TunedCall":
        """Makes the entry for an invocation."""
        return cls(
            inv.kernel.name,
            inv.direction,
            inv.key,
            describe_key(inv.key),
            tuple(candidates),
            chosen,
            step,
            complete,
            source,
        )

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.chosen]

    def is_stale(self, kernel: Kernel[Any, Any]) -> bool:
        """True if the code that the winner depends on has changed since, or may have."""
        return not self.source or self.source != kernel.source(self.winner.config)

    @property
    def heuristic(self) -> Candidate | None:
        """The candidate that would have run without tuning, if it was measured."""
        return next((c for c in self.candidates if c.heuristic), None)

    @property
    def speedup(self) -> float | None:
        """The heuristic's time over the winner's."""
        before, after = self.heuristic and self.heuristic.time_ms, self.winner.time_ms
        return before / after if before and after else None

    @property
    def fastest(self) -> Candidate | None:
        """The eligible candidate with the lowest median; files may hold invalid medians, which are ignored."""
        eligible = [c for c in self.candidates if c.eligible and c.time_ms is not None and 0 <= c.time_ms < math.inf]
        return min(eligible, key=lambda c: c.time_ms or 0.0, default=None)

    @property
    def ranked(self) -> tuple[Any, ...]:
        """The winner's config, then those of the other measured, eligible candidates, fastest first.

        The heuristic's config precedes others that are faster by no more than 2 %, the noise of the coarsest timer,
        since the entry does not record which timer was used.
        """
        eligible = [c for c in self.candidates if c.eligible and c.time_ms is not None and c is not self.winner]

        def ranking_time(candidate: Candidate) -> float:
            return (candidate.time_ms or 0.0) * (1 - Timer.repeats_to if candidate.heuristic else 1.0)

        return (self.winner.config, *(c.config for c in sorted(eligible, key=ranking_time)))

    @property
    def regret_ms(self) -> float | None:
        """The winner's time minus that of the fastest candidate, within which the noise rule allowed it to win.

        ``None`` if the winner itself is not eligible or was not measured.
        """
        winner_ms, best = self.winner.time_ms, self.fastest
        if winner_ms is None or best is None or best.time_ms is None or not self.winner.eligible:
            return None
        return winner_ms - best.time_ms

    @property
    def regret(self) -> float | None:
        """``regret_ms`` relative to the time of the fastest candidate."""
        over, best = self.regret_ms, self.fastest
        return over / best.time_ms if over is not None and best is not None and best.time_ms else None

    @property
    def left_out(self) -> dict[str, str]:
        """Reasons why possibly fastest candidates were not measured, the first one for each implementation."""
        reasons: dict[str, str] = {}
        for candidate in self.candidates:
            if candidate.left_out:
                reasons.setdefault(kind_of(candidate.config) or str(candidate.config), candidate.error)
        return reasons

    def compact(self) -> "TunedCall":
        """A copy with only the winner, the heuristic and the fastest candidate of every kind of config."""
        kept, kinds = {self.chosen}, set()
        times = {i: c.time_ms for i, c in enumerate(self.candidates) if c.eligible and c.time_ms is not None}
        for i in sorted(times, key=lambda i: times[i]):
            kind = kind_of(self.candidates[i].config)
            if kind not in kinds:
                kinds.add(kind)
                kept.add(i)
        order = [i for i, c in enumerate(self.candidates) if i in kept or c.heuristic]
        return dataclasses.replace(
            self, candidates=tuple(self.candidates[i] for i in order), chosen=order.index(self.chosen)
        )

    def as_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"candidates": [c.as_json() for c in self.candidates]}

    @classmethod
    def of_json(cls, payload: dict[str, Any], lost: Lost | None = None) -> "TunedCall":
        """Reads what ``as_json`` returned.

        Args:
          lost: called with the error of each candidate that cannot be read, in place of raising it. Without the winner
            the fastest of the others wins.

        Raises:
          KeyError, TypeError, AttributeError, or one of ``REBUILD_ERRORS``: it cannot be read.
        """
        kept = dict(_readable(payload["candidates"], Candidate.of_json, lost))
        fields, chosen = payload | {"candidates": tuple(kept.values())}, payload["chosen"]
        if chosen in kept:
            call = cls(**(fields | {"chosen": list(kept).index(chosen)}))
        elif len(kept) == len(payload["candidates"]):
            call = cls(**fields)
        else:
            others = cls(**(fields | {"chosen": 0, "source": ""})) if kept else None
            if others is None or others.fastest is None:
                raise ValueError("none of its other candidates can win")
            call = dataclasses.replace(others, chosen=others.candidates.index(others.fastest))
        return dataclasses.replace(call, key=with_current_names(call.key))


def _readable[T](
    items: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], T], lost: Lost | None
) -> Iterator[tuple[int, T]]:
    """Yields what can be read, by index; errors of the rest are raised, or given to ``lost``."""
    for index, item in enumerate(items):
        try:
            yield index, read(item)
        except (KeyError, TypeError, AttributeError, *REBUILD_ERRORS) as error:
            if lost is None:
                raise
            lost(error)


@dataclasses.dataclass(frozen=True, slots=True)
class Confirmation:
    """Times of a whole program with the tuned configs and with those that would have run untuned.

    Attributes:
      tuned, untuned: samples of the whole program, taken alternately.
    """

    tuned: Timing
    untuned: Timing

    @property
    def speedup(self) -> float:
        """The untuned time divided by the tuned time."""
        return self.untuned.median_ms / self.tuned.median_ms

    @property
    def is_slower(self) -> bool:
        """True if the tuned configs made the program slower by more than the noise."""
        noise = max(self.tuned.noise_ms + self.untuned.noise_ms, Timer.repeats_to * self.untuned.median_ms)
        return self.tuned.median_ms > self.untuned.median_ms + noise

    def __str__(self) -> str:
        verdict = "slower: what wins alone can lose beside others" if self.is_slower else f"{self.speedup:.3g}×"
        return (
            f"the program takes {self.tuned.median_ms:.4g} ms with the winners and {self.untuned.median_ms:.4g} ms "
            f"without ({verdict})"
        )


@dataclasses.dataclass(repr=False)
class AutotuningResult(AbstractContextManager["AutotuningResult"]):
    """The calls that a tuning measured or found in a cache.

    As a context manager it makes its winners the configs of these calls, before every cache. Two results merge with
    ``|``; if both hold a call, the right operand wins.

    Attributes:
      entries: one ``TunedCall`` for each call.
      device: fingerprint of the device that was measured.
      toolchain: versions of the packages that compiled the candidates.
      interrupted: True if an interrupt ended the tuning.
      left_out: short forms of the calls that were not measured because the budget had ended; not kept by JSON.
      confirmation: times of the caller's program with and without the winners, if asked for; not kept by JSON.
    """

    entries: tuple[TunedCall, ...] = ()
    _: dataclasses.KW_ONLY
    device: str = ""
    toolchain: dict[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = dataclasses.field(default=False, compare=False)
    left_out: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    confirmation: Confirmation | None = dataclasses.field(default=None, init=False, compare=False)
    # Shared by all entries into this context, so that a function is traced only once in it.
    _overlay: ConfigCache | None = dataclasses.field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(entry, TunedCall) for entry in self.entries):
            raise TypeError(f"{self.entries=} must hold TunedCalls alone")

    def __iter__(self) -> Iterator[TunedCall]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, other: "AutotuningResult") -> "AutotuningResult":
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        merged = {entry.key: entry for entry in self.entries} | {entry.key: entry for entry in other.entries}
        return AutotuningResult(
            tuple(merged.values()),
            device=other.device or self.device,
            toolchain=self.toolchain | other.toolchain,
            interrupted=self.interrupted or other.interrupted,
            left_out=(*self.left_out, *other.left_out),
        )

    def __str__(self) -> str:
        """A table of the calls, each with its winner and what it gains; it is what the command line prints."""
        text = as_text(_table(self)) if self.entries else "no call was tuned"
        return text if self.confirmation is None else f"{text}\n{self.confirmation}"

    def __repr__(self) -> str:
        calls = ", ".join(f"{e.op} {e.direction}: {e.winner.config}" for e in self.entries)
        return f"AutotuningResult({len(self.entries)} calls on {self.device or 'no device'}: {calls})"

    def compact(self) -> "AutotuningResult":
        """A copy with only the few candidates of each call that show why its winner won."""
        return dataclasses.replace(self, entries=tuple(entry.compact() for entry in self.entries), left_out=())

    @property
    def configs(self) -> dict[str, Any]:
        """The winners by cache key."""
        return {entry.key: entry.winner.config for entry in self.entries}

    def cache(self) -> ConfigCache:
        """The winners as a cache."""
        cache = ConfigCache()
        for key, cfg in self.configs.items():
            cache.put(key, cfg)
        return cache

    def __enter__(self) -> "AutotuningResult":
        if self._overlay is None:
            self._overlay = self.cache()
        entered = overlay_cache(self._overlay)
        entered.__enter__()
        _ENTERED.set((*_ENTERED.get(), entered))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        *outer, entered = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        entered.__exit__(kind, error, traceback)

    def to_json(self) -> str:
        """The whole result as readable JSON, exceptions as their messages."""
        document = {
            "schema": SCHEMA,
            "device": self.device,
            "toolchain": self.toolchain,
            "interrupted": self.interrupted,
            "entries": [entry.as_json() for entry in self.entries],
        }
        return json.dumps(document, indent=1)

    def to_lock(self) -> Lock:
        """The winners as a lock, pinned to the source of the measured kernels.

        Raises:
          TypeError: a config has no JSON form.
          ValueError: there are no calls, they are for several devices, or the source of one that was measured is
            unknown.
        """
        if not self.entries:
            raise ValueError("a result without calls decides nothing that could be locked")
        unknown = next((entry for entry in self.entries if not entry.source), None)
        if unknown is not None:
            raise ValueError(
                f"it is not on record what source of {unknown.op} ({unknown.direction}) was measured for "
                f"{unknown.shapes}; tune it again"
            )
        decisions = {entry.key: Decision.of(entry.key, entry.winner.config, entry.source) for entry in self.entries}
        return Lock(self.device, self.toolchain, tuple(decisions.values()))

    def save_lock(self, path: str | os.PathLike[str]) -> Lock:
        """Replaces the content of a file by ``to_lock()`` and returns the lock; `Lock.add_to` merges instead.

        Raises:
          OSError: the file cannot be written.
          TypeError, ValueError: as ``to_lock``.
        """
        lock = self.to_lock()
        lock.save(path)
        return lock

    @classmethod
    def from_json(cls, text: str) -> "AutotuningResult":
        """Reads what ``to_json`` wrote.

        Raises:
          ValueError: the text is not such a result, has another schema, or names a type that cannot be found.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not the JSON of an AutotuningResult: {error!r}") from error
        return cls.of_document(document)

    @classmethod
    def of_document(
        cls, document: Any, *, lost: Lost | None = None, op: str | None = None, key: str | None = None
    ) -> "AutotuningResult":
        """Reads the data that ``to_json`` writes as text.

        Args:
          op: leave out the entries of other ops, and so the modules of their configs.
          key: leave out the entries of other calls.
          lost: called with the error of each entry or candidate that cannot be read, in place of raising it.

        Raises:
          ValueError: they are not such a result, have another schema, or name a type that cannot be found.
        """
        try:
            if document["schema"] != SCHEMA:
                raise ValueError(f"{document['schema']=} is not {SCHEMA}")
            read = functools.partial(TunedCall.of_json, lost=lost)
            wanted = document["entries"]
            if op is not None:
                wanted = [each for each in wanted if not isinstance(each, dict) or each.get("op", op) == op]
            if key is not None:
                dicts = (each for each in wanted if isinstance(each, dict))
                wanted = [each for each in dicts if with_current_names(str(each.get("key"))) == key]
            entries = tuple(entry for _, entry in _readable(wanted, read, lost))
            toolchain = dict(document["toolchain"])
            return cls(entries, device=document["device"], toolchain=toolchain, interrupted=document["interrupted"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the JSON of an AutotuningResult: {error!r}") from error


def _table(result: AutotuningResult) -> "Table":
    """A table with a row for each call: the chosen config, its comparison with the heuristic, and its source."""
    figures = ("time", "heuristic", "speedup", "tried")
    rows = table("tuned calls", "call, and what it will run with", *figures, "from", right=figures)
    rows.caption = "time: lower is better; speedup over the heuristic: higher is better"
    rows.caption_justify = "left"
    for call in result:
        heuristic = call.heuristic
        failed = sum(1 for candidate in call.candidates if candidate.failed)
        dropped = sum(1 for candidate in call.candidates if candidate.dropped)
        rows.add_row(
            lines(
                (f"{call.op} {call.direction}", ""),
                (call.shapes, "dim"),
                (f"→ {describe_config(call.winner.config)}", "bold"),
            ),
            milliseconds(call.winner.time_ms),
            milliseconds(heuristic.time_ms if heuristic else None),
            f"{call.speedup:.2f}×" if call.speedup else "–",
            f"{len(call.candidates) - dropped}"
            + (f", {failed} failed" if failed else "")
            + (f", {dropped} dropped" if dropped else ""),
            call.step if call.complete else f"{call.step}, cut short",
        )
    return rows
