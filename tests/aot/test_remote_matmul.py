"""The matmul whose devices send their rows to each other, for H100s that are not here."""

import os
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu.launch_context import LaunchContext
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.aot.compiler import (
    H100,
    KernelReport,
    _kernels_of_their_own,
    _standard_output,
    missing_packages,
    parse_reports,
)
from tilewright.modules import all_gather_matmul, matmul_reduce_scatter

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")

Compiled = tuple[str, str, list[KernelReport]]


def compiled(
    function: Any, shapes: Any, specs: Any, mesh_shape: tuple[int, ...] = (2,), dtype: str = "bfloat16", **options: Any
) -> Compiled:
    """The program as it is lowered and as it is compiled, and reports on its kernels."""
    axes = ("data", "x")[-len(mesh_shape) :]
    count = 1
    for size in mesh_shape:
        count *= size
    with tilewright.target_device(H100, count=count) as target:
        mesh = target.make_mesh(mesh_shape, axes)
        call = jax.shard_map(function, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], **options)
        structs = [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs[:-1], strict=True)
        ]
        dumps = dict.fromkeys(("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES"), "1")
        with (
            _standard_output() as output,
            _kernels_of_their_own(),
            mock.patch.dict(os.environ, dumps),
            jax.sharding.use_abstract_mesh(mesh),
        ):
            lowered = jax.jit(call).lower(*structs)
            text = lowered.compile(device_assignment=target.devices).as_text()
    return lowered.as_text(), text, parse_reports(output())


def remote(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return all_gather_matmul(lhs, rhs, axis_name="x", strategy="remote", **options)


def summed(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return matmul_reduce_scatter(lhs, rhs, axis_name="x", strategy="remote", **options)


ROWS, COLUMNS = P("x", None), P(None, "x")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("m", "k", "n", "mesh_shape"),
    [(4096, 4096, 14336, (2,)), (8192, 8192, 28672, (8,)), (400, 264, 528, (2,)), (1024, 512, 1024, (2, 2))],
)
def test_one_kernel_without_spills(m: int, k: int, n: int, mesh_shape: tuple[int, ...], check_vma: bool):
    lowered, text, reports = compiled(
        remote, ((m, k), (k, n)), (ROWS, COLUMNS, COLUMNS), mesh_shape, check_vma=check_vma
    )
    assert len(reports) == 1
    assert not reports[0].faults
    assert not re.search(r" (all-gather|collective-permute)", text)
    devices = ",".join(str(number) for number in range(mesh_shape[0] * (mesh_shape[-1] if len(mesh_shape) > 1 else 1)))
    assert f'xla_replica_ids = "{devices}"' in lowered
    assert "skip_device_barrier = false" in lowered  # nothing else keeps a device from those that are not ready
    assert "multimem" not in lowered


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("m", "k", "n", "mesh_shape"),
    [(4096, 14336, 4096, (2,)), (400, 528, 264, (2,)), (1024, 1024, 512, (2, 2))],
)
def test_sums_in_one_kernel_without_spills(m: int, k: int, n: int, mesh_shape: tuple[int, ...], check_vma: bool):
    lowered, text, reports = compiled(summed, ((m, k), (k, n)), (COLUMNS, ROWS, ROWS), mesh_shape, check_vma=check_vma)
    assert len(reports) == 1
    assert not reports[0].faults
    assert not re.search(r" (all-reduce|reduce-scatter|collective-permute)", text)
    assert "skip_device_barrier = false" in lowered
    assert "multimem" not in lowered


def test_sums_over_eight_devices():
    _, _, reports = compiled(summed, ((16384, 28672), (28672, 8192)), (COLUMNS, ROWS, ROWS), (8,))
    assert len(reports) == 1
    assert not reports[0].faults


@pytest.mark.parametrize("op", ["gather", "sum"])
def test_what_is_sent_needs_no_descriptor(op: str):
    """A descriptor of another device's memory would stay in a CUDA graph when that device has its arrays elsewhere."""
    function, shapes, specs = {
        "gather": (remote, ((1024, 512), (512, 2048)), (ROWS, COLUMNS, COLUMNS)),
        "sum": (summed, ((1024, 2048), (2048, 512)), (COLUMNS, ROWS, ROWS)),
    }[op]
    with mock.patch.object(LaunchContext, "_recompute_peer_id", side_effect=AssertionError("on the host")):
        _, _, reports = compiled(function, shapes, specs)
    assert len(reports) == 1


def test_ranges_of_rows_and_a_transposed_matrix_in_float32():
    specs = (P(None, "x", None), P("x", None), P(None, None, "x"))
    function = lambda lhs, rhs: remote(lhs, rhs, transpose_rhs=True, preferred_element_type=jnp.float32)
    _, text, reports = compiled(function, ((3, 1200, 1024), (2048, 1024)), specs, dtype="float16")
    assert len(reports) == 1
    assert not reports[0].faults
    assert "f32[3,1200,1024]" in text


def test_gradients_and_vmap():
    def gradients(lhs: jax.Array, rhs: jax.Array) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jax.vmap(remote, (0, None))(*xs).astype(jnp.float32)), (0, 1))(lhs, rhs)

    specs = (P(None, "x", None), COLUMNS, (P(None, "x", None), COLUMNS))
    lowered, _, _ = compiled(gradients, ((2, 1024, 512), (512, 1024)), specs)
    assert "reduce_scatter" in lowered or "collective_permute" in lowered
    both = (P(None, "x", None), P(None, None, "x"), P(None, None, "x"))
    lowered, _, _ = compiled(jax.vmap(remote), ((2, 1024, 512), (2, 512, 1024)), both)
    assert lowered.count("collective_permute") == 1
    scattered = (P(None, None, "x"), P("x", None), P(None, "x", None))
    lowered, _, reports = compiled(
        jax.vmap(summed, (0, None)), ((2, 1024, 512), (512, 1024)), scattered, check_vma=False
    )
    assert len(reports) == 1
