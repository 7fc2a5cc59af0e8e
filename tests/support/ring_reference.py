"""The ring in numpy: the same verbs, one after another, with every state checked."""

import dataclasses

import numpy as np

from tests.support.ring_protocol import RingProtocol, Warpgroup
from tilewright.kernels.hopper.ring import RingPlan


class ReferenceRing:
    """A ring whose slots are numpy arrays, stored as the plan's shared layout says.

    Verbs that would wait on the card raise ``ProtocolError`` when what they wait for has not happened before. A
    consumer's verbs are those of ``seen_by(warpgroup)``.
    """

    def __init__(self, plan: RingPlan, name: str = "ring"):
        self.plan = plan
        self.protocol = RingProtocol(name, plan.num_stages, plan.consumers, max(plan.writers, 1))
        self._offsets = plan.tile.layout.matrix()
        self._shared = np.zeros((plan.num_stages, self._offsets.size), plan.tile.dtype)
        self._copies: dict[int, np.ndarray] = {}

    def load_from_dram(self, step: int, source: np.ndarray) -> np.ndarray | None:
        """Starts the load of ``source``; what it lacks of a tile is read as zeros, as beyond the end of an array."""
        padding = [(0, extent - size) for extent, size in zip(self.plan.tile.shape, source.shape, strict=True)]
        tile = np.pad(source, padding)
        if self.plan.writers:
            return tile
        self.protocol.begin_fill(step)
        self._copies[step] = tile
        return None

    def copy_to_shared(self, step: int, values: np.ndarray | None = None, *, rows: slice = slice(None)) -> None:
        """Writes one writer's ``values`` to ``rows`` of the slot; nothing where the copy engine does.

        Raises:
          ValueError: values for a ring that TMA fills, or none for one that it does not.
        """
        if (values is None) == bool(self.plan.writers):
            raise ValueError(f"values come with writers and without them there are none, got {self.plan.writers=}")
        if values is not None:
            self.protocol.begin_fill(step)
            self._shared[step % self.plan.num_stages, self._offsets[rows]] = values
            self.protocol.end_fill(step)

    def seen_by(self, warpgroup: Warpgroup) -> "ReferenceConsumer":
        """The consumer's side."""
        return ReferenceConsumer(self, warpgroup)

    def drain(self, steps: int) -> None:
        """Checks that the consumers have released all of so many steps."""
        self.protocol.drain(steps)

    def land(self, step: int) -> None:
        """Completes the copy of ``step`` if there is one: it may land any time until somebody has waited for it."""
        if step in self._copies:
            self._shared[step % self.plan.num_stages, self._offsets] = self._copies.pop(step)
            self.protocol.end_fill(step)

    def read(self, step: int) -> np.ndarray:
        """What the slot holds now, whatever its state."""
        return self._shared[step % self.plan.num_stages, self._offsets]


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceTile:
    """A slot as an operand: a view, read when the product that takes it is waited for."""

    ring: ReferenceRing
    step: int
    transposed: bool

    @property
    def values(self) -> np.ndarray:
        """What the slot holds now."""
        tile = self.ring.read(self.step)
        return tile.T if self.transposed else tile


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceConsumer:
    """A ring as one consumer sees it."""

    ring: ReferenceRing
    warpgroup: Warpgroup

    def load_from_shared(self, step: int) -> None:
        """Waits until the slot is full."""
        self.ring.land(step)
        self.ring.protocol.acquire(step, self.warpgroup.consumer)

    def get_mma_tile(self, step: int, transposed: bool = False) -> ReferenceTile:
        """The slot as an operand of ``wgmma``."""
        self.ring.protocol.use(step, self.warpgroup.consumer)
        return ReferenceTile(self.ring, step, transposed)

    def release(self, step: int) -> None:
        """Hands the slot back."""
        self.ring.protocol.release(step, self.warpgroup.consumer)


def wgmma(warpgroup: Warpgroup, accumulator: np.ndarray, a: np.ndarray | ReferenceTile, b: ReferenceTile) -> None:
    """Starts ``accumulator += a @ b``, which happens when ``warpgroup`` waits for it."""
    tiles = [operand for operand in (a, b) if isinstance(operand, ReferenceTile)]
    for tile in tiles:
        tile.ring.protocol.begin_read(tile.step, warpgroup.consumer)

    def finish() -> None:
        left = a.values if isinstance(a, ReferenceTile) else a
        accumulator[...] += left.astype(np.float32) @ b.values.astype(np.float32)
        for tile in tiles:
            tile.ring.protocol.end_read(tile.step, warpgroup.consumer)

    warpgroup.start(finish)
