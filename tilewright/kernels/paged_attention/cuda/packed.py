"""Attention of packed queries over pages in CUDA C++, on Hopper: variants, support reasons, and launch."""

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda.build import groups_of
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.cuda.kernel import CudaKernel
from tilewright.kernels.cuda.requirements import Compare, DeviceField, Fact, Field, Predicate
from tilewright.kernels.cuda.table import Variant, VariantTable, instance
from tilewright.kernels.cuda.toolchain import CUTLASS_TYPES, cutlass
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.paged_attention.inputs import FAR, PagedInputs
from tilewright.kernels.paged_attention.packed import DIMS, SERVES, is_deprioritized, packed_reasons
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

type Dtype = Literal["f16", "bf16"]

DTYPES: tuple[Dtype, ...] = ("f16", "bf16")

FIELDS = (
    "tokens", "sequences", "heads", "kv_heads", "head_dim", "dtype", "num_pages", "page_size", "columns", "left",
    "right",
)  # fmt: skip
"""The fields that describe a call: ``columns`` of the page table, ``dtype`` an index into ``DTYPES``."""

MAX_SEQUENCES = 4096
"""Maximum number of sequences, which one block of threads sorts."""

COUNT_LIMIT = 1 << 31
"""Limit of tokens of the cache and of rows of the query, which 32-bit integers count."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedVariant(Variant):
    """One instance of ``PackedHopper``."""

    dtype: Dtype
    head_dim: int

    @property
    def name(self) -> str:
        return f"packed_hopper_{self.dtype}_k{self.head_dim}"

    @property
    def group(self) -> str:
        return f"{self.dtype}_k{self.head_dim}"

    @property
    def cpp_class(self) -> str:
        return instance("tilewright::paged::PackedHopper", CUTLASS_TYPES[self.dtype], self.head_dim)

    @property
    def arch_range(self) -> tuple[int, int]:
        return 90, 91

    @property
    def sort_key(self) -> tuple[int, ...]:
        return (self.head_dim,)

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (
            Compare(Field("dtype"), "==", DTYPES.index(self.dtype)),
            Compare(Field("head_dim"), "==", self.head_dim),
            Compare(Field("sequences"), "<=", MAX_SEQUENCES),
            Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),
        )


TABLE = VariantTable(
    "packed_attention_hopper",
    Path(__file__).with_name("packed_hopper.cuh"),
    FIELDS,
    tuple(PackedVariant(dtype, dim) for dtype in DTYPES for dim in DIMS),
    packages=(cutlass(),),
    flags=("-DNDEBUG",),
    memory_per_job=2000 << 20,
)

KERNEL = CudaKernel(TABLE)


@stable_id(
    "tilewright/paged_attention.CudaPackedParams",
    formerly=("tilewright.kernels.paged_attention.cuda_packed:CudaPackedParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudaPackedParams:
    """Empty: all sizes follow from shared memory and registers."""


class CudaPackedAttention(InferenceBackend[PagedInputs, Results, CudaPackedParams]):
    """Supports packed queries over pages in float16 and bfloat16 on compute capability 9.0."""

    name: ClassVar[str] = "cuda"
    platform: ClassVar[Platform] = Platform.CUDA
    forward_params: ClassVar[type] = CudaPackedParams
    serves: ClassVar[frozenset[str]] = SERVES

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        why = packed_reasons(inputs, device)
        if not inputs.softmax_scale > 0:
            why.append(f"needs a positive scale, got softmax_scale={inputs.softmax_scale}")
        if max(inputs.num_pages * inputs.page_size, inputs.tokens * inputs.heads) >= COUNT_LIMIT:
            why.append(
                f"rows must be counted by 32 bits, got num_pages={inputs.num_pages}, page_size={inputs.page_size}"
            )
        # Without elements no kernel runs, so no variant has to fit.
        if why or 0 in (inputs.tokens, inputs.num_pages, inputs.sequences, inputs.capacity):
            return why
        return KERNEL.reasons(problem_fields(inputs), device)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> list[CudaPackedParams]:
        return [CudaPackedParams()]

    def deprioritized(self, inputs: PagedInputs, device: Device, direction: Direction) -> bool:
        return is_deprioritized(inputs, device)

    def footprints(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: CudaPackedParams
    ) -> list[Footprint]:
        """One block per multiprocessor; shared memory is checked by the requirements."""
        return [Footprint(device.cores)]

    def builds(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: CudaPackedParams
    ) -> list[Build]:
        if 0 in (inputs.tokens, inputs.num_pages, inputs.sequences, inputs.capacity):
            return []
        group = KERNEL.needed(problem_fields(inputs), device)
        return [] if group is None else [group]

    def all_builds(self, device: Device) -> list[Build]:
        return [*groups_of(TABLE, capability_of(device) or 0)]

    def forward(self, inputs: PagedInputs, params: CudaPackedParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(_run, inputs)


def problem_fields(inputs: PagedInputs) -> dict[str, int]:
    """Describes a call by the table's fields."""
    return {
        "tokens": inputs.tokens,
        "sequences": inputs.sequences,
        "heads": inputs.heads,
        "kv_heads": inputs.kv_heads,
        "head_dim": inputs.head_dim,
        "dtype": DTYPES.index("f16" if inputs.dtype == np.float16 else "bf16"),
        "num_pages": inputs.num_pages,
        "page_size": inputs.page_size,
        "columns": inputs.columns,
        "left": FAR if inputs.left is None else inputs.left,
        "right": FAR if inputs.right is None else inputs.right,
    }


def _run(inputs: PagedInputs) -> Results:
    device = current_device()
    fields = problem_fields(inputs)
    variant, reasons = KERNEL.select(fields, device)
    if variant is None:
        raise UnsupportedError("packed attention in CUDA C++", reasons)
    outputs = [
        jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
        jax.ShapeDtypeStruct(inputs.query.shape[:2], jnp.float32),
    ]
    operands = [inputs.query, inputs.key, inputs.value, inputs.page_table, inputs.kv_lengths, inputs.cum_q_lens]
    attributes = {"scale": np.float32(inputs.softmax_scale)}
    out, lse = KERNEL.call(variant, fields, device, operands, outputs, attributes)
    return out, lse
