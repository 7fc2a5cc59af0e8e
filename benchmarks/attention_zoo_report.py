"""What ``benchmarks.attention_zoo`` says of its record: a row per problem and direction, and shares of cells ahead.

A cell compares medians of one clock: the device's where every implementation has it, else the host's. Its ratio is the
best peer's time over ours, so 1 or more is ahead. The regret is our time over that of the best of our own backends.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.attention_peers import OURS

FA4 = f"{OURS} fa4"
TUNED = f"{OURS} tuned"
"""Ours with the winner of a tuning."""

LIBRARIES = ("cudnn", "fa4")
"""Backends of ours that call another library's kernels: a cell that one of them serves is not our merit."""

NEAR = 0.95
"""A ratio of at least this much is within 5 % of the best peer."""

WORST = 8
"""Cells listed as the worst."""

NAMES = {FA4: "FlashAttention-4"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One direction of one problem, in milliseconds.

    Attributes:
      ours_ms: None if ours was not timed, and ``status`` says why.
      backend: which of our backends served ours; empty if that is unknown.
      step: the step of the selection chain that chose it.
      own: the best of our backends, ours as it was chosen included.
      wall_ratio: the ratio by the host's clock, whatever clock the others have.
    """

    case: str
    direction: str
    held_out: bool
    status: str
    clock: str
    ours_ms: float | None
    backend: str
    step: str
    peer: str | None
    peer_ms: float | None
    own: str | None
    own_ms: float | None
    tuned_ms: float | None
    wall_ratio: float | None

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: 0 if only the peer was timed, None without a peer."""
        if self.peer_ms is None:
            return None
        return 0.0 if self.ours_ms is None else self.peer_ms / self.ours_ms

    @property
    def regret(self) -> float | None:
        """How much longer ours took than the best of our own backends, as a part of that."""
        return None if self.ours_ms is None or self.own_ms is None else self.ours_ms / self.own_ms - 1.0

    @property
    def tuned_ratio(self) -> float | None:
        return None if self.peer_ms is None or self.tuned_ms is None else self.peer_ms / self.tuned_ms

    @property
    def by_library(self) -> bool:
        """True if a library's kernels served ours."""
        return self.backend in LIBRARIES


def is_peer(name: str) -> bool:
    """FlashAttention-4 is called through our bridge, and is a peer all the same."""
    return name == FA4 or not (name == OURS or name.startswith(f"{OURS} "))


def _best(times: Mapping[str, float], among: Callable[[str], bool]) -> tuple[str | None, float | None]:
    names = [name for name in times if among(name)]
    best = min(names, key=lambda name: times[name], default=None)
    return best, None if best is None else times[best]


def row_of(cell: Mapping[str, Any]) -> Row:
    found = cell["implementations"]
    timed = {name: each for name, each in found.items() if each["status"] == "timed"}
    wall = {name: statistics.median(each["wall_ms"]) for name, each in timed.items()}
    by_device = bool(timed) and all(each["clock"] == "device" for each in timed.values())
    times = {name: each["median_ms"] for name, each in timed.items()} if by_device else wall
    peer, peer_ms = _best(times, is_peer)
    own, own_ms = _best(times, lambda name: name.startswith(OURS) and name != TUNED)
    wall_peer_ms = _best(wall, is_peer)[1]
    ours = found.get(OURS, {"status": "absent"})
    return Row(
        case=cell["case"],
        direction=cell["direction"],
        held_out=cell["held_out"],
        status=ours["status"],
        clock="device" if by_device else "wall",
        ours_ms=times.get(OURS),
        backend=ours.get("backend", ""),
        step=ours.get("step", ""),
        peer=peer,
        peer_ms=peer_ms,
        own=own,
        own_ms=own_ms,
        tuned_ms=times.get(TUNED),
        wall_ratio=wall_peer_ms / wall[OURS] if wall_peer_ms is not None and OURS in wall else None,
    )


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """The rows of a record, by name, forward first."""
    rows = [row_of(cell) for cell in record["cells"]]
    return sorted(rows, key=lambda row: (row.case, row.direction != "forward"))


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a set of rows comes to.

    Attributes:
      compared: cells with a peer; the shares are of these.
      ahead: share of cells in which ours is at least as fast as the best peer.
      near: share of cells in which ours is within 5 % of it, those ahead included.
      mean_ratio: geometric mean of the ratios where ours was timed.
      worst: rows with the smallest ratios.
      max_regret: the largest regret, and its mean beside it.
    """

    cells: int
    compared: int
    ahead: float
    near: float
    mean_ratio: float
    worst: tuple[Row, ...]
    max_regret: float
    mean_regret: float


def summary(rows: Iterable[Row]) -> Summary:
    rows = list(rows)
    compared = [(row.ratio, row) for row in rows if row.ratio is not None]
    count = len(compared) or math.nan
    logarithms = [math.log(ratio) for ratio, _ in compared if ratio > 0]
    regrets = [row.regret for row in rows if row.regret is not None]
    return Summary(
        cells=len(rows),
        compared=len(compared),
        ahead=sum(ratio >= 1.0 for ratio, _ in compared) / count,
        near=sum(ratio >= NEAR for ratio, _ in compared) / count,
        mean_ratio=math.exp(statistics.fmean(logarithms)) if logarithms else math.nan,
        worst=tuple(row for _, row in sorted(compared, key=lambda each: each[0])[:WORST]),
        max_regret=max(regrets, default=math.nan),
        mean_regret=statistics.fmean(regrets) if regrets else math.nan,
    )


def summaries(rows: Sequence[Row]) -> dict[str, Summary]:
    """Of all, of the development and of the held-out set: each with and without cells that a library served."""
    sets = {
        "all": rows,
        "development": [row for row in rows if not row.held_out],
        "held out": [row for row in rows if row.held_out],
    }
    found = {}
    for name, members in sets.items():
        for direction in ("", "forward", "backward"):
            chosen = [row for row in members if direction in ("", row.direction)]
            label = f"{name}, {direction}" if direction else name
            found[label] = summary(chosen)
            found[f"{label}, without libraries"] = summary(row for row in chosen if not row.by_library)
    return {name: each for name, each in found.items() if each.cells}


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)


def _served(row: Row) -> str:
    """Our backend, marked if it is a library."""
    return f"{row.backend or '–'}{'*' if row.by_library else ''}"


def _fields(row: Row) -> list[str]:
    return [
        f"{row.case}{' (held out)' if row.held_out else ''}",
        row.direction,
        _number(row.ours_ms, ".4g") if row.ours_ms is not None else row.status,
        "–" if row.peer is None else NAMES.get(row.peer, row.peer),
        _number(row.peer_ms, ".4g"),
        _number(row.ratio, ".3f"),
        _number(row.wall_ratio, ".3f"),
        _served(row),
        row.step or "–",
        _number(row.regret, ".1%"),
        _number(row.tuned_ratio, ".3f"),
    ]


HEADINGS = (
    "problem", "direction", "ours, ms", "best peer", "its ms", "ratio", "ratio, wall", "served by", "step", "regret",
    "tuned ratio",
)  # fmt: skip

SUMMARY_HEADINGS = (
    "cells", "count", "compared", "ahead", "within 5 %", "mean ratio", "regret at most", "regret, mean",
)  # fmt: skip


def _summary_fields(name: str, found: Summary) -> list[str]:
    return [
        name,
        str(found.cells),
        str(found.compared),
        _number(found.ahead, ".0%"),
        _number(found.near, ".0%"),
        _number(found.mean_ratio, ".3f"),
        _number(found.max_regret, ".1%"),
        _number(found.mean_regret, ".1%"),
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _worst(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.case} {row.direction}: {_number(row.ratio, '.3f')} of {NAMES.get(row.peer or '', row.peer)}, "
        f"served by {_served(row)}"
        for row in summary(rows).worst
    ]


NOTE = "* cuDNN's or FlashAttention-4's kernels, called by us"


def text(record: Mapping[str, Any]) -> str:
    """The record for a terminal."""
    rows = rows_of(record)
    if not rows:
        return "no cells"
    lines = _aligned([HEADINGS, *map(_fields, rows)])
    lines += ["", *_aligned([SUMMARY_HEADINGS, *(_summary_fields(*each) for each in summaries(rows).items())])]
    return "\n".join([*lines, "", "worst:", *(f"  {line}" for line in _worst(rows)), NOTE])


def _markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *lines)]


def markdown(record: Mapping[str, Any]) -> str:
    """The record as two Markdown tables, the summary first, and the worst cells."""
    rows = rows_of(record)
    shares = _markdown_table(SUMMARY_HEADINGS, (_summary_fields(*each) for each in summaries(rows).items()))
    worst = [f"- {line}" for line in _worst(rows)]
    cells = _markdown_table(HEADINGS, map(_fields, rows))
    return "\n".join([*shares, "", "The worst cells:", "", *worst, "", *cells, "", NOTE.replace("*", r"\*"), ""])
