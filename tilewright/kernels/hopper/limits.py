"""Limits of compute capability 9.0 (CUDA C++ Programming Guide, PTX ISA), and those that Mosaic GPU adds."""

from types import MappingProxyType
from typing import NamedTuple

from tilewright.ops.utils.known_devices import SHARED_KB

CAPABILITY = (9, 0)

NUM_SMS = 132
"""SMs of an H100 or H200, where the device does not say."""

SHARED_BYTES = SHARED_KB[90] << 10
"""Shared memory that one CTA may have."""

SHARED_ALIGNMENT = 1024
"""Bytes to which Mosaic GPU aligns each scratch buffer, the period of the 128-byte swizzle."""

BARRIER_BYTES = 8

MAX_BARRIERS = 32
"""Barriers of one array: Mosaic GPU keeps their phases as bits of one 32-bit word per thread."""

WARPGROUP_THREADS = 128

WGMMA_M = 64
"""M of wgmma: rows of a warpgroup's accumulator."""

MAX_TMA_BOX = 256
"""Elements of a TMA box along one dimension."""

SWIZZLES = (128, 64, 32)
"""Widths in bytes, widest first: a wider one serves more columns with one TMA box and one wgmma descriptor."""

SWIZZLE_ROWS = 8
"""Rows of a swizzle atom, in TMA and in wgmma's descriptors alike.

Where shared memory is tiled by atoms, TMA wants a multiple of these rows in global memory, too.
"""


TMA_STRIDE_BYTES = 16
"""TMA wants a multiple of these bytes from each row of an array in global memory to the next."""


class RegisterSplit(NamedTuple):
    """Registers per thread of a consumer, of the producer and of a dQ warpgroup, by ``setmaxnreg``.

    A CTA starts with all the registers of an SM, shared out evenly in multiples of 8: together these must not be more.
    """

    consumer: int
    producer: int
    dq: int = 0


# 240 + 240 + 24 = 3 · 168 and 3 · 160 + 32 = 4 · 128: all that three or four warpgroups start with.
REGISTERS = MappingProxyType({2: RegisterSplit(240, 24), 3: RegisterSplit(160, 32)})
"""By the number of consumer warpgroups, beside a producer."""

# Each split of three warpgroups adds up to 504, those of four to 512. More is not an error but a hang: setmaxnreg waits
# for registers that no warpgroup releases (208 + 208 + 96 in three warpgroups, docs/notes/hopper_attention.md).
NARROW_REGISTERS = RegisterSplit(232, 40)
"""The split of two consumers that leave registers to a producer which needs more: their accumulators are narrow, or its
threads copy up to `MAX_INDEXED_ROWS` rows of a tile."""

MAX_INDEXED_ROWS = 128
"""Rows of a tile that an index names: with more, a producer of 40 or 56 registers spills."""

PUSH_REGISTERS = RegisterSplit(224, 56)
"""The split of two consumers and a producer that sends to other devices besides."""

DQ_REGISTERS = RegisterSplit(208, 24, dq=72)
"""The split of two consumers, a producer and a dQ warpgroup."""
