"""Matrix products beside bytes that are read, and nothing else, on Hopper: what other kernels are measured by.

It multiplies out of shared memory and reads an array to there. Its time is what a kernel with as many FLOPs and bytes
could reach if it did nothing else, at the clock that the card holds meanwhile.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda.kernel import CudaKernel
from tilewright.kernels.cuda.table import Variant, VariantTable
from tilewright.kernels.cuda.toolchain import cutlass
from tilewright.ops.utils.device import current_device

PRODUCT_FLOPS = 2 * 128 * 256 * 128
"""FLOPs of one matmul of a block."""

COPY_BYTES = 8192
"""Bytes that a block reads at a time."""

THREADS = 256
"""Threads of a block; each leaves a sum."""


@dataclasses.dataclass(frozen=True, slots=True)
class Only(Variant):
    """The one variant there is."""

    name = "products_and_bytes"
    group = "all"
    cpp_class = "tilewright::limits::ProductsAndBytes"
    arch_range = (90, 91)
    sort_key = ()
    requirements = ()


TABLE = VariantTable(
    "products_and_bytes",
    Path(__file__).with_name("products_and_bytes.cuh"),
    ("products", "copies"),
    (Only(),),
    packages=(cutlass(),),
    flags=("-DNDEBUG",),
    memory_per_job=2000 << 20,
)

KERNEL = CudaKernel(TABLE)


def blocks() -> int:
    """As many as the device has multiprocessors.

    Raises:
      UnsupportedError: it does not run on the device, or there is nothing to compile it with.
    """
    device = current_device()
    reasons = KERNEL.reasons({"products": 1, "copies": 1}, device)
    if reasons or not device.cores:
        why = reasons or [f"{device.name} has an unknown number of cores"]
        raise UnsupportedError("products and bytes", {"cuda": why})
    return device.cores


def data_for(size: float, key: jax.Array) -> jax.Array:
    """Normal bfloat16 numbers, some more than ``size`` bytes of them: what is zero takes less power."""
    count = blocks()
    rows = -(-int(size) // (count * COPY_BYTES)) * count + 16
    return jax.random.normal(key, (rows, COPY_BYTES // 2), jnp.bfloat16)


def products_and_bytes(data: jax.Array, flops: float, size: float) -> Any:
    """Sums ``[blocks, 256]`` float32 of the products that the first numbers of ``data`` make.

    Args:
      data: of `data_for`.
      flops: rounded to products for all blocks.
      size: bytes to read, rounded likewise.
    """
    count, device = blocks(), current_device()
    problem = {
        "products": round(flops / count / PRODUCT_FLOPS),
        "copies": min(round(size / count / COPY_BYTES), data.size * 2 // (count * COPY_BYTES)),
    }
    variant, reasons = KERNEL.select(problem, device)
    if variant is None:
        raise UnsupportedError("products and bytes", reasons)
    (sums,) = KERNEL.call(variant, problem, device, [data], [jax.ShapeDtypeStruct((count, THREADS), jnp.float32)])
    return sums
