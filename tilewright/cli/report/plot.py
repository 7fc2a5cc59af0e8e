"""A plot of a call's candidates: every sample a dot, every median a bar, fastest first."""

import math
from collections.abc import Sequence

from tilewright.cli.output import counted
from tilewright.cli.report.calls import ReportedCall, time_of, valid_time
from tilewright.cli.report.markup import Markup, element, word
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.progress import milliseconds

# In units of the picture, about half a pixel, so that paths have short whole numbers.
WIDTH, HEIGHT = 1920, 640
LEFT, RIGHT, TOP, BOTTOM = 150, 40, 110, 90
# If the slowest sample exceeds the fastest by more than this factor, the axis is logarithmic to separate the fast ones.
LOG_FROM = 6.0


class Axis:
    """Maps milliseconds to a height in the picture."""

    def __init__(self, times_ms: list[float]):
        low, high = min(times_ms), max(times_ms)
        self.log = low > 0 and high / low > LOG_FROM
        if self.log:
            self.low, self.high = low / 1.15, high * 1.15
        else:
            pad = max((high - low or high) * 0.08, 1e-9)
            self.low, self.high = max(0.0, low - pad), high + pad

    def at(self, time_ms: float) -> int:
        if self.log:
            low = math.log(self.low)
            share = (math.log(time_ms) - low) / (math.log(self.high) - low)
        else:
            share = (time_ms - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM))

    def ticks(self) -> list[float]:
        """Returns up to nine round numbers."""
        if not self.log:
            return list(_round_steps(self.low, self.high))
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**d for d in decades for f in factors if self.low <= f * 10.0**d <= self.high]
            if len(found) <= 9:
                return found
        return found[:: math.ceil(len(found) / 9)]


def _round_steps(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


class FieldPlot:
    """The plot of one call.

    Args:
      field: the candidates with a time, fastest first.
      name: an id within the page, from which the ids of title and description are derived.
      tooltips: give every candidate a tooltip with its config.
    """

    def __init__(self, reported: ReportedCall, field: Sequence[Candidate], name: str, *, tooltips: bool):
        self.reported = reported
        self.name = name
        self.tooltips = tooltips
        self.field = field
        self.axis = Axis([sample for c in self.field for sample in _samples(c)])
        self.slot = (WIDTH - LEFT - RIGHT) / len(self.field)

    def x(self, rank: int) -> int:
        return round(LEFT + (rank - 0.5) * self.slot)

    def _column(self, candidate: Candidate) -> int | None:
        """The candidate's column, from 1."""
        return next((i for i, other in enumerate(self.field, 1) if other is candidate), None)

    def markup(self) -> Markup:
        return element(
            "svg",
            element(
                "title", f"The field of {self.reported.call.op} {self.reported.call.direction}", id=f"{self.name}-t"
            ),
            element("desc", self._description(), id=f"{self.name}-d"),
            self._time_axis(),
            self._rank_axis(),
            self._samples(),
            self._medians(),
            *self._marks(),
            *(self._tooltips() if self.tooltips else ()),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_labelledby=f"{self.name}-t {self.name}-d",
        )

    def _description(self) -> str:
        first, last = time_of(self.field[0]), time_of(self.field[-1])
        parts = [f"{counted(len(self.field), 'candidate')}, medians from {milliseconds(first)} to {milliseconds(last)}"]
        for role, candidate in (("chosen", self.reported.chosen), ("default", self.reported.default)):
            rank = candidate and self._column(candidate)
            if candidate and rank:
                parts.append(f"the {role} one is number {rank} with {milliseconds(time_of(candidate))}")
        return "; ".join(parts) + "."

    def _time_axis(self) -> Markup:
        elements = [element("text", f"ms per call{', log scale' * self.axis.log}", x=16, y=36)]
        for tick in self.axis.ticks():
            y = self.axis.at(tick)
            elements.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
            elements.append(element("text", f"{tick:.4g}", class_="end", x=LEFT - 16, y=y + 9))
        return element("g", *elements, class_="axis")

    def _rank_axis(self) -> Markup:
        count, base = len(self.field), HEIGHT - BOTTOM
        step = next(s for s in (1, 2, 5, *(f * 10**k for k in range(1, 9) for f in (1, 2, 5))) if count / s <= 20)
        ranks = [1, *range(step, count + 1, step)] if step > 1 else range(1, count + 1)
        elements = [element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base)]
        elements += [element("text", rank, class_="middle", x=self.x(rank), y=base + 36) for rank in ranks]
        elements.append(element("text", "candidates, fastest first", class_="end", x=WIDTH - RIGHT, y=HEIGHT - 12))
        return element("g", *elements, class_="axis")

    def _samples(self) -> Markup:
        # Lines of zero length with round caps, which take a tenth of the bytes of circles.
        dots = dict.fromkeys(
            f"M{self.x(rank)} {self.axis.at(sample)}h0"
            for rank, candidate in enumerate(self.field, 1)
            for sample in _samples(candidate)
        )
        return element("path", class_="dots" if len(self.field) <= 100 else "dots many", d="".join(dots))

    def _medians(self) -> Markup:
        half = max(3, round(min(self.slot * 0.36, 26)))
        right, wrong = [], []
        for rank, candidate in enumerate(self.field, 1):
            x, y = self.x(rank), self.axis.at(time_of(candidate) or 0.0)
            if candidate.eligible:
                right.append(f"M{x - half} {y}h{2 * half}")
            else:
                wrong.append(f"M{x - 10} {y - 10}l20 20m0-20l-20 20")
        elements = [element("path", class_="bars", d="".join(right))]
        return element("g", *elements, *([element("path", class_="wrong", d="".join(wrong))] if wrong else []))

    def _marks(self) -> list[Markup]:
        chosen, default = self.reported.chosen, self.reported.default
        if default is chosen:
            return [self._mark(chosen, "chosen", "default, kept", 80)]
        marks = [self._mark(default, "default", "default", 44)] if default else []
        return [*marks, self._mark(chosen, "chosen", "chosen", 80)]

    def _mark(self, candidate: Candidate, kind: str, label: str, top: int) -> Markup:
        """A label at the top, a line down from it, and a disc (chosen) or an open square (default) on the median."""
        rank, time_ms = self._column(candidate), time_of(candidate)
        if rank is None or time_ms is None:
            return Markup()
        x, y = self.x(rank), self.axis.at(time_ms)
        side, shift = ("start", -12) if x < WIDTH / 2 else ("end", 12)
        if kind == "chosen":
            shape = element("circle", cx=x, cy=y, r=12)
        else:
            shape = element("rect", x=x - 13, y=y - 13, width=26, height=26)
        return element(
            "g",
            element("line", x1=x, x2=x, y1=top + 10, y2=max(top + 10, y - 16)),
            shape,
            element("text", f"{label}: {milliseconds(time_ms)}", class_=side, x=x + shift, y=top),
            class_=f"mark {kind}",
        )

    def _tooltips(self) -> list[Markup]:
        width = max(1, round(self.slot))
        return [
            element(
                "rect",
                element("title", f"{rank}. {milliseconds(time_of(c))}: {word(c.config)}"),
                class_="hit",
                x=self.x(rank) - width // 2,
                y=TOP,
                width=width,
                height=HEIGHT - TOP - BOTTOM,
            )
            for rank, c in enumerate(self.field, 1)
        ]


def _samples(candidate: Candidate) -> list[float]:
    """The valid samples, and the median of all."""
    return [s for s in (*candidate.samples_ms, candidate.time_ms) if valid_time(s) is not None and s is not None]
