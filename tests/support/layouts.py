"""What tests ask of a layout: whether it is bijective, its inverse, and the bank conflicts of a warp's access."""

import dataclasses

import numpy as np

from tilewright.kernels.hopper.layouts import Layout, SwizzledLayout, Tree, coalesce, of_leaves, row_major

BANKS = 32
BANK_BYTES = 4
_WAVEFRONT_BYTES = BANKS * BANK_BYTES


def is_bijective(layout: Layout | SwizzledLayout) -> bool:
    """Whether the offsets are exactly ``0 .. size - 1``: nothing is stored twice and nothing is left free."""
    offsets = np.sort(layout.offsets())
    return bool(np.array_equal(offsets, np.arange(offsets.size)))


def inverse(layout: Layout) -> Layout:
    """The layout that maps an offset to the integer of its coordinate.

    Raises:
      ValueError: ``layout`` is not bijective.
    """
    if not is_bijective(layout):
        raise ValueError(f"{layout} is not bijective")
    domain = row_major(*(extent for extent, _ in reversed(layout.flat))).flat[::-1]
    by_offset = sorted(
        ((step, extent, place) for (extent, step), (_, place) in zip(layout.flat, domain, strict=True) if extent > 1)
    )
    return coalesce(of_leaves([(extent, place) for _, extent, place in by_offset]))


@dataclasses.dataclass(frozen=True, slots=True)
class WarpAccess:
    """What one instruction of a warp touches: a coordinate and ``vector`` contiguous elements per thread."""

    coordinates: tuple[Tree, ...]
    vector: int
    itemsize: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.coordinates) <= 32:
            raise ValueError(f"a warp has 32 threads, got {len(self.coordinates)=}")
        if self.vector * self.itemsize not in (1, 2, 4, 8, 16):
            raise ValueError(f"a thread moves 1, 2, 4, 8 or 16 bytes, got {self.vector=}, {self.itemsize=}")


def bank_conflicts(layout: Layout | SwizzledLayout, access: WarpAccess) -> int:
    """Wavefronts that an access takes beyond those that its width makes necessary; 0 is free of conflicts.

    Shared memory has 32 banks of 4 bytes. Threads go in groups of at most 128 bytes, so eight at a time for 16-byte
    vectors; two threads conflict that need different words of one bank (CUDA C++ Programming Guide, "Shared Memory").
    """
    width = access.vector * access.itemsize
    group = min(32, _WAVEFRONT_BYTES // width)
    extra = 0
    for first in range(0, len(access.coordinates), group):
        words: dict[int, set[int]] = {}
        for coordinate in access.coordinates[first : first + group]:
            start = (layout(coordinate)) * access.itemsize
            for word in range(start // BANK_BYTES, -(-(start + width) // BANK_BYTES)):
                words.setdefault(word % BANKS, set()).add(word)
        extra += max(map(len, words.values())) - 1
    return extra
