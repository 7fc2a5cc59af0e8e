"""Copies to the memory of other devices, which a producer makes between the loads of its own tiles.

A piece is loaded into shared memory and sent from there some steps later, both by TMA, so that the producer waits for
neither. What has arrived is told by semaphores on the device that it is sent to.

Pieces are contiguous in memory, so that TMA needs an address and no descriptor: the kernel reads the other device's
address from XLA's table, which every execution writes. A descriptor is made by the host when XLA captures the kernel in
a CUDA graph, and the graph keeps it when the other device has its arrays elsewhere in a later execution.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import BARRIER_BYTES, SHARED_ALIGNMENT, TMA_STRIDE_BYTES
from tilewright.kernels.pallas_types import Ref, Scalar

PIECE_BYTES = 8192
"""The most bytes of a piece."""

MAX_DEVICES = 8
"""Devices of a mesh: of one host, where all have links to each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRing:
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

    def before(self, places: Scalar) -> Any:
        """The device so many places before this one, as coordinates in the mesh."""
        # Not negative, as lax.rem keeps the sign.
        other = lax.rem(self.index() + (self.devices - places), jnp.int32(self.devices))
        return tuple(other if name == self.axis else lax.axis_index(name) for name in self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A matrix ``[rows, columns]`` in pieces of ``[height, width]``: whole rows, or parts of one.

    Where they do not divide the matrix, the last ones overlap the ones before, with the same values.
    """

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "Pieces":
        """Large pieces of a matrix whose rows are multiples of 16 bytes."""
        rows, columns = shape
        size = jnp.dtype(dtype).itemsize
        # 2048 × 4096 × 14336 was gathered in 0.218 ms so, and in 0.265 by pieces of 16 × 512 bytes with a descriptor
        # (docs/notes/collective_matmul.md).
        # Whole rows where they fit, so that pieces are contiguous; else parts of one row.
        most = PIECE_BYTES // size
        width = share_of(columns, most, TMA_STRIDE_BYTES // size)
        return cls(rows, columns, share_of(rows, most // columns, 1) if width == columns else 1, width)

    @property
    def across(self) -> int:
        """The number of pieces in a row."""
        return -(-self.columns // self.width)

    @property
    def count(self) -> int:
        """The number of all pieces."""
        return -(-self.rows // self.height) * self.across

    def place(self, index: Scalar) -> tuple[Any, Any]:
        """The rows and columns of a piece, as slices of a reference."""
        row, column = lax.div(index, jnp.int32(self.across)), lax.rem(index, jnp.int32(self.across))
        # The last piece is moved back rather than cut: a TMA copy has a static size, and sending a few values twice is
        # harmless, as both copies write the same.
        first_row = jnp.minimum(row * self.height, self.rows - self.height)
        first_column = jnp.minimum(column * self.width, self.columns - self.width)
        return pl.ds(first_row, self.height), pl.ds(first_column, self.width)


def share_of(size: int, most: int, unit: int) -> int:
    """The largest multiple of ``unit`` up to ``most`` that divides ``size``, or near it where that is small."""
    # A divisor leaves nothing to overlap; one of less than half of a piece would take too many copies.
    shares = [share for share in range(unit, most + 1, unit) if size % share == 0]
    if shares and 2 * shares[-1] >= most:
        return shares[-1]
    number = -(-size // most)
    return -(-size // (number * unit)) * unit


def buffers_bytes(count: int) -> int:
    """Shared memory of so many buffers, with their barriers."""
    return count * (PIECE_BYTES + BARRIER_BYTES) + SHARED_ALIGNMENT


class PieceBuffers(NamedTuple):
    """Shared memory of a CTA for pieces that are on their way, and barriers of their loads."""

    pieces: Any
    loaded: Any

    @classmethod
    def scratch(cls, count: int, pieces: Pieces, dtype: DTypeLike) -> "PieceBuffers":
        """Scratch types of so many buffers."""
        buffers = plgpu.SMEM((count, pieces.height, pieces.width), dtype)
        return cls(buffers, plgpu.Barrier(num_arrivals=1, num_barriers=count))


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """Pieces for another device, as events: number i sends piece i, and the one behind the last signals.

    Attributes:
      count: pieces; -1 where nothing is sent and no device waits.
      source: of a piece, on this device.
      target: the same on the other one.
      signal: called when all pieces have arrived.
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
        in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(self.source(index), pieces.at[buffer], loaded.at[buffer], oob_mode=in_bounds)

    def event(self, index: Scalar) -> None:
        """Sends a piece and loads the next one; or signals that all are there."""
        (pieces, loaded), count = self.buffers, self.count
        buffers = pieces.shape[0]

        @pl.when(index < count)
        def _() -> None:
            buffer = lax.rem(index, jnp.int32(buffers))
            # No async-proxy fence: TMA has written what TMA reads, and the wait orders the two copies.
            plgpu.barrier_wait(loaded.at[buffer])
            plgpu.copy_smem_to_gmem(pieces.at[buffer], self.target(index))

            @pl.when(index + 1 < count)
            def _() -> None:
                # What was sent from the next buffer has left it: only the stores from the others may still be read.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                self.load(index + 1)

        @pl.when(index == count)
        def _() -> None:
            # Not read-only: the copies must have arrived when the other device sees the signal.
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
        from jax.experimental.mosaic.gpu import utils

        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()
