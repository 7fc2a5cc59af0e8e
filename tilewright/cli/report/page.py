"""Renders a report as one self-contained HTML page without scripts, which is well-formed XML too."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tilewright._version import __version__
from tilewright.cli.output import counted
from tilewright.cli.report.calls import ReportedCall
from tilewright.cli.report.plot import field_plot
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.utils.text import milliseconds

# The table of a call has its MAX_ROWS fastest candidates, and at least BEST_OF_EACH of each implementation.
MAX_ROWS, BEST_OF_EACH = 60, 3
# Different messages of a call, names beside each, and its characters: the most that compilers print without a dump.
MAX_MESSAGES, MAX_NAMES, MAX_MESSAGE = 8, 12, 20_000

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def render(calls: Sequence[ReportedCall], *, date: str) -> str:
    """Renders the page; the same calls and date give the same text."""
    environment = jinja2.Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, "cut": _cut, "ms": milliseconds, "word": _word}
    template = environment.from_string((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.render(
        date=date,
        devices=_listed(c.device for c in calls),
        toolchains=_listed((_versions(c) for c in calls), "several, see Environment"),
        figures=_figures(calls),
        sections=[_section(c, number) for number, c in enumerate(calls, 1)],
        places=_places(calls),
        max_messages=MAX_MESSAGES,
        version=__version__,
    )


def visible(text: str) -> str:
    """Spells out characters that a page cannot hold or a reader cannot see: ``\\x1b``, ``\\u202e``, ``\\ud800``."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text.replace("\r\n", "\n")
    )


def _word(value: object, limit: int = 400) -> str:
    """A value as one line of at most ``limit`` characters; a cut is marked."""
    text = str(value)
    return " ".join(text[:limit].split()) + (f"… ({len(text) - limit:,} more characters)" if len(text) > limit else "")


def _cut(text: str) -> str:
    """The message of a compiler or a check; the middle of a long one is left out, and that is marked."""
    if len(text) <= MAX_MESSAGE:
        return text
    tail = MAX_MESSAGE // 4
    left_out = f"[… {len(text) - MAX_MESSAGE:,} of {len(text):,} characters left out …]"
    return f"{text[: MAX_MESSAGE - tail]}\n{left_out}\n{text[-tail:]}"


def _figures(calls: Sequence[ReportedCall]) -> dict[str, Any]:
    candidates = [candidate for reported in calls for candidate in reported.call.candidates]
    failed, dropped = sum(c.failed for c in candidates), sum(c.dropped for c in candidates)
    tuned = [c for c in calls if c.saved_ms is not None]
    saved = milliseconds(sum(c.saved_ms or 0.0 for c in tuned))
    before = milliseconds(sum(c.default_ms or 0.0 for c in tuned))
    speedups = [c.call.speedup for c in calls if c.call.speedup]
    return {
        "Calls": len(calls),
        "Candidates": f"{len(candidates)}"
        + (f", {failed} failed" if failed else "")
        + (f", {dropped} not measured" if dropped else ""),
        "Saved, one run of each call": f"{saved} of {before}" if tuned else "–",
        "Speedup, geometric mean": f"{statistics.geometric_mean(speedups):.2f}×" if speedups else "–",
    }


def _section(reported: ReportedCall, number: int) -> dict[str, Any]:
    """The values that the template shows of a call, beside the call's own."""
    call, title, field = reported.call, f"{number}. {_name(reported)}", reported.measured
    failures = [candidate for candidate in call.candidates if candidate.failed]
    dropped = [candidate for candidate in call.candidates if candidate.dropped]
    return {
        "reported": reported,
        "id": f"call-{number}",
        "title": title,
        "summary": (
            Markup('<a href="#call-{}">{}</a>').format(number, visible(title)),
            _word(call.shapes),
            milliseconds(reported.default_ms),
            milliseconds(call.winner.time_ms),
            f"{call.speedup:.2f}×" if call.speedup else "–",
            len(call.candidates),
            len(failures) or "–",
            _word(reported.origin),
        ),
        "plot": Markup(field_plot(reported, field, f"plot-{number}")) if field else None,
        "description": _description(reported, field) if field else "",
        "any_wrong": any(not candidate.eligible for candidate in field),
        "num_measured": len(field),
        "rows": _rows(reported),
        "messages": {"Failures": _messages(failures), "Not measured": _messages(dropped)},
    }


def _description(reported: ReportedCall, field: Sequence[Candidate]) -> str:
    """The plot in words, for those who cannot see it."""
    first, last = milliseconds(field[0].time_ms), milliseconds(field[-1].time_ms)
    parts = [f"The field of {_name(reported)}: {counted(len(field), 'candidate')}, medians from {first} to {last}"]
    for role, marked in (("chosen", reported.call.winner), ("default", reported.call.heuristic)):
        number = next((i for i, candidate in enumerate(field, 1) if candidate is marked), None)
        if marked and number:
            parts.append(f"the {role} one is number {number} with {milliseconds(marked.time_ms)}")
    return "; ".join(parts) + "."


def _rows(reported: ReportedCall) -> list[list[Any]]:
    """The rows of the fastest candidates, of the best of each implementation, and of the chosen and the default one."""
    chosen_ms = reported.call.winner.time_ms
    marked = {"chosen": reported.call.winner, "default": reported.call.heuristic}
    rows: list[list[Any]] = []
    of_each: Counter[str] = Counter()
    for rank, candidate in enumerate(reported.measured, 1):
        tags = [Markup(f'<span class="tag {tag}">{tag}</span>') for tag, each in marked.items() if each is candidate]
        # The first word names the implementation. One that was found wrong takes no row from one that is right.
        implementation = str(candidate.config).partition(" ")[0]
        of_each[implementation] += candidate.eligible
        is_best = candidate.eligible and of_each[implementation] <= BEST_OF_EACH
        if not (rank <= MAX_ROWS or is_best or tags):
            continue
        time_ms = candidate.time_ms
        rows.append(
            [
                rank,
                _word(candidate.config),
                milliseconds(time_ms),
                milliseconds(candidate.noise_ms if len(candidate.samples_ms) > 1 else None),
                len(candidate.samples_ms),
                f"{time_ms / chosen_ms:.2f}×" if time_ms and chosen_ms else "–",
                _word(candidate.check, 40),
                Markup(" ").join(tags),
            ]
        )
    return rows


def _messages(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The messages of candidates in order of first appearance; those that differ only in numbers count as one."""
    alike: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(_NUMBER.sub("0", str(candidate.error)), []).append(candidate)
    found = []
    for same in alike.values():
        names = "; ".join(_word(candidate.config) for candidate in same[:MAX_NAMES])
        more = f"; and {len(same) - MAX_NAMES} more" if len(same) > MAX_NAMES else ""
        differ = len({str(candidate.error) for candidate in same}) > 1
        remark = "; their numbers differ, these are of the first" if differ else ""
        found.append(
            {"count": len(same), "check": same[0].check, "names": names + more + remark, "text": str(same[0].error)}
        )
    return found


def _places(calls: Sequence[ReportedCall]) -> list[tuple[str, str, str]]:
    numbers: dict[tuple[str, str], list[str]] = {}
    for number, reported in enumerate(calls, 1):
        numbers.setdefault((_word(reported.device), _versions(reported)), []).append(str(number))
    return [(*place, ", ".join(each)) for place, each in numbers.items()]


def _name(reported: ReportedCall) -> str:
    return f"{_word(reported.call.op, 100)} {_word(reported.call.direction, 40)}"


def _versions(reported: ReportedCall) -> str:
    return ", ".join(f"{_word(name, 60)} {_word(version, 60)}" for name, version in sorted(reported.toolchain.items()))


def _listed(values: Iterable[Any], otherwise: str = "") -> str:
    """The distinct values in order of appearance; or ``otherwise``, if it is given and there are several."""
    different = list(dict.fromkeys(_word(value) for value in values))
    return otherwise if otherwise and len(different) > 1 else "; ".join(different)
