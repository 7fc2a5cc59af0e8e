"""XLA's schedule of a ring for H100s that are not here: a matmul runs while each part travels."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.aot.compiler import H100, missing_packages
from tilewright.modules import all_gather_matmul, matmul_reduce_scatter

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")

DEVICES = 8
CALLS = {
    "gather": (all_gather_matmul, (P("x", None), P(None, "x"), P(None, "x")), ((16384, 8192), (8192, 28672))),
    "scatter": (matmul_reduce_scatter, (P(None, "x"), P("x", None), P("x", None)), ((16384, 28672), (28672, 8192))),
}


def schedule(name: str) -> str:
    """The order of transfers and matmuls in a compiled ring: S and D are start and end of a transfer, m is a matmul."""
    function, specs, shapes = CALLS[name]
    with tilewright.target_device(H100, count=DEVICES) as target:
        mesh = target.make_mesh((DEVICES,), ("x",))
        call = jax.shard_map(
            lambda *xs: function(*xs, axis_name="x", strategy="ring"), mesh=mesh, in_specs=specs[:2], out_specs=specs[2]
        )
        structs: list[Any] = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs[:2], strict=True)
        ]
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(call).lower(*structs)
        # Without a card nothing is timed, and XLA would take matmuls of Triton, which its scheduler has no times of.
        options = {"xla_gpu_enable_triton_gemm": False}
        program = lowered.compile(device_assignment=target.devices, compiler_options=options).as_text()
    entry = program[program.index("ENTRY") :]
    found = re.findall(r" (collective-permute(?:-start|-done)?)\(|custom_call_target=\"__cublas\$(\w+)", entry)
    letters = {"collective-permute-start": "S", "collective-permute-done": "D", "collective-permute": "P"}
    return "".join(letters.get(transfer, "m") for transfer, _ in found)


@pytest.mark.parametrize("name", CALLS)
def test_a_matmul_runs_while_each_part_travels(name: str) -> None:
    order = schedule(name)
    assert order.count("m") == DEVICES  # none is merged with another, nor with a sum
    assert len(re.findall(r"Sm+D", order)) == DEVICES - 1, order
