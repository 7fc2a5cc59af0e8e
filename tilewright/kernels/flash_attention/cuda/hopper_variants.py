"""The variants of attention in CUDA C++ for compute capability 9.0a, based on CUTLASS's example 88: three tables.

The kernels around its collectives are our own (``cuda/hopper_forward.cuh``, ``cuda/hopper_backward.cuh``), and so is
the whole kernel for head dims beyond the collectives' (``cuda/hopper_wide_forward.cuh``).
"""

import dataclasses
import itertools
from typing import Literal

from tilewright.kernels.cuda.requirements import Compare, DeviceField, Fact, Field, MultipleOf, Predicate
from tilewright.kernels.cuda.table import Variant, VariantTable, instance
from tilewright.kernels.cuda.toolchain import CUTLASS_TYPES, cutlass
from tilewright.kernels.flash_attention.cuda.cutlass_variants import (
    DTYPES,
    FIELDS,
    SOURCES,
    WITHOUT_MODIFIERS,
    Dtype,
)
from tilewright.kernels.flash_attention.masking import FAR

type Band = Literal["full", "ragged", "upper", "window"]

BANDS: tuple[Band, ...] = ("full", "ragged", "upper", "window")
"""Masking, each level including the previous ones: none, keys past the last, those above the band, those below it."""

HALVES: tuple[Dtype, ...] = ("bf16", "f16")

ALIGNMENT = 8
"""Elements in the 16 bytes to which TMA requires strides to be aligned; compiled kernels report the same alignment."""

LENGTH_LIMIT = 1 << 30

BACKWARD_TILE_K = 128

WIDE_TILE_Q = 64
"""Queries of a block of `HopperWideForwardVariant`; two blocks of a cluster work together."""

_ARCHITECTURE = (90, 91)  # code for 9.0a runs on no other architecture
_NAMESPACE = "tilewright::attention::hopper"


def _requirements(dtype: Dtype, head_dim: int) -> tuple[Predicate, ...]:
    """The requirements of both directions."""
    lengths = (Field("q_length"), Field("kv_length"))
    return (
        Compare(Field("dtype"), "==", DTYPES.index(dtype)),
        Compare(Field("head_dim"), "<=", head_dim),
        Compare(Field("value_dim"), "==", Field("head_dim")),
        # Not the alignment fact, which would need a compiled kernel to reject a head dim.
        MultipleOf(Field("head_dim"), ALIGNMENT),
        *WITHOUT_MODIFIERS,
        Compare(Field("dropout"), "==", 0),
        *(Compare(length, ">=", 1) for length in lengths),
        *(Compare(length, "<", LENGTH_LIMIT) for length in lengths),
        Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),
    )


def _without_band(tile_k: int | None) -> tuple[Predicate, ...]:
    """Requires all keys to be visible, and to come in whole tiles if ``tile_k`` is given."""
    whole = () if tile_k is None else (MultipleOf(Field("kv_length"), tile_k),)
    return (Compare(Field("lowest"), "<=", -FAR), Compare(Field("highest"), ">=", FAR), *whole)


@dataclasses.dataclass(frozen=True, slots=True)
class HopperForwardVariant(Variant):
    """One instance of ``HopperForward``.

    Attributes:
      tile_q: queries of a block, 64 for each consumer warpgroup.
      tile_k: keys per step.
      head_dim: maximum head dim; its matmuls are computed in full whatever the call's is.
      stages: tiles of keys and values loaded ahead.
      band: the masking that it supports.
    """

    dtype: Dtype
    tile_q: int
    tile_k: int
    head_dim: int
    stages: int
    band: Band

    @property
    def name(self) -> str:
        return f"fmha_hopperF_{self.dtype}_{self.tile_q}x{self.tile_k}_k{self.head_dim}_{self.band}"

    @property
    def group(self) -> str:
        return f"{self.dtype}_k{self.head_dim}"

    @property
    def cpp_class(self) -> str:
        sizes = (self.tile_q, self.tile_k, self.head_dim, self.stages)
        band = f"{_NAMESPACE}::Band::k{self.band.capitalize()}"
        return instance(f"{_NAMESPACE}::HopperForward", CUTLASS_TYPES[self.dtype], *sizes, band)

    @property
    def arch_range(self) -> tuple[int, int]:
        return _ARCHITECTURE

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Sorts by head dim, then by masking, least first."""
        return (self.head_dim, BANDS.index(self.band))

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        match self.band:
            case "full":
                band = _without_band(self.tile_k)
            case "ragged":
                band = _without_band(None)
            case "upper":
                band = (Compare(Field("lowest"), "<=", -FAR),)
            case "window":
                band = ()
        return (*_requirements(self.dtype, self.head_dim), *band, Compare(Field("sinks"), "==", 0))

    @classmethod
    def get_all(cls) -> list["HopperForwardVariant"]:
        """Lists the fastest tile of each half type and head dim, with every band.

        A persistent kernel, which loads its next tile while it stores one, was slower on an H100: 460 instead of 576
        TFLOP/s under a causal mask at length 4096, where blocks have unequal work.
        """
        tiles = ((192, 128, 32, 5), (192, 128, 64, 5), (128, 128, 128, 5), (128, 64, 256, 5))
        return [cls(dtype, *tile, band) for dtype, tile, band in itertools.product(HALVES, tiles, BANDS)]


@dataclasses.dataclass(frozen=True, slots=True)
class HopperWideForwardVariant(Variant):
    """One instance of ``HopperWideForward``, in which each warpgroup computes half of the head dim.

    Attributes:
      head_dim: maximum head dim; its matmuls are computed in full whatever the call's is.
    """

    dtype: Dtype
    head_dim: int

    @property
    def name(self) -> str:
        return f"fmha_hopperF_{self.dtype}_64x64_k{self.head_dim}_halves"

    @property
    def group(self) -> str:
        return f"{self.dtype}_k{self.head_dim}"

    @property
    def cpp_class(self) -> str:
        return instance(f"{_NAMESPACE}::HopperWideForward", CUTLASS_TYPES[self.dtype], self.head_dim)

    @property
    def arch_range(self) -> tuple[int, int]:
        return _ARCHITECTURE

    @property
    def sort_key(self) -> tuple[int, ...]:
        return (self.head_dim,)

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (*_requirements(self.dtype, self.head_dim), Compare(Field("sinks"), "==", 0))

    @classmethod
    def get_all(cls) -> list["HopperWideForwardVariant"]:
        return [cls(dtype, 512) for dtype in HALVES]


@dataclasses.dataclass(frozen=True, slots=True)
class HopperBackwardVariant(Variant):
    """One instance of ``HopperBackward``.

    Attributes:
      tile_q: queries per step; a block owns 128 keys.
      head_dim: maximum head dim.
      masked: True if it can mask; otherwise keys must come in whole tiles.
      grouped: True if query heads may share key heads.
    """

    dtype: Dtype
    tile_q: int
    head_dim: int
    masked: bool
    grouped: bool

    @property
    def name(self) -> str:
        masked, grouped = "window" if self.masked else "full", "_grouped" if self.grouped else ""
        return f"fmha_hopperB_{self.dtype}_{self.tile_q}x{BACKWARD_TILE_K}_k{self.head_dim}_{masked}{grouped}"

    @property
    def group(self) -> str:
        return f"{self.dtype}_k{self.head_dim}_{'window' if self.masked else 'full'}"

    @property
    def cpp_class(self) -> str:
        arguments = (self.tile_q, self.head_dim, self.masked, self.grouped)
        return instance(f"{_NAMESPACE}::HopperBackward", CUTLASS_TYPES[self.dtype], *arguments)

    @property
    def arch_range(self) -> tuple[int, int]:
        return _ARCHITECTURE

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Sorts by head dim, then by features, fewest first."""
        return (self.head_dim, int(self.grouped), int(self.masked))

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (
            *_requirements(self.dtype, self.head_dim),
            *(() if self.masked else _without_band(BACKWARD_TILE_K)),
            *(() if self.grouped else (Compare(Field("kv_heads"), "==", Field("heads")),)),
            # Tiles of dQ are accumulated in the order in which blocks reach them.
            Compare(Field("deterministic"), "==", 0),
        )

    @classmethod
    def get_all(cls) -> list["HopperBackwardVariant"]:
        """Lists the fastest tile of each half type and head dim; shared memory suffices up to head dim 128."""
        tiles = ((128, 32), (128, 64), (64, 128))
        flags = (False, True)
        return [
            cls(dtype, *tile, masked, grouped)
            for dtype, tile, masked, grouped in itertools.product(HALVES, tiles, flags, flags)
        ]


def _table(name: str, header: str, variants: tuple[Variant, ...], memory_per_job: int) -> VariantTable:
    return VariantTable(
        name,
        SOURCES / header,
        FIELDS,
        variants,
        packages=(cutlass("examples/88_hopper_fmha"),),
        flags=("-DNDEBUG",),  # otherwise the library's device code has assertions
        memory_per_job=memory_per_job,
    )


FORWARD = _table(
    "flash_attention_hopper_forward", "hopper_forward.cuh", tuple(HopperForwardVariant.get_all()), 4500 << 20
)
WIDE_FORWARD = _table(
    "flash_attention_hopper_wide_forward",
    "hopper_wide_forward.cuh",
    tuple(HopperWideForwardVariant.get_all()),
    3000 << 20,
)
BACKWARD = _table(
    "flash_attention_hopper_backward", "hopper_backward.cuh", tuple(HopperBackwardVariant.get_all()), 5000 << 20
)
