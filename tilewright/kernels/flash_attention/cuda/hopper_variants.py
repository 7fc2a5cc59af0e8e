"""The variants of attention in CUDA C++ for compute capability 9.0a: a table of the forward pass at wide head dims.

The kernel is our own (``cuda/hopper_wide_forward.cuh``). Up to head dim 256 the Pallas kernels serve these calls.
"""

import dataclasses

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

HALVES: tuple[Dtype, ...] = ("bf16", "f16")

ALIGNMENT = 8
"""Elements in the 16 bytes to which TMA requires strides to be aligned; compiled kernels report the same alignment."""

LENGTH_LIMIT = 1 << 30

NARROW_DIM = 256
"""Head dim up to which the Ampere variants are taken, since the wide kernel computes its maximum head dim in full."""

WIDE_TILE_Q = 64
"""Queries of a block of `HopperWideForwardVariant`; two blocks of a cluster work together."""

_ARCHITECTURE = (90, 91)  # code for 9.0a runs on no other architecture
_NAMESPACE = "tilewright::attention::hopper"


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
        lengths = (Field("q_length"), Field("kv_length"))
        return (
            Compare(Field("dtype"), "==", DTYPES.index(self.dtype)),
            Compare(Field("head_dim"), ">", NARROW_DIM),
            Compare(Field("head_dim"), "<=", self.head_dim),
            Compare(Field("value_dim"), "==", Field("head_dim")),
            # Not the alignment fact, which would need a compiled kernel to reject a head dim.
            MultipleOf(Field("head_dim"), ALIGNMENT),
            *WITHOUT_MODIFIERS,
            *(Compare(Field(name), "==", 0) for name in ("dropout", "sinks")),
            *(Compare(length, ">=", 1) for length in lengths),
            *(Compare(length, "<", LENGTH_LIMIT) for length in lengths),
            Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),
        )

    @classmethod
    def get_all(cls) -> list["HopperWideForwardVariant"]:
        return [cls(dtype, 512) for dtype in HALVES]


WIDE_FORWARD = VariantTable(
    "flash_attention_hopper_wide_forward",
    SOURCES / "hopper_wide_forward.cuh",
    FIELDS,
    tuple(HopperWideForwardVariant.get_all()),
    packages=(cutlass(),),
    flags=("-DNDEBUG",),  # otherwise the library's device code has assertions
    memory_per_job=3000 << 20,
)
