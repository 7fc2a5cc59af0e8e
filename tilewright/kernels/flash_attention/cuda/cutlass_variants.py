"""The variants of attention in CUDA C++ based on CUTLASS's example 41: two tables.

Their enumeration, names and order are those of PyTorch's memory-efficient attention, which instantiates the same
example; the loops around its matmuls are our own (``cuda/cutlass_forward.cuh``, ``cutlass_backward.cuh``).
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Literal

from tilewright.kernels.cuda.requirements import Compare, DeviceField, Fact, Field, MultipleOf, Predicate, one_of
from tilewright.kernels.cuda.table import Variant, VariantTable, instance
from tilewright.kernels.cuda.toolchain import CUTLASS_TYPES, cutlass

SOURCES = Path(__file__).parent

FIELDS = (
    "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "bias", "rows", "mask",
    "soft_cap", "sinks", "dropout", "lowest", "highest", "deterministic", "exact",
)  # fmt: skip
"""The fields that describe a call to every attention kernel in CUDA C++, in this order.

``dtype`` is an index into ``DTYPES``. ``bias``, ``rows`` (segments and positions), ``mask``, ``soft_cap``, ``sinks``
and ``dropout`` are 1 if present. A key is visible iff ``lowest <= key - query <= highest``. ``exact`` is 1 if matmuls
of float32 operands must not round them.
"""

type Dtype = Literal["f32", "f16", "bf16"]

DTYPES: tuple[Dtype, ...] = ("f32", "f16", "bf16")

ARCHITECTURES = (50, 70, 75, 80, 100)
"""Bounds of ranges of compute capabilities with the same code in the example."""

ANY_DIM = 1 << 16

GRID_LIMIT = 65535
"""Maximum blocks along the second and third dimension of a grid."""

WITHOUT_MODIFIERS = tuple(Compare(Field(name), "==", 0) for name in ("bias", "rows", "mask", "soft_cap"))
"""Requirements for logits that are scaled matmuls under a band, and nothing else."""


def fits_device() -> tuple[Predicate, ...]:
    """The requirements of every attention kernel."""
    grid = (Compare(Field(name), "<=", GRID_LIMIT) for name in ("batch", "heads"))
    return (*grid, Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")))


def _is_half(dtype: Dtype) -> bool:
    return dtype != "f32"


def _aligned_suffix(aligned: bool) -> str:
    return "aligned" if aligned else "notaligned"


def _dims(dtype: Dtype, low: int, max_dim: int) -> tuple[Predicate, ...]:
    """Requirements on head dims: the kernel's load alignment and, on tensor cores, stores of 16 bytes."""
    head_dim, value_dim = Field("head_dim"), Field("value_dim")
    found: list[Predicate] = [Compare(Field("dtype"), "==", DTYPES.index(dtype))]
    if max_dim < ANY_DIM:
        found += [Compare(head_dim, "<=", max_dim), Compare(value_dim, "<=", max_dim)]
    found += [MultipleOf(head_dim, Fact("alignment")), MultipleOf(value_dim, Fact("alignment"))]
    if low >= (70 if _is_half(dtype) else 80):
        # 16 bytes of elements.
        store = 8 if _is_half(dtype) else 4
        # dQ and dK are stored like the output.
        found += [MultipleOf(head_dim, store), MultipleOf(value_dim, store)]
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardVariant(Variant):
    """One instance of ``CutlassForward``.

    Attributes:
      sm_range: range of compute capabilities, times ten, half open.
      aligned: True for 16-byte loads; otherwise loads are as narrow as the MMA instruction allows.
      block_q: queries per block.
      block_k: keys per step. If it is at least ``max_dim``, the output stays in registers.
      max_dim: maximum head dim of keys and of values.
      supports_dropout, supports_bias: supported features; without them fewer registers are spilled. Bias includes soft
        cap and masks by arrays.
    """

    aligned: bool
    dtype: Dtype
    sm_range: tuple[int, int]
    block_q: int
    block_k: int
    max_dim: int
    supports_dropout: bool = True
    supports_bias: bool = True

    @property
    def name(self) -> str:
        kept = "rf" if self.max_dim <= self.block_k else "gmem"
        lean = "" if self.supports_bias else "_plain"
        tile = f"{self.block_q}x{self.block_k}"
        return f"fmha_cutlassF_{self.dtype}_{_aligned_suffix(self.aligned)}_{tile}_{kept}{lean}_sm{self.sm_range[0]}"

    @property
    def group(self) -> str:
        return f"{self.dtype}_{_aligned_suffix(self.aligned)}{'' if self.supports_bias else '_plain'}"

    @property
    def cpp_class(self) -> str:
        return instance(
            "tilewright::attention::CutlassForward",
            CUTLASS_TYPES[self.dtype],
            f"cutlass::arch::Sm{self.sm_range[0]}",
            self.aligned,
            self.block_q,
            self.block_k,
            self.max_dim,
            self.supports_dropout,
            self.supports_bias,
        )

    @property
    def arch_range(self) -> tuple[int, int]:
        return self.sm_range

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Sorts aligned first, then by output in registers, then by step, then without dropout and bias first."""
        return (
            0 if self.aligned else 1,
            self.max_dim,
            self.block_k,
            1 if self.supports_dropout else 0,
            1 if self.supports_bias else 0,
        )

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (
            *_dims(self.dtype, self.sm_range[0], self.max_dim),
            *(() if self.supports_dropout else (Compare(Field("dropout"), "==", 0),)),
            *(() if self.supports_bias else WITHOUT_MODIFIERS),
            *fits_device(),
        )

    @classmethod
    def get_all(cls) -> list["ForwardVariant"]:
        """The enumeration of PyTorch: 45 variants in five groups."""
        found = []
        for aligned, dtype, arch_range in itertools.product((True, False), DTYPES, itertools.pairwise(ARCHITECTURES)):
            if not _exists(aligned, dtype, arch_range[0]):
                continue
            # 64 × 128 is faster than 32 × 128 if it fits in shared memory.
            block_q_wide = 64 if arch_range[0] > 75 else 32
            for block_q, block_k, max_dim in ((64, 64, 64), (block_q_wide, 128, 128), (32, 128, ANY_DIM)):
                found.append(cls(aligned, dtype, arch_range, block_q, block_k, max_dim))
        return found

    @classmethod
    def plain(cls) -> list["ForwardVariant"]:
        """Copies of the aligned variants without dropout and bias, which spill half as many registers."""
        return [
            dataclasses.replace(variant, supports_dropout=False, supports_bias=False)
            for variant in cls.get_all()
            if variant.aligned and variant.sm_range[0] >= 75
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardVariant(Variant):
    """One instance of ``CutlassBackward``.

    Attributes:
      preload: load the operands of the next matmul during the current one.
      block_i, block_j: queries and keys of a tile.
      max_dim: maximum head dim of keys and of values. If ``block_i`` is at least that, dK and dV stay in registers.
      whole_blocks: for lengths that are multiples of the blocks, without bounds checks.
      capabilities: the supported capabilities, if not all of ``sm_range``.
    """

    aligned: bool
    dtype: Dtype
    sm_range: tuple[int, int]
    apply_dropout: bool
    preload: bool
    block_i: int
    block_j: int
    max_dim: int
    whole_blocks: bool = False
    capabilities: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        dropout = "_dropout" if self.apply_dropout else ""
        whole = "_seqaligned" if self.whole_blocks else ""
        return (
            f"fmha_cutlassB_{self.dtype}_{_aligned_suffix(self.aligned)}_{self.block_i}x{self.block_j}"
            f"_k{self.max_dim}{dropout}{whole}_sm{self.sm_range[0]}"
        )

    @property
    def group(self) -> str:
        dropout = "_dropout" if self.apply_dropout else ""
        return f"{self.dtype}_{_aligned_suffix(self.aligned)}_k{self.max_dim}{dropout}"

    @property
    def cpp_class(self) -> str:
        return instance(
            "tilewright::attention::CutlassBackward",
            CUTLASS_TYPES[self.dtype],
            f"cutlass::arch::Sm{self.sm_range[0]}",
            self.aligned,
            self.apply_dropout,
            self.preload,
            self.block_i,
            self.block_j,
            self.max_dim,
            self.whole_blocks,
        )

    @property
    def arch_range(self) -> tuple[int, int]:
        if self.capabilities:  # otherwise it would be compiled for others too
            return self.capabilities[0], self.capabilities[-1] + 1
        return self.sm_range

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Sorts aligned first, then without dropout, then by head dim, many queries, and whole blocks."""
        return (
            0 if self.aligned else 1,
            1 if self.apply_dropout else 0,
            self.max_dim,
            -self.block_i,
            0 if self.whole_blocks else 1,
        )

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        found: list[Predicate] = list(_dims(self.dtype, self.sm_range[0], self.max_dim))
        if not self.apply_dropout:
            found.append(Compare(Field("dropout"), "==", 0))
        if self.whole_blocks:
            found += [MultipleOf(Field("q_length"), self.block_i), MultipleOf(Field("kv_length"), self.block_j)]
        if self.capabilities:
            found.append(one_of(DeviceField("capability"), self.capabilities))
        return (*found, *fits_device())

    @classmethod
    def get_all(cls) -> list["BackwardVariant"]:
        """The enumeration of PyTorch: 162 variants in 42 groups."""
        found = []
        pairs = itertools.pairwise(ARCHITECTURES)
        dims = (32, 64, 128, ANY_DIM)
        for aligned, dtype, arch_range, dropout, max_dim in itertools.product(
            (True, False), DTYPES, pairs, (True, False), dims
        ):
            low = arch_range[0]
            if not _exists(aligned, dtype, low):
                continue
            tall = max_dim > 64 and (low >= 80 or (low >= 70 and _is_half(dtype)))
            for block_i in (64, 128) if tall else (64,):
                preload = _is_half(dtype) and low >= 80 and max_dim <= block_i
                block_j = 128 if preload and max_dim > 64 else 64
                variant = cls(aligned, dtype, arch_range, dropout, preload, block_i, block_j, max_dim)
                found.append(variant)
                if _is_half(dtype) and aligned and not dropout and max_dim <= 128 and low in (70, 80):
                    found.append(dataclasses.replace(variant, whole_blocks=True))
        for dtype in DTYPES:
            if _is_half(dtype):
                # dK and dV stay in registers at head dim 96, if a block has only 99 KB of shared memory.
                found.append(cls(True, dtype, ARCHITECTURES[-2:], False, True, 128, 64, 96, capabilities=(86, 89)))
        return found


def _exists(aligned: bool, dtype: Dtype, low: int) -> bool:
    """True if PyTorch has the variant: bfloat16 needs 8.0, from which on unaligned arrays are padded instead."""
    return not (dtype == "bf16" and low < 80) and (aligned or low < 80)


def _table(name: str, header: str, variants: list[Variant]) -> VariantTable:
    return VariantTable(
        name,
        SOURCES / header,
        FIELDS,
        tuple(variants),
        include_folders=(SOURCES / "without_curand",),
        packages=(cutlass("examples/41_fused_multi_head_attention"),),
        memory_per_job=1500 << 20,
    )


FORWARD = _table("flash_attention_forward", "cutlass_forward.cuh", [*ForwardVariant.get_all(), *ForwardVariant.plain()])
BACKWARD = _table("flash_attention_backward", "cutlass_backward.cuh", [*BackwardVariant.get_all()])
