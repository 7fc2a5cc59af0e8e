"""Checks the barriers of a whole Mosaic GPU kernel, at its real size, without running it.

What each warpgroup does to barriers and shared memory is played against the others with vector clocks. Found: accesses
that no barrier or wait orders (a product reads until its wait, a copy writes until its barrier), deadlocks, barriers
that complete twice before a waiter has looked, releases before the wait for the product that reads, products and
copies that meet what threads have read or written without a fence (``commit_smem``) of theirs, and whatever is still in
flight at the end. Not seen: orders that come from named barriers in inline code, and those between blocks.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import source_info_util

from tests.kernels.hopper.follow import Event, Region, Warpgroup, follow_kernels
from tests.support.ring_protocol import ProtocolError


def check_schedules(function: Callable[..., Any], *arguments: Any, max_programs: int | None = None) -> int:
    """Checks every kernel that ``function`` calls; returns the number of events that were played.

    Args:
      arguments: arrays or ``jax.ShapeDtypeStruct``; the control flow of a kernel may depend on known arrays only.
      max_programs: how many blocks of each grid to check, evenly spread; all of them by default.

    Raises:
      ProtocolError: a kernel breaks an order.
      NotImplementedError: the control flow of a kernel depends on data, or a kernel uses clusters.
      ValueError: there is no kernel.
    """
    events = 0

    def check(warpgroups: list[Warpgroup]) -> None:
        nonlocal events
        events += _play(warpgroups)

    if not follow_kernels(function, arguments, check, max_programs):
        raise ValueError("there is no Mosaic GPU kernel to check")
    return events


@dataclasses.dataclass(slots=True)
class _Access:
    """An access and the moments, per thread, from which on it is known to be over.

    Attributes:
      by_threads: of registers, not by a product or a copy, which see it only after a fence.
      fenced: the moment of that in its own thread; None before.
    """

    thread: int
    where: Any
    writes: bool
    region: Region
    by_threads: bool
    over: dict[int, int] = dataclasses.field(default_factory=dict)
    fenced: int | None = None


@dataclasses.dataclass(slots=True)
class _Barrier:
    arrived: int = 0
    clock: list[int] | None = None
    copies: list[_Access] = dataclasses.field(default_factory=list)
    completed: list[tuple[list[int], list[_Access]]] = dataclasses.field(default_factory=list)
    waits: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # moments, per thread


class _Game:
    """Plays the events in one order; vector clocks make the verdict hold for every order."""

    def __init__(self, threads: Sequence[Warpgroup]) -> None:
        self.threads = threads
        self.clocks = [[0] * len(threads) for _ in threads]
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        self.accesses: dict[int, list[_Access]] = {}
        self.products: list[list[list[_Access]]] = [[] for _ in threads]
        self.stores: list[list[list[_Access]]] = [[] for _ in threads]
        self.unfenced: list[list[_Access]] = [[] for _ in threads]
        self.waiters: dict[tuple[int, int], dict[int, int]] = {}
        self.guarded: dict[tuple[int, int], set[Region]] = {}
        for thread in threads:
            # A copy that follows a wait fills what the barrier guards: whoever arrives there gives that away.
            for before, event in itertools.pairwise(thread.events):
                if before.kind == "wait" and event.kind == "copy_in" and before.barrier is not None:
                    self.guarded.setdefault(before.barrier, set()).update(event.writes)
            for event in thread.events:
                if event.kind == "wait" and event.barrier is not None:
                    counts = self.waiters.setdefault(event.barrier, {})
                    counts[thread.thread] = counts.get(thread.thread, 0) + 1

    def error(self, thread: int, where: Any, why: str) -> ProtocolError:
        return ProtocolError(
            f"{self.threads[thread].name}: warpgroup {thread} at {source_info_util.summarize(where)}: {why}"
        )

    def known(self, access: _Access, thread: int) -> bool:
        clock = self.clocks[thread]
        return any(clock[other] >= moment for other, moment in access.over.items())

    def fenced(self, access: _Access, thread: int) -> bool:
        """False if threads have made an access and no fence of theirs lies between that and now."""
        if not access.by_threads:
            return True
        return access.fenced is not None and self.clocks[thread][access.thread] >= access.fenced

    def record(self, thread: int, event: Event) -> list[_Access]:
        made, by_threads = [], event.kind == "access"
        for regions, writes in ((event.reads, False), (event.writes, True)):
            for region in regions:
                earlier = self.accesses.setdefault(region[0], [])
                for access in earlier:
                    if not (writes or access.writes) or not _overlap(access.region, region):
                        continue
                    if not self.known(access, thread):
                        raise self.conflict(thread, event, region, writes, access, "nothing orders the two")
                    if not by_threads and not self.fenced(access, thread):
                        raise self.conflict(thread, event, region, writes, access, "no fence lies between the two")
                if writes:
                    # Ordered after all of these: whoever is ordered after this write is after them.
                    earlier[:] = [access for access in earlier if not _covers(region, access.region)]
                access = _Access(thread, event.where, writes, region, by_threads)
                earlier.append(access)
                made.append(access)
        if by_threads:
            self.unfenced[thread] += made
        return made

    def conflict(
        self, thread: int, event: Event, region: Region, writes: bool, access: _Access, why: str
    ) -> ProtocolError:
        did, does = "wrote" if access.writes else "read", "writes" if writes else "reads"
        there = source_info_util.summarize(access.where)
        return self.error(
            thread,
            event.where,
            f"{does} {_ranges(region)} of a buffer of which warpgroup {access.thread} {did} "
            f"{_ranges(access.region)} at {there}, and {why}",
        )

    def fence(self, thread: int) -> None:
        for access in self.unfenced[thread]:
            access.fenced = self.clocks[thread][thread]
        self.unfenced[thread].clear()

    def settle(self, thread: int, accesses: Sequence[_Access]) -> None:
        for access in accesses:
            access.over.setdefault(thread, self.clocks[thread][thread])

    def arrive(self, thread: int, event: Event, copies: Sequence[_Access] = ()) -> None:
        assert event.barrier is not None
        barrier = self.barriers.setdefault(event.barrier, _Barrier())
        clock = self.clocks[thread]
        barrier.clock = list(map(max, barrier.clock or clock, clock))
        barrier.copies += copies
        barrier.arrived += 1
        if barrier.arrived < event.arrivals:
            return
        phase = len(barrier.completed)
        for waiter, total in self.waiters.get(event.barrier, {}).items():
            if not 1 <= phase <= total:
                continue
            waits = barrier.waits.get(waiter, [])
            if len(waits) < phase or barrier.clock[waiter] < waits[phase - 1]:
                raise self.error(
                    thread, event.where, f"completes a barrier before warpgroup {waiter} has seen the last completion"
                )
        barrier.completed.append((barrier.clock, barrier.copies))
        barrier.arrived, barrier.clock, barrier.copies = 0, None, []

    def check_release(self, thread: int, event: Event) -> None:
        # Some other wait may yet order the two; the release is none that one may rely on.
        assert event.barrier is not None
        for guarded in self.guarded.get(event.barrier, ()):
            for access in itertools.chain(*self.products[thread]):
                if access.region[0] == guarded[0] and _overlap(access.region, guarded):
                    there = source_info_util.summarize(access.where)
                    raise self.error(
                        thread, event.where, f"releases {_ranges(guarded)}, which its product at {there} still reads"
                    )

    def step(self, thread: int, event: Event) -> bool:
        """Plays one event; False if it has to wait."""
        clock = self.clocks[thread]
        if event.kind == "wait":
            assert event.barrier is not None
            barrier = self.barriers.setdefault(event.barrier, _Barrier())
            waits = barrier.waits.setdefault(thread, [])
            if len(waits) == len(barrier.completed):
                return False
            seen, copies = barrier.completed[len(waits)]
            clock[:] = map(max, clock, seen)
            clock[thread] += 1
            waits.append(clock[thread])
            self.settle(thread, copies)
            return True
        clock[thread] += 1
        match event.kind:
            case "arrive":
                self.check_release(thread, event)
                self.arrive(thread, event)
            case "copy_in":
                self.arrive(thread, event, self.record(thread, event))
            case "wgmma":
                self.products[thread].append(self.record(thread, event))
            case "copy_out":
                self.stores[thread].append(self.record(thread, event))
            case "wgmma_wait" | "wait_out":
                flight = (self.products if event.kind == "wgmma_wait" else self.stores)[thread]
                while len(flight) > event.keep:
                    self.settle(thread, flight.pop(0))
            case "access":
                self.settle(thread, self.record(thread, event))
            case "fence":
                self.fence(thread)
        return True

    def end(self) -> None:
        for thread, warpgroup in enumerate(self.threads):
            for flight, what in ((self.products[thread], "products"), (self.stores[thread], "stores")):
                if any(flight):
                    where = warpgroup.events[-1].where
                    raise self.error(thread, where, f"ends with {len(flight)} {what} in flight")
        for barrier in self.barriers.values():
            if barrier.arrived:
                raise ProtocolError(f"{self.threads[0].name}: a barrier is left with {barrier.arrived} arrivals")
        for access in itertools.chain(*self.accesses.values()):
            if not access.over:
                raise self.error(access.thread, access.where, "the kernel ends, and nobody has waited for this")


def _ranges(region: Region) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in region[1]) + "]"


def _overlap(one: Region, other: Region) -> bool:
    # A view without an index has the rank of the tiles: all of the buffer.
    return len(one[1]) != len(other[1]) or all(
        start < begin + extent and begin < start + size
        for (start, size), (begin, extent) in zip(one[1], other[1], strict=True)
    )


def _covers(outer: Region, inner: Region) -> bool:
    return len(outer[1]) == len(inner[1]) and all(
        start <= begin and begin + extent <= start + size
        for (start, size), (begin, extent) in zip(outer[1], inner[1], strict=True)
    )


def _play(threads: Sequence[Warpgroup]) -> int:
    game = _Game(threads)
    places = [0] * len(threads)
    moved = True
    while moved:
        moved = False
        for thread, warpgroup in enumerate(threads):
            while places[thread] < len(warpgroup.events) and game.step(thread, warpgroup.events[places[thread]]):
                places[thread] += 1
                moved = True
    for thread, warpgroup in enumerate(threads):
        if places[thread] < len(warpgroup.events):
            event = warpgroup.events[places[thread]]
            raise game.error(thread, event.where, "waits for ever: the barrier is never completed")
    game.end()
    return sum(places)
