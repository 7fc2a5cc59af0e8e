"""Copies to the memory of other devices, which a producer makes between the loads of its own tiles.

A piece is loaded into shared memory and sent from there some steps later, both by TMA, so that the producer waits for
neither. What has arrived is told by semaphores on the device that it is sent to.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import BARRIER_BYTES, SHARED_ALIGNMENT
from tilewright.kernels.hopper.types import Ref, Scalar

PIECE_ROWS, PIECE_BYTES = 16, 512
"""Rows of a piece, and the bytes of each."""

MAX_DEVICES = 8
"""Devices of a mesh: each is a part of the producer's code, and all have links to each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The devices along a mesh axis.

    Attributes:
      axis: the mesh axis.
      axes: all axes of the mesh, in its order.
    """

    axis: str
    devices: int
    axes: tuple[str, ...]

    def index(self) -> jax.Array:
        """The number of this device."""
        return lax.axis_index(self.axis)

    def before(self, places: int) -> Any:
        """The device so many places before this one, as coordinates in the mesh.

        TMA descriptors of its memory are made on the host, which computes this again: by arithmetic alone.
        """
        other = lax.rem(self.index() + (self.devices - places), jnp.int32(self.devices))
        return tuple(other if name == self.axis else lax.axis_index(name) for name in self.axes)


def piece_shape(dtype: DTypeLike) -> tuple[int, int]:
    """Rows and columns of a piece."""
    return PIECE_ROWS, PIECE_BYTES // jnp.dtype(dtype).itemsize


def buffers_bytes(count: int) -> int:
    """Shared memory of so many buffers, with their barriers."""
    return count * (PIECE_ROWS * PIECE_BYTES + BARRIER_BYTES) + SHARED_ALIGNMENT


class PieceBuffers(NamedTuple):
    """Shared memory of a CTA for pieces that are on their way, and barriers of their loads."""

    pieces: Any
    loaded: Any

    @classmethod
    def scratch(cls, count: int, dtype: DTypeLike) -> "PieceBuffers":
        """Scratch types of so many buffers."""
        return cls(plgpu.SMEM((count, *piece_shape(dtype)), dtype), plgpu.Barrier(num_arrivals=1, num_barriers=count))


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """Pieces for another device, as events: number i sends piece i, and the one behind the last signals.

    Attributes:
      count: pieces; -1 where nothing is sent and nobody waits.
      source: of a piece, on this device.
      target: the same on the other one.
      signal: what is done when all have arrived.
    """

    buffers: PieceBuffers
    count: Scalar
    source: Callable[[Scalar], Ref]
    target: Callable[[Scalar], Ref]
    signal: Callable[[], None]

    def begin(self) -> None:
        """Loads the first piece."""
        pl.when(self.count > 0)(lambda: self.load(jnp.int32(0)))

    def load(self, index: Scalar) -> None:
        """Starts the load of a piece into its buffer."""
        pieces, loaded = self.buffers
        # The group before has ended with a wait for all of its stores, so every buffer is free when one begins.
        buffer = lax.rem(index, jnp.int32(pieces.shape[0]))
        plgpu.copy_gmem_to_smem(self.source(index), pieces.at[buffer], loaded.at[buffer])

    def event(self, index: Scalar) -> None:
        """Sends a piece and loads the next one; or signals that all are there."""
        (pieces, loaded), count = self.buffers, self.count
        buffers = pieces.shape[0]

        @pl.when(index < count)
        def _() -> None:
            buffer = lax.rem(index, jnp.int32(buffers))
            plgpu.barrier_wait(loaded.at[buffer])
            plgpu.copy_smem_to_gmem(pieces.at[buffer], self.target(index))

            @pl.when(index + 1 < count)
            def _() -> None:
                # What was sent from the next buffer has left it: only the stores from the others may still be read.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                self.load(index + 1)

        @pl.when(index == count)
        def _() -> None:
            # The copies are complete, not only what they read.
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            fence_copies()
            self.signal()

    def at_step(self, step: Scalar, pace: int) -> None:
        """Runs the event of a step, one for every ``pace`` of them."""
        pl.when(lax.rem(step, jnp.int32(pace)) == 0)(lambda: self.event(lax.div(step, jnp.int32(pace))))

    def finish(self, steps: Scalar, pace: int) -> None:
        """Runs the events that so many steps have left."""
        first = lax.div(jnp.asarray(steps, jnp.int32) + (pace - 1), jnp.int32(pace))
        lax.fori_loop(first, self.count + 1, lambda index, _: self.event(index), None)


def fence_copies() -> None:
    """Orders copies by TMA to and from global memory with loads, stores and signals of the same memory.

    To PTX these are two proxies. A wait for copies orders them for the thread that waits, a semaphore for no other.
    """

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        utils = importlib.import_module("jax.experimental.mosaic.gpu.utils")
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()
