"""What a ring's verbs may do and when: a state machine per slot that raises on the first verb out of order.

A slot goes empty → filling → full → in use → empty. The products of a warpgroup are asynchronous: a slot that one of
them reads is in use until the wait that covers it, so a release before that wait is an error here. On the card it
shows now and then as wrong numbers.
"""

import dataclasses
from collections.abc import Callable
from enum import Enum

from tilewright.errors import TilewrightError


class ProtocolError(TilewrightError):
    """A verb was used out of order."""


class SlotState(Enum):
    """What a stage of a ring holds."""

    EMPTY = "empty"
    FILLING = "filling"
    FULL = "full"
    IN_USE = "in use"


@dataclasses.dataclass(slots=True)
class _Slot:
    step: int  # the one that it holds, or waits for if it is empty
    filling: bool = False
    filled: int = 0  # writers that are done
    acquired: set[int] = dataclasses.field(default_factory=set)
    released: set[int] = dataclasses.field(default_factory=set)
    reads: dict[int, int] = dataclasses.field(default_factory=dict)  # in flight, per consumer


class RingProtocol:
    """The states of one ring's slots; consumers are numbered from 0."""

    def __init__(self, name: str, num_stages: int, consumers: int, writers: int = 1):
        self.name = name
        self.num_stages = num_stages
        self.consumers = consumers
        self.writers = writers
        self._slots = [_Slot(step) for step in range(num_stages)]

    def state(self, step: int) -> SlotState:
        """The state of the slot that ``step`` falls on."""
        slot = self._slots[step % self.num_stages]
        if slot.acquired:
            return SlotState.IN_USE
        if not slot.filling:
            return SlotState.EMPTY
        return SlotState.FULL if slot.filled == self.writers else SlotState.FILLING

    def _fail(self, verb: str, step: int, why: str) -> ProtocolError:
        index, state = step % self.num_stages, self.state(step)
        holds = "" if state is SlotState.EMPTY else f" with step {self._slots[index].step}"
        return ProtocolError(f"{self.name}: {verb} of step {step}: {why} (slot {index} is {state.value}{holds})")

    def begin_fill(self, step: int) -> None:
        """A load of ``step`` starts; further writers of the same step may join."""
        slot = self._slots[step % self.num_stages]
        if slot.filling and slot.step == step and slot.filled < self.writers and self.writers > 1:
            return
        if slot.filling:
            holding = sorted(set(range(self.consumers)) - slot.released)
            raise self._fail("load", step, f"consumers {holding} have not released the slot")
        if slot.step != step:
            raise self._fail("load", step, f"the slot's turn is step {slot.step}")
        slot.filling = True

    def end_fill(self, step: int) -> None:
        """One writer, or the copy engine, has written its part."""
        slot = self._slots[step % self.num_stages]
        if self.state(step) is not SlotState.FILLING or slot.step != step:
            raise self._fail("completion", step, "nothing is being loaded")
        slot.filled += 1

    def acquire(self, step: int, consumer: int) -> None:
        """``consumer`` has waited for ``step``."""
        slot = self._slots[step % self.num_stages]
        if slot.step != step or slot.filled < self.writers:
            raise self._fail("load_from_shared", step, f"consumer {consumer} would wait for a tile that is not there")
        if consumer in slot.acquired or consumer in slot.released:
            raise self._fail("load_from_shared", step, f"consumer {consumer} waits twice for one completion")
        slot.acquired.add(consumer)

    def _held(self, verb: str, step: int, consumer: int) -> _Slot:
        slot = self._slots[step % self.num_stages]
        if slot.step != step or consumer not in slot.acquired:
            raise self._fail(verb, step, f"consumer {consumer} has not waited for the tile")
        if consumer in slot.released:
            raise self._fail(verb, step, f"consumer {consumer} has released the tile")
        return slot

    def use(self, step: int, consumer: int) -> None:
        """``consumer`` takes the tile as an operand."""
        self._held("get_mma_tile", step, consumer)

    def begin_read(self, step: int, consumer: int) -> None:
        """An asynchronous product of ``consumer`` starts to read the tile."""
        slot = self._held("wgmma", step, consumer)
        slot.reads[consumer] = slot.reads.get(consumer, 0) + 1

    def end_read(self, step: int, consumer: int) -> None:
        """``consumer`` has waited for a product that read the tile."""
        slot = self._slots[step % self.num_stages]
        if slot.step != step or not slot.reads.get(consumer):
            raise self._fail("wgmma_wait", step, f"consumer {consumer} reads nothing there")
        slot.reads[consumer] -= 1

    def release(self, step: int, consumer: int) -> None:
        """``consumer`` hands the slot back; the last one empties it."""
        slot = self._slots[step % self.num_stages]
        if consumer in slot.released:
            raise self._fail("release", step, f"consumer {consumer} releases twice")
        slot = self._held("release", step, consumer)
        if reads := slot.reads.get(consumer):
            raise self._fail(
                "release", step, f"consumer {consumer} has {reads} wgmma in flight that read it: wait first"
            )
        slot.released.add(consumer)
        if len(slot.released) == self.consumers:
            self._slots[step % self.num_stages] = _Slot(step + self.num_stages)

    def drain(self, steps: int) -> None:
        """The producer has nothing more to load after so many steps."""
        for step in range(max(steps - self.num_stages, 0), steps):
            if self._slots[step % self.num_stages].step <= step:
                raise self._fail("drain", step, "the consumers are not done with it")
        for slot in self._slots:
            if slot.filling:
                raise self._fail("drain", slot.step, f"loaded although the producer is done after {steps} steps")


class Warpgroup:
    """The asynchronous products of one consumer: in flight from ``wgmma`` until the wait that covers them."""

    def __init__(self, consumer: int):
        self.consumer = consumer
        self._flight: list[Callable[[], None]] = []

    def start(self, finish: Callable[[], None]) -> None:
        """Puts a product in flight; ``finish`` reads its operands, as late as the card may."""
        self._flight.append(finish)

    def wgmma_wait(self, n: int = 0) -> None:
        """Waits until at most the newest ``n`` products are in flight."""
        if n < 0:
            raise ValueError(f"{n=} must not be negative")
        while len(self._flight) > n:
            self._flight.pop(0)()

    @property
    def in_flight(self) -> int:
        """Number of MMAs that have not been waited for."""
        return len(self._flight)
