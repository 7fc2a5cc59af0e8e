"""Renders a report as one self-contained HTML page without scripts, which is well-formed XML too."""

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tilewright._version import __version__
from tilewright.cli.output import counted
from tilewright.cli.report.calls import ReportedCall, geometric_mean, time_of, valid_time
from tilewright.cli.report.markup import Markup, element, joined, word
from tilewright.cli.report.plot import FieldPlot
from tilewright.cli.report.shown import MAX_MESSAGES, Shown, by_message, rows_per_implementation
from tilewright.cli.report.style import STYLE
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.progress import milliseconds

# Characters of all failures' messages together, then limits for one: the longest that compilers print without a dump.
ALL_MESSAGES = 1_000_000
MAX_MESSAGE, MIN_MESSAGE = 20_000, 500
# Beyond these, repetitions of configs would make the page too large.
MAX_TOOLTIPS = 2000
MAX_NAMES = 12


def render(calls: Sequence[ReportedCall], *, date: str) -> str:
    """Renders the page; the same calls and date give the same text."""
    title = f"Tuning report: {counted(len(calls), 'call')} on {_listed(c.device for c in calls)}"
    best = rows_per_implementation(calls)
    sections = []
    all_groups = [_groups(reported, show_all=best is None) for reported in calls]
    limit = max(MIN_MESSAGE, min(MAX_MESSAGE, ALL_MESSAGES // max(1, sum(map(len, all_groups)))))
    all_shown = [Shown.of(reported, best) for reported in calls]
    tooltips = sum(len(shown.ranked) for shown in all_shown) <= MAX_TOOLTIPS
    for number, (reported, shown, groups) in enumerate(zip(calls, all_shown, all_groups, strict=True), 1):
        sections.append(_section(reported, number, shown, groups, limit=limit, tooltips=tooltips))
    body = element("main", _summary(calls, date), _calls_table(calls), *sections, _environment(calls))
    page = element("html", _head(title), element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _head(title: str) -> Markup:
    style = Markup(STYLE)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="generator", content=f"tilewright {__version__}"),
        element("title", title),
        element("style", style),
    )


def _summary(calls: Sequence[ReportedCall], date: str) -> Markup:
    saved = [c.saved_ms for c in calls if c.saved_ms is not None]
    before = sum(time_of(c.default) or 0.0 for c in calls if c.saved_ms is not None)
    mean = geometric_mean([c.speedup for c in calls if c.speedup])
    failed, dropped = sum(len(c.failed) for c in calls), sum(len(c.dropped) for c in calls)
    figures = {
        "Calls": len(calls),
        "Candidates": f"{sum(len(c.call.candidates) for c in calls)}"
        + (f", {failed} failed" if failed else "")
        + (f", {dropped} not measured" if dropped else ""),
        "Saved, one run of each call": f"{milliseconds(sum(saved))} of {milliseconds(before)}" if saved else "–",
        "Speedup, geometric mean": f"{mean:.2f}×" if mean else "–",
    }
    facts = {
        "Device": _listed(c.device for c in calls),
        "Toolchain": _listed((_versions(c) for c in calls), "several, see Environment"),
        "Date": date,
    }
    return element(
        "header",
        element("h1", "Tuning report"),
        _definitions(facts, "facts"),
        _definitions(figures, "figures", group=True),
    )


def _definitions(entries: dict[str, Any], kind: str, *, group: bool = False) -> Markup:
    pairs = [(element("dt", name), element("dd", value)) for name, value in entries.items()]
    return element("dl", *(element("div", *pair) if group else joined(*pair) for pair in pairs), class_=kind)


def _table(kind: str, caption: str, columns: Sequence[str], rows: Iterable[Markup]) -> Markup:
    """A table in a box that scrolls, also by keyboard. ``kind`` is the CSS class that styles its columns."""
    heads = element("tr", *(element("th", name, scope="col") for name in columns))
    table = element("table", element("caption", caption), element("thead", heads), element("tbody", *rows), class_=kind)
    box = "scroll tall" if kind == "field" else "scroll"
    return element("div", table, class_=box, tabindex=0, role="region", aria_label=caption)


def _calls_table(calls: Sequence[ReportedCall]) -> Markup:
    columns = ("call", "shapes", "default", "chosen", "speedup", "candidates", "failures", "known from")
    rows = [_call_row(reported, number) for number, reported in enumerate(calls, 1)]
    note = "Default: what would run without tuning. Chosen: what the tuning picked. Times are medians of one call."
    return element(
        "section",
        element("h2", "Calls", id="calls"),
        _table("calls", note, columns, rows),
        aria_labelledby="calls",
    )


def _call_row(reported: ReportedCall, number: int) -> Markup:
    call = reported.call
    figures = (
        milliseconds(time_of(reported.default)),
        milliseconds(time_of(reported.chosen)),
        f"{reported.speedup:.2f}×" if reported.speedup else "–",
        len(call.candidates),
        len(reported.failed) or "–",
    )
    return element(
        "tr",
        element("td", element("a", f"{number}. {_name(reported)}", href=f"#call-{number}")),
        element("td", word(call.shapes)),
        *(element("td", figure) for figure in figures),
        element("td", word(reported.origin)),
    )


def _section(
    reported: ReportedCall, number: int, shown: Shown, groups: Sequence["_Group"], *, limit: int, tooltips: bool
) -> Markup:
    name = f"call-{number}"
    return element(
        "section",
        element("h2", f"{number}. {_name(reported)}", id=name),
        element("p", element("code", word(reported.call.shapes, 2000))),
        _facts(reported),
        _figure(reported, shown, name, tooltips=tooltips),
        element("h3", "Candidates"),
        _candidates_table(reported, shown, groups, name),
        _left_out(reported, shown),
        _group_list(reported, shown, groups, name, limit),
        aria_labelledby=name,
    )


def _facts(reported: ReportedCall) -> Markup:
    default, chosen = reported.default, reported.chosen
    facts: dict[str, Any] = {"Chosen": joined(_config(chosen), _timing(chosen))}
    if default is chosen:
        facts["Default"] = "the same: it was kept"
    else:
        facts["Default"] = joined(_config(default), _timing(default)) if default else "not among the candidates"
    if reported.speedup and default is not chosen:
        facts["Speedup"] = f"{reported.speedup:.2f}×, {milliseconds(reported.saved_ms)} saved per call"
    facts["Regret"] = _regret(reported)
    facts["Known from"] = word(reported.origin)
    facts["Device"] = word(reported.device)
    if reported.remarks:
        facts["Note"] = "; ".join(reported.remarks)
    return _definitions(facts, "facts")


def _regret(reported: ReportedCall) -> Markup:
    regret, fastest, best = reported.regret_ms, reported.fastest, time_of(reported.fastest)
    if regret is None or fastest is None or best is None:
        return joined("unknown: no median of a right answer to compare with")
    if regret == 0:
        return joined("none: no right candidate has a lower median")
    share = f" ({regret / best:.1%})" if best else ""
    noise = ", no more than the two medians' noise" if reported.regret_is_noise else ""
    return joined(f"{milliseconds(regret)}{share} above the fastest right candidate{noise}: ", _config(fastest))


def _figure(reported: ReportedCall, shown: Shown, name: str, *, tooltips: bool) -> Markup:
    if not reported.measured:
        return element("p", "No candidate was measured, so there is nothing to draw.", class_="soft")
    order = "numbered as in the table" if shown.complete else "in the order of the table"
    caption = f"Each column is a candidate, {order}: dots are samples, the bar is their median."
    if reported.default is reported.chosen:
        caption += " The disc is the chosen candidate, which is the default too."
    else:
        caption += " The disc is the chosen candidate, the open square the default."
    if any(not c.eligible for c in shown.candidates):
        caption += " A cross is the median of one that failed."
    if reported.unmeasured:
        caption += f" Not drawn for want of a time: {counted(len(reported.unmeasured), 'candidate')}."
    plot = FieldPlot(reported, shown.candidates, f"{name}-plot", tooltips=tooltips).markup()
    return element(
        "figure",
        element("div", plot, class_="plot", tabindex=0, role="region", aria_label=f"Plot of call {name[5:]}"),
        element("figcaption", caption),
    )


def _candidates_table(reported: ReportedCall, shown: Shown, groups: Sequence["_Group"], name: str) -> Markup:
    group = {id(c): each for each in groups for c in each.candidates}
    columns = ("no.", "config", "median", "noise", "samples", "of chosen", "check", "remarks")
    ranked = [*shown.ranked, *((None, c) for c in shown.unmeasured)]
    rows = [_candidate_row(reported, c, rank, name, group.get(id(c))) for rank, c in ranked]
    count = counted(len(rows), "candidate") + ("" if shown.complete else f" of {len(reported.call.candidates)}")
    return _table("field", f"{count}, fastest first. Noise is half the distance between the quartiles.", columns, rows)


def _left_out(reported: ReportedCall, shown: Shown) -> Markup:
    """The number of candidates without a row, and where to find them."""
    if shown.complete:
        return Markup()
    slower = sum(shown.left_out.values())
    names = ", ".join(f"{count} of {word(name, 60)}" if name else str(count) for name, count in shown.left_out.items())
    parts = [f"{slower} with a time ({names})"] if slower else []
    parts += [f"{len(reported.unmeasured)} without"] if reported.unmeasured else []
    if not parts:
        return Markup()
    text = f"Shown are the best of every implementation. Left out: {', and '.join(parts)}. All are in "
    return element("p", text, element("code", word(reported.origin)), ".", class_="soft")


def _candidate_row(
    reported: ReportedCall, candidate: Candidate, rank: int | None, name: str, group: "_Group | None"
) -> Markup:
    time_ms, chosen = time_of(candidate), time_of(reported.chosen)
    tags = _tags(reported, candidate)
    figures = (
        milliseconds(time_ms),
        milliseconds(valid_time(candidate.noise_ms) if len(candidate.samples_ms) > 1 else None),
        len(candidate.samples_ms),
        f"{time_ms / chosen:.2f}×" if time_ms is not None and chosen else "–",
    )
    remarks: list[Markup] = [element("span", tag, class_=f"tag {tag}") for tag in tags]
    if group is not None and group.shown:
        remarks.append(element("a", f"{group.kind} {group.number}", href=f"#{group.id_of(name)}"))
    return element(
        "tr",
        element("td", rank or "–"),
        element("td", word(candidate.config)),
        *(element("td", figure) for figure in figures),
        element("td", word(candidate.check, 40)),
        element("td", joined(*remarks, between=" ")),
        class_=tags[0] if tags else None,
    )


def _tags(reported: ReportedCall, candidate: Candidate) -> list[str]:
    marked = {"chosen": reported.chosen, "default": reported.default}
    return [tag for tag, marked_candidate in marked.items() if marked_candidate is candidate]


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Candidates of a call with the same message.

    Attributes:
      kind: "failure", or "reason" for candidates that were not measured.
      number: number within the kind, from 1.
      shown: True if the page shows the message.
    """

    kind: Literal["failure", "reason"]
    number: int
    candidates: list[Candidate]
    shown: bool

    def id_of(self, name: str) -> str:
        return f"{name}-{self.kind}-{self.number}"


def _groups(reported: ReportedCall, *, show_all: bool) -> list[_Group]:
    """Groups all candidates that failed or were not measured by their message."""
    # Bounds in the reasons differ between candidates, which is not worth a group each.
    by_kind = {
        "failure": by_message(reported.failed, ignore_numbers=not show_all),
        "reason": by_message(reported.dropped, ignore_numbers=True),
    }
    return [
        _Group(kind, number, same, show_all or number <= MAX_MESSAGES)  # type: ignore[arg-type]
        for kind, found in by_kind.items()
        for number, same in enumerate(found, 1)
    ]


def _group_list(reported: ReportedCall, shown: Shown, groups: Sequence[_Group], name: str, limit: int) -> Markup:
    elements = []
    for kind, title, total in (
        ("failure", "Failures", len(reported.failed)),
        ("reason", "Not measured", len(reported.dropped)),
    ):
        groups_of_kind = [group for group in groups if group.kind == kind]
        elements += [element("h3", f"{title}: {counted(total, 'candidate')}")] if groups_of_kind else []
        for group in groups_of_kind:
            if group.shown:
                elements += _group(group, name, limit, numbers_differ=not shown.complete or kind == "reason")
        not_shown = [group for group in groups_of_kind if not group.shown]
        if not_shown:
            num_candidates = counted(sum(len(group.candidates) for group in not_shown), "candidate")
            text = f"Left out: {counted(len(not_shown), 'further message')}, of {num_candidates}. All are in "
            elements.append(element("p", text, element("code", word(reported.origin)), ".", class_="soft"))
    return joined(*elements)


def _group(group: _Group, name: str, limit: int, *, numbers_differ: bool) -> list[Markup]:
    candidates = group.candidates
    names = joined(*(_config(c) for c in candidates[:MAX_NAMES]), between="; ")
    more = f"; and {len(candidates) - MAX_NAMES} more" if len(candidates) > MAX_NAMES else ""
    if numbers_differ and len({str(c.error) for c in candidates}) > 1:
        more += "; their numbers differ, these are of the first"
    check = f", check {word(candidates[0].check, 40)}" if group.kind == "failure" else ""
    head = f"{group.kind.capitalize()} {group.number}, {counted(len(candidates), 'candidate')}{check}: "
    head_line = element("p", element("strong", head), names, more, id=group.id_of(name))
    return [head_line, _message(str(candidates[0].error), limit)]


def _message(message: str, limit: int) -> Markup:
    """Formats the message of a compiler or a check; the middle of a long one is left out, and that is marked."""
    if len(message) <= limit:
        return element("pre", message, tabindex=0)
    tail = limit // 4
    head = limit - tail
    left_out = element("strong", f"\n[… {len(message) - limit:,} of {len(message):,} characters left out …]\n")
    return element("pre", message[:head], left_out, message[-tail:], tabindex=0)


def _environment(calls: Sequence[ReportedCall]) -> Markup:
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, reported in enumerate(calls, 1):
        numbers.setdefault((word(reported.device), _versions(reported)), []).append(number)
    rows = [
        element("tr", element("td", device), element("td", versions), element("td", _ranges(call_numbers)))
        for (device, versions), call_numbers in numbers.items()
    ]
    return element(
        "section",
        element("h2", "Environment", id="environment"),
        _table("places", "What was measured on what", ("device", "toolchain", "calls"), rows),
        element("p", f"Written by tilewright {__version__}.", class_="soft"),
        aria_labelledby="environment",
    )


def _name(reported: ReportedCall) -> str:
    return f"{word(reported.call.op, 100)} {word(reported.call.direction, 40)}"


def _config(candidate: Candidate) -> Markup:
    return element("code", word(candidate.config))


def _timing(candidate: Candidate) -> str:
    time_ms = time_of(candidate)
    noise = f" ± {milliseconds(valid_time(candidate.noise_ms))}" if len(candidate.samples_ms) > 1 else ""
    return f", {milliseconds(time_ms)}{noise}" if time_ms is not None else ", no time"


def _versions(reported: ReportedCall) -> str:
    return ", ".join(f"{word(name, 60)} {word(version, 60)}" for name, version in sorted(reported.toolchain.items()))


def _listed(values: Iterable[Any], otherwise: str = "") -> str:
    """The distinct values in order of appearance; or ``otherwise``, if it is given and there are several."""
    different = list(dict.fromkeys(word(value) for value in values))
    return otherwise if otherwise and len(different) > 1 else "; ".join(different)


def _ranges(numbers: Sequence[int]) -> str:
    """Formats 1, 2, 3, 5 as ``1–3, 5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("–".join(map(str, span)) for span in spans)
