"""A fused RMSNorm in CUDA C++: the worked example of docs/cuda.md.

Run it to compare the kernel with XLA on this machine's GPU: ``python examples/cuda_rms_norm/rms_norm.py``. Compile it
ahead, also where there is no GPU: ``tilewright build --arch 90a --table cuda_rms_norm.rms_norm:TABLE`` in ``examples``.
"""

import dataclasses
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.cuda import (
    Compare,
    CudaKernel,
    DeviceField,
    Fact,
    Field,
    MultipleOf,
    Predicate,
    Variant,
    VariantTable,
    instance,
)
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device

# By JAX's name, the C++ type and its bytes; a problem has the place in this table as its field `dtype`.
DTYPES = {"float32": ("float", 4), "float16": ("__half", 2), "bfloat16": ("__nv_bfloat16", 2)}

# The widest row that a block keeps in registers, and the block's threads.
WIDTHS = {1024: 128, 4096: 256, 16384: 512}


@dataclasses.dataclass(frozen=True)
class RmsNormVariant(Variant):
    """Rows of up to ``max_width`` elements of a dtype, read ``pack`` at a time."""

    dtype: str
    max_width: int
    pack: int

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.max_width}_pack{self.pack}"

    @property
    def group(self) -> str:
        return self.dtype

    @property
    def cpp_class(self) -> str:
        return instance("RmsNorm", DTYPES[self.dtype][0], self.max_width, self.pack, WIDTHS[self.max_width])

    @property
    def sort_key(self) -> tuple[Any, ...]:
        return self.max_width, -self.pack  # the narrowest wastes no registers; the widest loads come first

    @property
    def arch_range(self) -> tuple[int, int]:
        return (80 if self.dtype == "bfloat16" else 75), 130

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (
            Compare(Field("dtype"), "==", list(DTYPES).index(self.dtype)),
            Compare(Field("width"), "<=", self.max_width),
            MultipleOf(Field("width"), Fact("alignment")),
            Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),
        )


def variants() -> tuple[RmsNormVariant, ...]:
    """All of them: loads of 16 bytes where rows allow it, of 4 bytes, and of single elements."""
    found = []
    for (dtype, (_, size)), max_width in itertools.product(DTYPES.items(), WIDTHS):
        packs = sorted({16 // size, 4 // size, 1})
        found += [RmsNormVariant(dtype, max_width, pack) for pack in packs]
    return tuple(found)


TABLE = VariantTable(
    name="rms_norm",
    header=Path(__file__).with_name("rms_norm.cuh"),
    fields=("rows", "width", "dtype"),
    variants=variants(),
)
KERNEL = CudaKernel(TABLE)


def problem_of(x: jax.Array) -> dict[str, int]:
    """What the table's predicates and its C++ know of a call."""
    width = x.shape[-1]
    return {"rows": x.size // max(width, 1), "width": width, "dtype": list(DTYPES).index(x.dtype.name)}


def cuda_reasons(x: jax.Array, device: Device) -> list[str]:
    """Why the kernel cannot serve a call; empty if it can."""
    if x.dtype.name not in DTYPES:
        return [f"dtype must be one of {list(DTYPES)}, got {x.dtype}"]
    if x.size == 0:
        return [f"there is nothing to normalise in {x.shape=}"]
    return KERNEL.reasons(problem_of(x), device)


def xla_rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """The same in plain JAX: what runs elsewhere, what gradients are made of, and what the kernel is compared with."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def cuda_rms_norm(x: jax.Array, weight: jax.Array, eps: float, device: Device) -> jax.Array:
    """The kernel's call for a device, which must not have reasons against it."""
    problem = problem_of(x)
    variant, reasons = KERNEL.select(problem, device)
    if variant is None:
        raise ValueError(f"no variant can serve {problem}: {reasons}")
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (result,) = KERNEL.call(variant, problem, device, [x, weight.astype(x.dtype)], [out], {"eps": np.float32(eps)})
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in CUDA C++ where that can serve the call."""
    device = current_device()
    if cuda_reasons(x, device):
        return xla_rms_norm(x, weight, eps)
    return cuda_rms_norm(x, weight, eps, device)


def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rms_norm(x, weight, eps), (x, weight)


def _backward(eps: float, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    # Recomputes the norm instead of having kept it: XLA fuses that into the gradients, which read x in any case.
    _, pull_back = jax.vjp(lambda x, weight: xla_rms_norm(x, weight, eps), *residuals)
    return pull_back(cotangent)


rms_norm.defvjp(_forward, _backward)


def compare(rows: int, width: int, dtype: str) -> str:
    """One line: the largest difference from XLA, and both times."""
    key, weight_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key, (rows, width), dtype)
    weight = jax.random.normal(weight_key, (width,), dtype)
    ours, theirs = jax.jit(rms_norm), jax.jit(xla_rms_norm)
    difference = jnp.max(jnp.abs(ours(x, weight).astype(jnp.float32) - theirs(x, weight).astype(jnp.float32)))
    milliseconds = [_time_ms(function, x, weight) for function in (ours, theirs)]
    gigabytes = 2 * x.nbytes / 1e9
    rates = [f"{1e3 * gigabytes / time_ms:5.0f} GB/s" for time_ms in milliseconds]
    variant, _ = KERNEL.select(problem_of(x), current_device())
    name = variant.name if variant else "XLA"
    return f"{rows}x{width} {dtype:8} {name:22} difference {difference:.1e}  kernel {rates[0]}  XLA {rates[1]}"


def _time_ms(function: Any, *arguments: Any, calls: int = 50) -> float:
    function(*arguments).block_until_ready()
    started = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    result.block_until_ready()
    return (time.perf_counter() - started) / calls * 1e3


def main() -> None:
    device = current_device()
    reasons = cuda_reasons(jnp.ones((8, 1024)), device)
    if reasons:
        print(f"the CUDA kernel cannot run here, and rms_norm is XLA's: {'; '.join(reasons)}")
        x = jnp.ones((2, 8))
        print(f"rms_norm of ones with eps=0: {rms_norm(x, 2 * jnp.ones(8), 0.0)[0, :4]}")
        return
    for (rows, width), dtype in itertools.product([(8192, 1024), (8192, 4096), (4096, 16384), (4096, 4098)], DTYPES):
        print(compare(rows, width, dtype))


if __name__ == "__main__":
    main()
