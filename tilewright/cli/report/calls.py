"""The data of a report: tuned calls from result files and from the disk cache."""

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.cli.documents import Kind, document_of, kind_of
from tilewright.cli.entries import key_fields, open_cache
from tilewright.ops.config.persistent import Entry, untagged_if_loaded
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.utils.describe import describe_config, describe_key

# Longer than any sample; a larger value comes from a damaged file, and no axis could show it.
MAX_MS = 1e12


def valid_time(time_ms: float | None) -> float | None:
    """Returns the time if it is valid, else None."""
    return time_ms if time_ms is not None and 0 <= time_ms < MAX_MS else None


def time_of(candidate: Candidate | None) -> float | None:
    """The median of a candidate, if it has one."""
    return None if candidate is None else valid_time(candidate.time_ms)


@dataclasses.dataclass(frozen=True)
class ReportedCall:
    """One call of a report.

    Attributes:
      device: fingerprint of the device that was measured.
      toolchain: versions of the packages that compiled the candidates.
      origin: the file that holds it and the step that found it, or the disk cache.
      remarks: further facts about the measurement.
    """

    call: TunedCall
    device: str
    toolchain: Mapping[str, Any]
    origin: str
    remarks: tuple[str, ...] = ()

    @functools.cached_property
    def measured(self) -> list[Candidate]:
        """The candidates that have a time, fastest first."""
        return sorted((c for c in self.call.candidates if time_of(c) is not None), key=lambda c: time_of(c) or 0.0)

    @property
    def unmeasured(self) -> list[Candidate]:
        return [c for c in self.call.candidates if time_of(c) is None]

    @property
    def failed(self) -> list[Candidate]:
        return [c for c in self.call.candidates if c.failed]

    @property
    def dropped(self) -> list[Candidate]:
        return [c for c in self.call.candidates if c.dropped]

    @property
    def chosen(self) -> Candidate:
        return self.call.winner

    @property
    def default(self) -> Candidate | None:
        return self.call.heuristic

    @property
    def fastest(self) -> Candidate | None:
        return self.call.fastest

    @property
    def speedup(self) -> float | None:
        """The default's time divided by the chosen candidate's."""
        before, after = time_of(self.default), time_of(self.chosen)
        return before / after if before and after else None

    @property
    def saved_ms(self) -> float | None:
        before, after = time_of(self.default), time_of(self.chosen)
        return None if before is None or after is None else before - after

    @property
    def regret_ms(self) -> float | None:
        return None if time_of(self.chosen) is None else valid_time(self.call.regret_ms)

    @property
    def regret_is_noise(self) -> bool:
        """True if the two medians differ by no more than the sum of their noises."""
        if self.fastest is None or self.regret_ms is None:
            return False
        return self.regret_ms <= self.chosen.noise_ms + self.fastest.noise_ms


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def merged(*parts: Iterable[ReportedCall]) -> list[ReportedCall]:
    """Merges calls; a later part replaces the same call of an earlier one."""
    return list({reported.call.key: reported for part in parts for reported in part}.values())


def calls_of_file(file: Path) -> tuple[list[ReportedCall], int]:
    """The calls in a file that a command wrote, and the number of its entries without readable measurements.

    Reading a file imports nothing, so its kernels need not be installed.

    Raises:
      typer.BadParameter: the file cannot be read.
      ValueError: the file is of another kind or schema, or holds no call.
    """
    document = document_of(file)
    match kind_of(document):
        case Kind.EXPORT:
            found = _calls_of_export(file)
        case Kind.BENCH:
            found = _calls_of_bench(file, document), 0
        case Kind.LOCK:
            raise ValueError(f"it is {Kind.LOCK.value}")
        case _:
            found = _calls_of_tuning(file, document), 0
    if not found[0]:
        raise ValueError("it holds no call" + (" with measurements" if found[1] else ""))
    return found


def _calls_of_tuning(file: Path, document: dict[str, Any]) -> list[ReportedCall]:
    """Reads a result of ``tune --json``. Configs become text, so that nothing must be imported."""
    try:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # from_json reports these in more detail
            for entry in document["entries"]:
                for candidate in entry["candidates"]:
                    candidate["config"] = describe_config(candidate["config"])
        result = AutotuningResult.from_json(json.dumps(document))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    cut = ("the tuning was interrupted",) if result.interrupted else ()
    return [
        ReportedCall(call, result.device, result.toolchain, f"{file} ({call.step})", (*_remarks(call.complete), *cut))
        for call in result
    ]


def _calls_of_export(file: Path) -> tuple[list[ReportedCall], int]:
    """Reads a result of ``cache export``, with entries of all devices."""
    with tempfile.TemporaryDirectory() as folder:
        cache = open_cache(Path(folder))
        cache.import_(file)
        entries = cache.entries()
    devices = sorted({str(key_fields(entry).get("device", "?")) for entry in entries})
    parts = [calls_of_cache(entries, device, str(file)) for device in devices]
    return [reported for calls, _ in parts for reported in calls], sum(left_out for _, left_out in parts)


def _calls_of_bench(file: Path, document: dict[str, Any]) -> list[ReportedCall]:
    """Reads a result of ``bench --json``: each case in each direction is a call, each implementation a candidate."""
    try:
        environment, op = document["environment"], str(document["op"])
        fields: dict[tuple[str, str], list[Candidate]] = {}
        for each in document["measurements"]:
            candidate = Candidate(
                str(each["implementation"]),
                tuple(map(float, each["samples_ms"])),
                "unchecked" if each["samples_ms"] else "failed" if each.get("failed") else "dropped",
                str(each["remark"]) if not each["samples_ms"] else "",
            )
            fields.setdefault((str(each["case"]), str(each["stage"])), []).append(candidate)
        return [
            ReportedCall(
                TunedCall(op, stage, f"bench {op} {case} {stage}", case, *_with_default(candidates), "bench"),
                str(environment["fingerprint"]),
                dict(environment["toolchain"]),
                f"{file} (bench)",
                ("measured side by side, nothing was tuned: chosen is what runs where nothing else is asked for",),
            )
            for (case, stage), candidates in fields.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of a bench: {error!r}") from error


def _with_default(candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """The candidates, with the first that was measured marked as the default, and its index."""
    first = next((i for i, each in enumerate(candidates) if each.samples_ms), 0)
    return tuple(dataclasses.replace(each, heuristic=i == first) for i, each in enumerate(candidates)), first


def calls_of_cache(entries: Iterable[Entry], device: str, origin: str = "disk cache") -> tuple[list[ReportedCall], int]:
    """The calls on one kind of device that a cache has measurements of, and the number of entries without any.

    Args:
      place: a name of the cache, for people.
    """
    wanted = [entry for entry in entries if str(key_fields(entry).get("device", "?")) == device]
    found = [_call_of_entry(entry, device, origin) for entry in wanted]
    calls = [reported for reported in found if reported is not None]
    return sorted(calls, key=lambda r: (r.call.op, r.call.shapes, r.call.direction != "forward")), len(found) - len(
        calls
    )


def _call_of_entry(entry: Entry, device: str, origin: str) -> ReportedCall | None:
    try:
        candidates = tuple(_candidate(measurement) for measurement in entry.measurements)
        key = key_fields(entry)
        call = TunedCall(
            str(key.get("op", "?")),
            str(key.get("direction", "?")),
            str(entry.key),
            describe_key(entry.key),
            tuple(dataclasses.replace(c, config=describe_config(c.config)) for c in candidates),
            _chosen(entry, candidates),
            "disk",
            bool(entry.metadata.get("complete", True)),
        )
    except (TypeError, ValueError, AttributeError):  # written by another version, with other fields
        return None
    remarks = _remarks(call.complete)
    if entry.stale:
        remarks = (*remarks, "stale: measured with other versions than those installed now, so not in use")
    return ReportedCall(call, device, entry.toolchain, f"{origin}, {entry.created:%Y-%m-%d %H:%M}", remarks)


def _candidate(measurement: Mapping[str, Any]) -> Candidate:
    """A stored measurement; one whose config's type is not loaded is stored as tagged JSON."""
    return Candidate(**{name: untagged_if_loaded(value) for name, value in measurement.items()})


def _chosen(entry: Entry, candidates: Sequence[Candidate]) -> int:
    if entry.config is not None:
        return next((i for i, c in enumerate(candidates) if c.config == entry.config), -1)
    return next((i for i, c in enumerate(candidates) if c.time_ms == entry.metadata.get("time_ms")), -1)


def _remarks(complete: bool) -> tuple[str, ...]:
    return () if complete else ("cut short: some candidates were not tried",)
