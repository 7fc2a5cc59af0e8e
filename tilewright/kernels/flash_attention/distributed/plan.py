"""The steps of a ring: which rows of a device's queries meet which of the keys that it holds, with which band.

Everything is known while tracing: the layout gives the positions of each device's chunks, so the band of a pair of
chunks is that of the whole call shifted by the difference of their first positions.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.masking import FAR, Band

type Bounds = tuple[int, int] | None
"""The lowest and highest visible key − query of a pair of chunks, within the differences that occur; None: empty."""


MIN_LOOP = 4
"""Like steps from which on they are a loop. Fewer are unrolled: a loop copies what arrives into its carry."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of the queries and of the keys, both ``[start, stop)`` of a device's own, and the band that masks them.

    Attributes:
      band: of key − query in indices of the rectangle.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    band: Band

    @property
    def area(self) -> int:
        """Number of visible pairs."""
        height, width = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return _pairs_up_to(self.band.highest, height, width) - _pairs_up_to(self.band.lowest - 1, height, width)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of the ring.

    Attributes:
      shift: device i has the keys of device i − shift.
      plans: the different plans of the devices, each some rectangles; an empty one computes nothing.
      choice: for each device the index of its plan.
    """

    shift: int
    plans: tuple[tuple[Rectangle, ...], ...]
    choice: tuple[int, ...]

    def areas(self) -> list[int]:
        """Visible pairs of each device."""
        return [sum(rectangle.area for rectangle in self.plans[index]) for index in self.choice]


@functools.lru_cache(maxsize=256)
def ring_steps(layout: Layout, band: Band) -> tuple[Step, ...]:
    """The steps in which some device has a visible pair, by ascending shift."""
    # Devices agree on the steps that exist, for every device takes part in each hop.
    steps = []
    for shift in range(layout.shards):
        plans = [rectangles(layout, band, i, (i - shift) % layout.shards) for i in range(layout.shards)]
        if any(plans):
            # In one order whatever device 0 does, so that steps with the same plans are seen to have them.
            distinct = tuple(sorted(set(plans), key=_sort_key))
            steps.append(Step(shift, distinct, tuple(distinct.index(plan) for plan in plans)))
    return tuple(steps)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One step, or several with the same plans that run as a loop.

    Attributes:
      steps: their shifts ascend by one if there are several.
      hop_in: devices that keys travel from the step before to the first one; None for the first step of all.
      hop_out: devices that keys travel to the step after the last one; None for the last step of all.
    """

    steps: tuple[Step, ...]
    hop_in: int | None
    hop_out: int | None


def segments(steps: Sequence[Step]) -> list[Segment]:
    """The steps of a ring, with runs of at least `MIN_LOOP` like ones together, between the first and the last.

    A program then grows no further with the number of devices.
    """
    shifts = [step.shift for step in steps]
    hops = [None, *(after - before for before, after in itertools.pairwise(shifts)), None]
    found: list[Segment] = []
    start = 0
    for end in range(1, len(steps) + 1):
        like = (
            end < len(steps) - 1
            and steps[end].plans == steps[start].plans
            and hops[start] == hops[start + 1] == hops[end] == hops[end + 1] == 1
        )
        if not like:
            runs = [(start, end)] if end - start >= MIN_LOOP else [(i, i + 1) for i in range(start, end)]
            found += [Segment(tuple(steps[a:b]), hops[a], hops[b]) for a, b in runs]
            start = end
    return found


def rectangles(layout: Layout, band: Band, device: int, source: int) -> tuple[Rectangle, ...]:
    """The fewest rectangles that hold all visible pairs of a device's queries with the keys of another, and no more."""
    rows, columns = layout.q_length // layout.chunks, layout.kv_length // layout.chunks
    bounds = [
        [_bounds(band, q * rows - kv * columns, rows, columns) for kv in layout.chunk_numbers(source)]
        for q in layout.chunk_numbers(device)
    ]
    # Two chunks on either side: all four pairs at once, by rows, by columns, or each by itself. Fewer rectangles are
    # fewer launches and larger calls.
    best: list[Rectangle] | None = None
    for q_parts, kv_parts in itertools.product(_partitions(layout.chunks), repeat=2):
        found = [_rectangle(bounds, q, kv, rows, columns) for q, kv in itertools.product(q_parts, kv_parts)]
        if "no single band" in found:
            continue
        kept = [each for each in found if isinstance(each, Rectangle)]
        if best is None or len(kept) < len(best):
            best = kept
    assert best is not None  # single pairs of chunks always have one band
    return tuple(best)


def _partitions(chunks: int) -> list[list[range]]:
    """The ways to cut a device's chunks into runs: all together, and each by itself."""
    return [[range(chunks)]] if chunks == 1 else [[range(2)], [range(1), range(1, 2)]]


def _bounds(band: Band, delta: int, rows: int, columns: int) -> Bounds:
    """The clipped band of a pair of chunks whose first query is ``delta`` positions behind its first key."""
    low, high = max(band.lowest + delta, 1 - rows), min(band.highest + delta, columns - 1)
    return (low, high) if low <= high else None


def _rectangle(bounds: list[list[Bounds]], q: range, kv: range, rows: int, columns: int) -> Rectangle | str | None:
    """The rectangle of some chunks if one band describes it; None if no pair of it is visible."""
    # For each pair of chunks: how much further key − query is in its own indices than in those of the rectangle.
    offsets = {(a, b): (kv.start - b) * columns - (q.start - a) * rows for a in q for b in kv}
    wanted = {pair: bounds[pair[0]][pair[1]] for pair in offsets}
    if not any(wanted.values()):
        return None
    given = [(each, offsets[pair]) for pair, each in wanted.items() if each is not None]
    # A bound that clips none of the pairs it applies to is not known from them; it may be absent (FAR).
    lows = [-FAR, *(low - offset for (low, _), offset in given if low > 1 - rows)]
    highs = [FAR, *(high - offset for (_, high), offset in given if high < columns - 1)]
    for low, high in itertools.product(lows, highs):
        band = Band(low, high)
        if all(_bounds(band, offsets[pair], rows, columns) == each for pair, each in wanted.items()):
            return Rectangle((q.start * rows, q.stop * rows), (kv.start * columns, kv.stop * columns), band)
    return "no single band"


def _pairs_up_to(highest: int, height: int, width: int) -> int:
    """Number of pairs of 0 <= i < height and 0 <= j < width with j − i <= highest."""

    def total(count: int) -> int:
        """The sum of min(v, width) over 0 <= v < count."""
        if count <= 0:
            return 0
        ramp = min(count, width + 1)
        return ramp * (ramp - 1) // 2 + (count - ramp) * width

    # Row i sees clip(i' + highest + 1, 0, width) keys, i' running through the rows in ascending order.
    return total(highest + 1 + height) - total(highest + 1)


def _sort_key(plan: tuple[Rectangle, ...]) -> list[tuple[int, ...]]:
    return [(*part.rows, *part.columns, part.band.lowest, part.band.highest) for part in plan]
