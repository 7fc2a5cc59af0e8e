"""Device kernels are named after the op, the direction and their role, as a profile shows them."""

import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.modules import flash_attention, glu, grouped_matmul, linear_cross_entropy, rms_norm

ROWS, MATRIX = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
QUERY = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
TRAINED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flash_attention": (lambda x: flash_attention(x, x, x, causal=True), (QUERY,)),
    "glu": (lambda x, w: glu(x, w, w), (ROWS, MATRIX)),
    "grouped_matmul": (lambda x, w: grouped_matmul(x, jnp.stack([w, w]), jnp.array([1000, 1048])), (ROWS, MATRIX)),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w, jnp.zeros(2048, int)), (ROWS, MATRIX)),
    "rms_norm": (lambda x, w: rms_norm(x, w[0, :512]), (ROWS, MATRIX)),
}


def kernel_names(device: str, function: Any, *structs: Any) -> set[str]:
    """The names of the Mosaic and Triton kernels in the lowered program of a function."""
    with tilewright.target_device(device):
        lowered = jax.jit(function).lower(*structs)
    module: Any = lowered.compiler_ir("stablehlo")
    return set(_names(module.operation)) - {"stable"}  # that of Mosaic's own attribute


def _names(operation: Any) -> Iterator[str]:
    for region in operation.regions:
        for block in region:
            for each in block.operations:
                yield from _names(each.operation)
    if operation.name != "stablehlo.custom_call":
        return
    target = operation.attributes["call_target_name"].value
    if target == "triton_kernel_call_ffi":
        proto = zlib.decompress(operation.attributes["mhlo.backend_config"]["opaque"].value_bytes)
        yield from (name.decode() for name in re.findall(rb"\.entry (\w+)\(", proto))
    elif target.startswith("mosaic_gpu"):
        kernel = operation.attributes["mhlo.backend_config"]["module"].value_bytes
        yield from (name.decode() for name in re.findall(rb"(\w+?)_mosaic_gpu\b", kernel))


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("op", TRAINED)
def test_the_kernels_of_a_step_are_named(op: str, device: str) -> None:
    function, structs = TRAINED[op]
    gradient = jax.grad(lambda *xs: function(*xs).astype(jnp.float32).sum(), tuple(range(len(structs))))
    names = kernel_names(device, gradient, *structs)
    assert all(name.startswith(f"tilewright_{op}_") for name in names), names
    directions = {name.removeprefix(f"tilewright_{op}_").split("_")[0] for name in names}
    # Where XLA serves a call, it has no such kernels.
    assert directions <= {"forward", "backward"}
    assert names or device != "NVIDIA H100 80GB HBM3"
