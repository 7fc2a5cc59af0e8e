"""The buffer of keys and values in general terms: strips, how threads and warps divide them, and the budget.

The kernels for Hopper have whole tiles, which wgmma reads from shared memory (``kernels/hopper/shared.py``); here is
what other matrix instructions want, to try the layouts on.
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import jax.numpy as jnp

from tilewright.kernels.hopper.layouts import (
    Layout,
    Swizzle,
    SwizzledLayout,
    blocked_product,
    row_major,
)
from tilewright.kernels.hopper.limits import SHARED_ALIGNMENT, SHARED_BYTES
from tilewright.kernels.hopper.shared import SharedTile, aligned_bytes

VECTOR_BYTES = 16
"""The widest load or store of one thread."""


class Role(Enum):
    """What an operand is to attention."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"


def over_budget(parts: Mapping[str, int], limit: int = SHARED_BYTES) -> str | None:
    """The reason why buffers of so many bytes do not fit one block's shared memory, or None if they do.

    Each part takes whole units of Mosaic's alignment.
    """
    aligned = {name: -(-size // SHARED_ALIGNMENT) * SHARED_ALIGNMENT for name, size in parts.items()}
    total = sum(aligned.values())
    if total <= limit:
        return None
    listed = ", ".join(f"{name} {size}" for name, size in aligned.items())
    return f"{total} bytes of shared memory are wanted, a block has {limit}: {listed}"


@dataclasses.dataclass(frozen=True, slots=True)
class KVBufferConfig:
    """How a thread block moves one of the two operands, keys or values, through shared memory in strips.

    A block covers ``block_n`` keys and a warp ``warp_n`` of them; a strip is ``block_k`` long in the dimension that the
    product sums over: the depth for keys, the keys for values. ``depth`` is the head dimension. The matrix instruction
    is ``mma_n`` wide and ``mma_k`` deep; ``group_size`` of them are chained, so that a fragment is one 16-byte load.
    ``decode`` (one query, many keys) stores strips row-major, prefill stores vectors column by column, and ``swizzle``
    permutes either.
    """

    role: Role
    dtype: Any
    block_n: int
    warp_n: int
    block_k: int
    depth: int
    mma_n: int
    mma_k: int
    num_threads: int
    num_stages: int = 1
    group_size: int = 1
    decode: bool = False
    swizzle: Swizzle | None = None
    shared_limit: int = SHARED_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "role", Role(self.role))
        if self.role not in (Role.KEY, Role.VALUE):
            raise ValueError(f"only keys and values are buffered in strips, got {self.role=}")
        self._check_sizes()
        self._check_strips()
        self._check_threads()
        if reason := over_budget({self.role.value: self.shared_bytes}, self.shared_limit):
            raise ValueError(f"{reason}, from {self.block_tile=}, {self.num_stages=}")

    def _check_sizes(self) -> None:
        for name in (
            "block_n",
            "warp_n",
            "block_k",
            "depth",
            "mma_n",
            "mma_k",
            "num_threads",
            "num_stages",
            "group_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def _check_strips(self) -> None:
        if self.block_n % self.warp_n:
            raise ValueError(f"warps must divide the block, got {self.block_n=}, {self.warp_n=}")
        if self.role is Role.VALUE and self.depth % self.num_warps_n:
            raise ValueError(f"{self.num_warps_n=} warps must divide the columns of the values, got {self.depth=}")
        if self.extent % self.block_k:
            raise ValueError(f"strips of {self.block_k=} do not divide the {self.extent} that are summed over")
        # The pipeline loads strip i + 1 while it multiplies strip i, and the other operand's first at the last but one.
        if self.num_strips < 2:
            raise ValueError(f"two strips at least, got {self.num_strips} of {self.block_k=} in {self.extent}")
        if self.block_tile[1] % self.simd_width:
            raise ValueError(f"vectors of {self.simd_width} must divide a row, got {self.block_tile=}")
        if self.swizzle is not None and self.num_vectors * self.simd_width % self.swizzle.period:
            raise ValueError(f"{self.swizzle=} leaves a strip of {self.block_tile=}, its period does not divide it")

    def _check_threads(self) -> None:
        if not self.decode:
            if self.num_threads % 4:
                raise ValueError(f"four threads share a row, got {self.num_threads=}")
            return
        vectors_per_row = self.row_stride // self.simd_width
        if min(self.num_threads, self.num_vectors) % vectors_per_row:
            raise ValueError(
                f"threads must fill whole rows of {vectors_per_row} vectors, got {self.num_threads=}, "
                f"{self.num_vectors=}"
            )

    @property
    def extent(self) -> int:
        """Length of the dimension that the product sums over."""
        return self.depth if self.role is Role.KEY else self.block_n

    @property
    def num_strips(self) -> int:
        """Steps of the iterator over one block."""
        return self.extent // self.block_k

    @property
    def block_tile(self) -> tuple[int, int]:
        """Rows (keys) and columns (depth) of a strip."""
        if self.role is Role.KEY:
            return self.block_n, self.block_k
        return self.block_k, self.depth

    @property
    def warp_tile(self) -> tuple[int, int]:
        """What one warp reads of a strip."""
        if self.role is Role.KEY:
            return self.warp_n, self.block_k
        return self.block_k, self.depth // self.num_warps_n

    @property
    def wsize(self) -> int:
        """Extent of the warp's tile along the instruction's N."""
        return self.warp_tile[0] if self.role is Role.KEY else self.warp_tile[1]

    @property
    def iterator_axis(self) -> int:
        """Axis of the global tensor along which strips follow: 1, the depth, for keys and 0, the keys, for values."""
        return 1 if self.role is Role.KEY else 0

    @property
    def transposed(self) -> bool:
        """Whether the product takes the tile transposed."""
        return self.role is Role.KEY

    @property
    def num_warps_n(self) -> int:
        """Warps side by side along the keys."""
        return self.block_n // self.warp_n

    @property
    def num_mmas(self) -> int:
        """Instructions along N per warp."""
        return -(-self.wsize // self.mma_n)

    @property
    def num_k_tiles(self) -> int:
        """Chains of instructions per strip."""
        return -(-self.block_k // (self.mma_k * self.group_size))

    @property
    def simd_width(self) -> int:
        """Elements of one 16-byte vector."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def num_repeats(self) -> int:
        """Vectors per row of a strip."""
        return self.block_tile[1] // self.simd_width

    @property
    def num_vectors(self) -> int:
        """Vectors per strip."""
        return self.block_tile[0] * self.num_repeats

    @property
    def row_stride(self) -> int:
        """Distance of a strip's rows in decode's shared layout, in elements."""
        return self.block_tile[1]

    @property
    def shared_layout(self) -> SwizzledLayout:
        """Where a strip is in shared memory."""
        rows, columns = self.block_tile
        if self.decode:
            return SwizzledLayout(row_major(rows, columns), self.swizzle)
        block = row_major(rows, self.simd_width)
        return SwizzledLayout(blocked_product(block, row_major(1, self.num_repeats)), self.swizzle)

    @property
    def thread_layout(self) -> Layout:
        """Rows × columns of threads, each with one vector, that load from device memory at a time."""
        if not self.decode:
            return row_major(self.num_threads // 4, 4)
        threads = min(self.num_threads, self.num_vectors)
        return row_major(threads * self.simd_width // self.row_stride, self.row_stride // self.simd_width)

    @property
    def load_vectors(self) -> int:
        """Vectors of registers that the loads in flight take per thread."""
        return self.num_stages * self.num_mmas * self.num_k_tiles

    @property
    def mma_vectors(self) -> int:
        """Vectors of registers of one step's fragments per thread."""
        return self.num_mmas

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all stages."""
        return aligned_bytes((self.num_stages, *self.block_tile), self.dtype)

    def bounds(self, valid_rows: int, row_stride: int) -> int:
        """Offset in the global tensor from which on loads are masked, with rows ``row_stride`` elements apart.

        Raises:
          ValueError: there are fewer than no rows, or the rows overlap.
        """
        if valid_rows < 0:
            raise ValueError(f"{valid_rows=} must not be negative")
        if row_stride < self.depth:
            raise ValueError(f"rows of {self.depth=} overlap at {row_stride=}")
        return valid_rows * row_stride

    def tile(self, strips: int = 1, swizzle: int | None = None) -> SharedTile:
        """The tile that holds ``strips`` strips as an operand of wgmma, which reads shared memory without fragments.

        Raises:
          ValueError: there are not so many strips, or no swizzle fits the tile.
        """
        if not 1 <= strips <= self.num_strips:
            raise ValueError(f"a block has {self.num_strips} strips, got {strips=}")
        rows, columns = self.block_tile
        if self.iterator_axis:
            columns *= strips
        else:
            rows *= strips
        return SharedTile((rows, columns), self.dtype, swizzle)
