"""Calls on automatic mesh axes compiled for two H100s: each has its part's kernel, and nothing is gathered for it."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tilewright.modules import flash_attention, glu, linear_cross_entropy, rms_norm

QKV = ((4, 1024, 8, 128), P("x", None, None))
ROWS, COLUMNS = P("x"), P(None, "x")
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], P], ...], str]] = {
    "attention": (lambda *x: flash_attention(*x, causal=True), (QKV,) * 3, "bf16[2,1024,8,128]"),
    "glu": (glu, (((2048, 512), P()), *[((512, 1024), COLUMNS)] * 2), "bf16[2048,512]"),
    "norm": (rms_norm, (((2048, 512), ROWS), ((512,), P())), "bf16[1024,512]"),
    "loss": (
        lambda x, w: linear_cross_entropy(x, w, jnp.zeros(2048, int)),
        (((2048, 512), P()), ((512, 4096), COLUMNS)),
        "bf16[512,2048]",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_part_s_kernel_is_compiled(name: str) -> None:
    function, operands, part = CALLS[name]
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=2) as target:
        mesh = target.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in operands]
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",))
        text = lowered.compile(device_assignment=target.devices).as_text()
    kernels = set(re.findall(r'custom_call_target="([^"]+)"', text))
    assert kernels & {"mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi"}, kernels
    assert part in text
    gathers = re.findall(r"= (\S+) all-gather", text)
    assert all("2048,4096" not in each and "512,4096" not in each for each in gathers), gathers
