"""Renders a report as one self-contained HTML page without scripts, which is well-formed XML too."""

import dataclasses
import re
import statistics
import unicodedata
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
from tilewright.ops.tuning.progress import milliseconds

# A page shows all candidates up to MAX_CANDIDATES. Beyond that it shows MAX_ROWS in total, but at least MIN_OF_EACH of
# each implementation, and MAX_MESSAGES different messages of a call.
MAX_CANDIDATES, MAX_ROWS, MAX_MESSAGES = 2000, 1500, 8
MIN_OF_EACH, MAX_OF_EACH = 3, 20
# Characters of all failures' messages together, then limits for one: the longest that compilers print without a dump.
ALL_MESSAGES = 1_000_000
MAX_MESSAGE, MIN_MESSAGE = 20_000, 500
MAX_NAMES = 12

_SUSPECT = re.compile(r"[^\n\t -~]")
# Control and invisible format characters (including those that change the writing direction), lone surrogates,
# separators.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def render(calls: Sequence[ReportedCall], *, date: str) -> str:
    """Renders the page; the same calls and date give the same text."""
    best = _rows_per_implementation(calls)
    messages = [_messages(reported, number, best) for number, reported in enumerate(calls, 1)]
    count = sum(len(same) for of_call in messages for same in of_call)
    limit = max(MIN_MESSAGE, min(MAX_MESSAGE, ALL_MESSAGES // max(1, count)))
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
        sections=[_section(c, number, best, messages[number - 1]) for number, c in enumerate(calls, 1)],
        places=_places(calls),
        all_shown=best is None,
        limit=limit,
        version=__version__,
    )


def visible(text: str) -> str:
    """Spells out characters that a page cannot hold or a reader cannot see: ``\\x1b``, ``\\u202e``, ``\\ud800``."""

    def spell(found: re.Match[str]) -> str:
        code = ord(found[0])
        no_character = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
        if unicodedata.category(found[0]) not in _INVISIBLE and not no_character:
            return found[0]
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return _SUSPECT.sub(spell, text.replace("\r\n", "\n"))


def _word(value: object, limit: int = 400) -> str:
    """A value as one line of at most ``limit`` characters; a cut is marked."""
    text = str(value)
    return " ".join(text[:limit].split()) + (f"… ({len(text) - limit:,} more characters)" if len(text) > limit else "")


def _cut(text: str, limit: int) -> str:
    """The message of a compiler or a check; the middle of a long one is left out, and that is marked."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    left_out = f"[… {len(text) - limit:,} of {len(text):,} characters left out …]"
    return f"{text[: limit - tail]}\n{left_out}\n{text[-tail:]}"


def _link(to: str, text: str) -> Markup:
    return Markup('<a href="#{}">{}</a>').format(to, visible(text))


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


def _section(
    reported: ReportedCall, number: int, best: int | None, messages: Sequence[Sequence["_Message"]]
) -> dict[str, Any]:
    """The values that the template shows of a call, beside the call's own."""
    call, title = reported.call, f"{number}. {_name(reported)}"
    rows, left_out = _rows(reported, best)
    field = [candidate for rank, candidate in rows if rank]
    message_of = {id(candidate): message for same in messages for message in same for candidate in message.candidates}
    return {
        "reported": reported,
        "id": f"call-{number}",
        "title": title,
        "summary": (
            _link(f"call-{number}", title),
            _word(call.shapes),
            milliseconds(reported.default_ms),
            milliseconds(call.winner.time_ms),
            f"{call.speedup:.2f}×" if call.speedup else "–",
            len(call.candidates),
            sum(candidate.failed for candidate in call.candidates) or "–",
            _word(reported.origin),
        ),
        "plot": Markup(field_plot(reported, field, f"plot-{number}")) if field else None,
        "description": _description(reported, field) if field else "",
        "any_wrong": any(not candidate.eligible for candidate in field),
        "rows": [_row(reported, candidate, rank, message_of.get(id(candidate))) for rank, candidate in rows],
        "left_out": left_out,
        "messages": messages,
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


def _row(reported: ReportedCall, candidate: Candidate, rank: int | None, message: "_Message | None") -> list[Any]:
    time_ms, chosen_ms = candidate.time_ms, reported.call.winner.time_ms
    marked = {"chosen": reported.call.winner, "default": reported.call.heuristic}
    remarks = [Markup(f'<span class="tag {tag}">{tag}</span>') for tag, each in marked.items() if each is candidate]
    if message is not None and message.shown:
        remarks.append(_link(message.id, f"{message.kind} {message.number}"))
    return [
        rank or "–",
        _word(candidate.config),
        milliseconds(time_ms),
        milliseconds(candidate.noise_ms if len(candidate.samples_ms) > 1 else None),
        len(candidate.samples_ms),
        f"{time_ms / chosen_ms:.2f}×" if time_ms and chosen_ms else "–",
        _word(candidate.check, 40),
        Markup(" ").join(remarks),
    ]


def _implementation(candidate: Candidate) -> str:
    """The implementation at the beginning of a candidate's config text; empty if it names none."""
    first = str(candidate.config).partition(" ")[0]
    return "" if "=" in first else first


def _rows_per_implementation(calls: Sequence[ReportedCall]) -> int | None:
    """The number of candidates of each implementation of each call that a page shows; ``None`` for all."""
    if sum(len(reported.call.candidates) for reported in calls) <= MAX_CANDIDATES:
        return None
    fields = sum(len(set(map(_implementation, reported.measured))) for reported in calls)
    return max(MIN_OF_EACH, min(MAX_OF_EACH, MAX_ROWS // max(1, fields)))


def _rows(reported: ReportedCall, best: int | None) -> tuple[list[tuple[int | None, Candidate]], str]:
    """The candidates that have a row, each with its rank if it has a time, and a remark on the others.

    These are all, or the best of each implementation with the chosen, default and fastest ones.
    """
    ranked: list[tuple[int | None, Candidate]] = list(enumerate(reported.measured, 1))
    if best is None:
        return [*ranked, *((None, candidate) for candidate in reported.unmeasured)], ""
    call = reported.call
    always_shown = {id(candidate) for candidate in (call.winner, call.heuristic, call.fastest)}
    num_right: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    kept = []
    for rank, candidate in ranked:
        name = _implementation(candidate)
        num_right[name] += candidate.eligible  # one that was found wrong takes no row from one that is right
        if id(candidate) in always_shown or (candidate.eligible and num_right[name] <= best):
            kept.append((rank, candidate))
        else:
            left_out[name] += 1
    names = ", ".join(f"{count} of {_word(name, 60)}" if name else f"{count}" for name, count in left_out.items())
    parts = [f"{left_out.total()} with a time ({names})"] if left_out else []
    parts += [f"{len(reported.unmeasured)} without"] if reported.unmeasured else []
    return kept, ", and ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    """A message and the candidates of a call that have it.

    Attributes:
      kind: "failure", or "reason" for candidates that were not measured.
      number: number within the kind, from 1.
      shown: True if the page shows it.
    """

    kind: str
    number: int
    candidates: list[Candidate]
    id: str
    shown: bool

    @property
    def count(self) -> int:
        return len(self.candidates)

    @property
    def text(self) -> str:
        return str(self.candidates[0].error)

    @property
    def names(self) -> str:
        """The configs that it concerns."""
        names = "; ".join(_word(candidate.config) for candidate in self.candidates[:MAX_NAMES])
        more = f"; and {self.count - MAX_NAMES} more" if self.count > MAX_NAMES else ""
        differ = len({str(candidate.error) for candidate in self.candidates}) > 1
        return names + more + ("; their numbers differ, these are of the first" if differ else "")


def _messages(reported: ReportedCall, number: int, best: int | None) -> list[list[_Message]]:
    """The messages of failures, and the reasons why candidates were not measured, in order of first appearance.

    Reasons that differ only in numbers, such as bounds, count as one; failures too, if there are many candidates.
    """
    made = []
    for kind in ("failure", "reason"):
        found: dict[str, list[Candidate]] = {}
        for candidate in reported.call.candidates:
            if candidate.failed if kind == "failure" else candidate.dropped:
                text = str(candidate.error)
                alike = text if kind == "failure" and best is None else _NUMBER.sub("0", text)
                found.setdefault(alike, []).append(candidate)
        made.append(
            [
                _Message(kind, i, same, f"call-{number}-{kind}-{i}", best is None or i <= MAX_MESSAGES)
                for i, same in enumerate(found.values(), 1)
            ]
        )
    return made


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
