"""The variants of attention in CUDA C++ for compute capability 8.0 and up that are entirely our own: two tables.

Their matmuls use ``mma.sync`` (``cuda/ampere_forward.cuh``, ``cuda/ampere_backward.cuh``). Tile sizes match the shared
memory of a block: 227 KB on 9.0 and 10.x, 163 KB on 8.0 and 8.7, 99 KB on 8.6, 8.9 and 12.x.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from tilewright.kernels.cuda.requirements import Compare, DeviceField, Fact, Field, MultipleOf, Predicate
from tilewright.kernels.cuda.table import Variant, VariantTable, instance
from tilewright.kernels.flash_attention.cuda.cutlass_variants import DTYPES, FIELDS, SOURCES, WITHOUT_MODIFIERS, Dtype

type Features = Literal["plain", "modified", "dropout"]

FEATURES: tuple[Features, ...] = ("plain", "modified", "dropout")
"""Operations on logits, each with the previous ones: a band and sinks; bias, soft cap, masks by arrays; dropout.
"""

CPP_TYPES = {"f32": "float", "f16": "__half", "bf16": "__nv_bfloat16"}

ARCHITECTURES = (80, 130)

_NAMESPACE = "tilewright::attention"


def _kinds(dtype: Dtype) -> Iterator[tuple[Features, bool]]:
    """All combinations of features and exactness for a kernel; only float32 has exact and rounded matmuls."""
    return itertools.product(FEATURES, (False, True) if dtype == "f32" else (False,))


@dataclasses.dataclass(frozen=True, slots=True)
class AmpereVariant(Variant):
    """The common fields of both directions' variants.

    Attributes:
      max_dim: maximum head dim of keys and of values; its matmuls are computed in full whatever the call's head dims
        are.
      exact: each float32 matmul is computed by three tf32 matmuls, instead of rounding the operands.
      rank: index of the tile among those of its head dim.
    """

    dtype: Dtype
    max_dim: int
    features: Features
    exact: bool
    rank: int

    @property
    @abc.abstractmethod
    def min_shared(self) -> int:
        """Bytes of shared memory from which the tile is preferred, which may be more than it needs."""

    @property
    def group(self) -> str:
        return f"{self.dtype}_k{self.max_dim}_{self.features}{'_exact' if self.exact else ''}"

    @property
    def arch_range(self) -> tuple[int, int]:
        return ARCHITECTURES

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Sorts by head dim, then by features, then by tile, largest first."""
        return (self.max_dim, FEATURES.index(self.features), int(self.exact), self.rank)

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        # 16 bytes, which one cp.async copies.
        vector = 4 if self.dtype == "f32" else 8
        dims = (Field("head_dim"), Field("value_dim"))
        return (
            Compare(Field("dtype"), "==", DTYPES.index(self.dtype)),
            *(Compare(dim, "<=", self.max_dim) for dim in dims),
            # Not the alignment fact, which would need a compiled kernel to reject a head dim.
            *(MultipleOf(dim, vector) for dim in dims),
            *(WITHOUT_MODIFIERS if self.features == "plain" else ()),
            # A variant with dropout reads generator keys, which other calls do not have.
            Compare(Field("dropout"), "==", int(self.features == "dropout")),
            *(() if self.exact or self.dtype != "f32" else (Compare(Field("exact"), "==", 0),)),
            *((Compare(DeviceField("shared_memory"), ">=", self.min_shared),) if self.min_shared else ()),
            Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),
        )

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """The last template arguments: exact matmuls, modified logits, dropout."""
        return (self.exact, self.features != "plain", self.features == "dropout")


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardTile:
    """Tiling of a forward kernel.

    Attributes:
      queries: queries per block.
      keys: keys per step.
      row_warps, column_warps: the warps of a block. Warps of the same row divide its keys and its output's columns.
      stages: tiles of keys and values in shared memory at a time.
      blocks: blocks per multiprocessor, which limits registers.
      min_shared: bytes of shared memory from which the tile is preferred, which may be more than it needs.
    """

    queries: int
    keys: int
    row_warps: int
    column_warps: int
    stages: int
    blocks: int
    min_shared: int = 0

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}_w{self.row_warps}x{self.column_warps}_s{self.stages}"

    @property
    def arguments(self) -> tuple[int, ...]:
        """Template arguments, without the head dim, which follows the first two."""
        return (self.queries, self.keys, self.row_warps, self.column_warps, self.stages, self.blocks)


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardTile:
    """Tiling of one pass of a backward kernel.

    Attributes:
      queries, keys: queries and keys of a tile of logits; a block owns one of the two.
      query_warps, key_warps: the warps that compute a tile of logits.
      warps: all warps of a block.
      stages: tiles that are iterated over, in shared memory at a time.
      blocks: blocks per multiprocessor, which limits registers.
    """

    queries: int
    keys: int
    query_warps: int
    key_warps: int
    warps: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}_w{self.warps}_s{self.stages}"

    @property
    def cpp(self) -> str:
        return instance(f"{_NAMESPACE}::AmpereWalk", *dataclasses.astuple(self))


_KB = 1 << 10

# The first tile that fits is taken. If two blocks of a tile do not fit on a multiprocessor, a smaller tile follows of
# which two do.
FORWARD_TILES: dict[tuple[bool, int], tuple[ForwardTile, ...]] = {
    (False, 64): (ForwardTile(128, 64, 4, 1, 2, 2),),
    (False, 96): (ForwardTile(128, 64, 4, 1, 2, 2, min_shared=144 * _KB), ForwardTile(128, 64, 4, 1, 1, 2)),
    (False, 128): (
        ForwardTile(128, 64, 4, 1, 2, 2, min_shared=192 * _KB),
        ForwardTile(128, 64, 4, 1, 1, 2, min_shared=128 * _KB),
        ForwardTile(128, 32, 4, 1, 1, 2),
    ),
    (False, 256): (ForwardTile(128, 64, 4, 2, 1, 1), ForwardTile(64, 64, 4, 1, 1, 1)),
    (False, 512): (
        ForwardTile(64, 64, 2, 4, 1, 1),
        ForwardTile(64, 32, 2, 4, 1, 1),
        ForwardTile(32, 32, 2, 4, 1, 1),
    ),
    (True, 64): (ForwardTile(128, 64, 4, 1, 1, 2, min_shared=128 * _KB), ForwardTile(128, 32, 4, 1, 1, 2)),
    (True, 128): (ForwardTile(128, 32, 4, 1, 1, 2),),
    (True, 256): (
        ForwardTile(128, 32, 4, 2, 1, 1),
        ForwardTile(64, 32, 2, 2, 1, 1),
        ForwardTile(32, 16, 2, 2, 1, 1),
    ),
    (True, 512): (
        ForwardTile(64, 16, 2, 4, 1, 1),
        ForwardTile(32, 16, 2, 2, 1, 1),
        ForwardTile(16, 16, 1, 2, 1, 1),
    ),
}
"""Tiles by dtype (True for float32) and maximum head dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class AmpereForwardVariant(AmpereVariant):
    """One instance of ``AmpereForward``."""

    tile: ForwardTile

    @property
    def min_shared(self) -> int:
        return self.tile.min_shared

    @property
    def name(self) -> str:
        return f"fmha_ampereF_{self.group}_{self.tile}"

    @property
    def cpp_class(self) -> str:
        queries, keys, *rest = self.tile.arguments
        template = f"{_NAMESPACE}::AmpereForward"
        return instance(template, CPP_TYPES[self.dtype], queries, keys, self.max_dim, *rest, *self.flags)

    @classmethod
    def get_all(cls) -> list["AmpereForwardVariant"]:
        """Every dtype and head dim with every tile, features and exactness."""
        return [
            cls(dtype, max_dim, features, exact, rank, tile)
            for dtype in DTYPES
            for (is_float, max_dim), tiles in FORWARD_TILES.items()
            if is_float == (dtype == "f32")
            for rank, tile in enumerate(tiles)
            for features, exact in _kinds(dtype)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardTiles:
    """The tiles of the pass whose blocks own keys and, for deterministic calls, of the pass whose blocks own queries.

    Attributes:
      min_shared: bytes of shared memory from which these tiles are preferred, which may be more than they need.
    """

    by_keys: BackwardTile
    by_queries: BackwardTile
    min_shared: int = 0


# The first tiles that fit are taken. If even the last ones do not fit every device, ``min_shared`` says so, since
# otherwise the groups of all features would be compiled to find out.
BACKWARD_TILES: dict[tuple[bool, int], tuple[BackwardTiles, ...]] = {
    (False, 64): (
        BackwardTiles(BackwardTile(64, 64, 2, 2, 4, 2, 3), BackwardTile(128, 64, 4, 1, 4, 2, 2), min_shared=196 * _KB),
        BackwardTiles(BackwardTile(64, 64, 2, 2, 4, 1, 2), BackwardTile(64, 64, 2, 2, 4, 1, 2)),
    ),
    (False, 128): (
        BackwardTiles(BackwardTile(64, 128, 2, 4, 8, 2, 1), BackwardTile(128, 64, 4, 2, 8, 2, 1)),
        BackwardTiles(BackwardTile(64, 64, 2, 2, 4, 1, 1), BackwardTile(64, 64, 2, 2, 4, 1, 1)),
    ),
    (False, 256): (
        BackwardTiles(BackwardTile(64, 64, 4, 2, 8, 1, 1), BackwardTile(64, 64, 4, 2, 8, 1, 1)),
        BackwardTiles(BackwardTile(32, 32, 2, 4, 8, 1, 1), BackwardTile(32, 32, 2, 4, 8, 1, 1)),
    ),
    (False, 512): (
        BackwardTiles(BackwardTile(64, 32, 4, 2, 8, 1, 1), BackwardTile(64, 32, 4, 2, 8, 1, 1)),
        BackwardTiles(BackwardTile(32, 32, 2, 4, 8, 1, 1), BackwardTile(32, 32, 2, 4, 8, 1, 1)),
        BackwardTiles(BackwardTile(16, 32, 1, 4, 8, 1, 1), BackwardTile(16, 32, 1, 4, 8, 1, 1)),
    ),
    (True, 64): (
        BackwardTiles(BackwardTile(64, 64, 2, 2, 4, 1, 2), BackwardTile(64, 64, 2, 2, 4, 1, 2)),
        BackwardTiles(BackwardTile(32, 64, 2, 2, 4, 1, 1), BackwardTile(64, 32, 2, 2, 4, 1, 1)),
    ),
    (True, 128): (
        BackwardTiles(BackwardTile(32, 64, 2, 2, 4, 1, 2), BackwardTile(64, 32, 2, 2, 4, 1, 2), min_shared=226 * _KB),
        BackwardTiles(BackwardTile(64, 64, 2, 4, 8, 1, 1), BackwardTile(64, 64, 2, 4, 8, 1, 1)),
        BackwardTiles(BackwardTile(32, 32, 2, 4, 8, 1, 1), BackwardTile(32, 32, 2, 4, 8, 1, 1)),
    ),
    (True, 256): (
        BackwardTiles(BackwardTile(32, 64, 2, 4, 8, 1, 1), BackwardTile(64, 32, 4, 2, 8, 1, 1), min_shared=208 * _KB),
        BackwardTiles(BackwardTile(32, 32, 2, 4, 8, 1, 1), BackwardTile(32, 32, 2, 4, 8, 1, 1), min_shared=136 * _KB),
    ),
    (True, 512): (
        BackwardTiles(BackwardTile(16, 32, 1, 4, 8, 1, 1), BackwardTile(16, 32, 1, 4, 8, 1, 1), min_shared=212 * _KB),
    ),
}
"""Tiles by dtype (True for float32) and maximum head dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class AmpereBackwardVariant(AmpereVariant):
    """One instance of ``AmpereBackward``."""

    tiles: BackwardTiles

    @property
    def min_shared(self) -> int:
        return self.tiles.min_shared

    @property
    def name(self) -> str:
        return f"fmha_ampereB_{self.group}_{self.tiles.by_keys}"

    @property
    def cpp_class(self) -> str:
        passes = (self.tiles.by_keys.cpp, self.tiles.by_queries.cpp)
        return instance(f"{_NAMESPACE}::AmpereBackward", CPP_TYPES[self.dtype], self.max_dim, *passes, *self.flags)

    @classmethod
    def get_all(cls) -> list["AmpereBackwardVariant"]:
        """Every dtype and head dim with every pair of tiles, features and exactness."""
        return [
            cls(dtype, max_dim, features, exact, rank, tiles)
            for dtype in DTYPES
            for (is_float, max_dim), all_tiles in BACKWARD_TILES.items()
            if is_float == (dtype == "f32")
            for rank, tiles in enumerate(all_tiles)
            for features, exact in _kinds(dtype)
        ]


def _table(name: str, header: str, variants: tuple[Variant, ...]) -> VariantTable:
    return VariantTable(name, SOURCES / header, FIELDS, variants, memory_per_job=2 << 30)


FORWARD = _table("flash_attention_ampere_forward", "ampere_forward.cuh", tuple(AmpereForwardVariant.get_all()))
BACKWARD = _table("flash_attention_ampere_backward", "ampere_backward.cuh", tuple(AmpereBackwardVariant.get_all()))
