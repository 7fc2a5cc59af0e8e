"""The data of a report: tuned calls from result files and from the disk cache."""

import contextlib
import dataclasses
import json
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

# Samples beyond these come from a damaged file, and no axis could show them.
MIN_MS, MAX_MS = 1e-9, 1e12


@dataclasses.dataclass
class ReportedCall:
    """One call of a report. A candidate with samples that cannot be times has none here.

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

    def __post_init__(self) -> None:
        candidates = tuple(
            c if all(MIN_MS <= s < MAX_MS for s in c.samples_ms) else dataclasses.replace(c, samples_ms=())
            for c in self.call.candidates
        )
        self.call = dataclasses.replace(self.call, candidates=candidates)

    @property
    def measured(self) -> list[Candidate]:
        """The candidates that have a time, fastest first."""
        return sorted((c for c in self.call.candidates if c.samples_ms), key=lambda c: c.time_ms or 0.0)

    @property
    def unmeasured(self) -> list[Candidate]:
        return [c for c in self.call.candidates if not c.samples_ms]

    @property
    def default_ms(self) -> float | None:
        return None if self.call.heuristic is None else self.call.heuristic.time_ms

    @property
    def saved_ms(self) -> float | None:
        """The default's time minus the chosen candidate's."""
        before, after = self.default_ms, self.call.winner.time_ms
        return None if before is None or after is None else before - after


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
            samples = tuple(map(float, each["samples_ms"]))
            check = "unchecked" if samples else "failed" if each.get("failed") else "dropped"
            field = fields.setdefault((str(each["case"]), str(each["stage"])), [])
            default = bool(samples) and not any(candidate.samples_ms for candidate in field)
            remark = "" if samples else str(each["remark"])
            field.append(Candidate(str(each["implementation"]), samples, check, remark, default))
        return [
            ReportedCall(
                TunedCall(op, stage, f"bench {op} {case} {stage}", case, tuple(field), _default(field), "bench"),
                str(environment["fingerprint"]),
                dict(environment["toolchain"]),
                f"{file} (bench)",
                ("measured side by side, nothing was tuned: chosen is what runs where nothing else is asked for",),
            )
            for (case, stage), field in fields.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of a bench: {error!r}") from error


def _default(field: Sequence[Candidate]) -> int:
    return next((index for index, candidate in enumerate(field) if candidate.heuristic), 0)


def calls_of_cache(entries: Iterable[Entry], device: str, origin: str = "disk cache") -> tuple[list[ReportedCall], int]:
    """The calls on one kind of device that a cache has measurements of, and the number of entries without any."""
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
