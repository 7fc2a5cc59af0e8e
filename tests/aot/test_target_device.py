"""Programs compiled for GPUs that are not here, from what the package knows of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import tilewright
from tests.aot.compiler import missing_packages
from tests.ops.kernel.samples import Product
from tilewright.modules import flash_attention
from tilewright.ops import ConfigSelectorChain, Executor
from tilewright.ops.utils.known_devices import KNOWN_DEVICES

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

QUERY = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
# The first that CUDA 13 compiles for.
GPUS = [name for name, known in KNOWN_DEVICES.items() if known.kind == "gpu" and (known.capability or (0, 0)) >= (7, 5)]


def causal(query: jax.Array) -> jax.Array:
    return flash_attention(query, query, query, causal=True, platform=("pallas", "xla"))


@pytest.mark.parametrize("name", GPUS)
def test_xla_takes_what_is_said_of_every_gpu(name: str) -> None:
    with tilewright.target_device(name, count=2) as target:
        first, second = target.devices
        lowered = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32))
        compiled = lowered.compile(device_assignment=target.devices)
    assert (first.device_kind, first.core_count, first.id) == (name, target.device.cores, 0)  # type: ignore[attr-defined]
    assert first.compute_capability == "{}.{}".format(*target.known.capability)  # type: ignore[attr-defined, misc]
    assert second.id == 1
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * 256 * 256


def test_a_kernel_on_explicit_axes() -> None:
    with tilewright.target_device("NVIDIA H200", count=2) as target:
        mesh = target.make_mesh((2,), ("data",))
        struct = jax.ShapeDtypeStruct(QUERY.shape, QUERY.dtype, sharding=NamedSharding(mesh, jax.P("data")))
        with jax.sharding.use_abstract_mesh(mesh):
            compiled = jax.jit(causal).lower(struct).compile(device_assignment=target.devices)
    assert compiled.memory_analysis().argument_size_in_bytes == 256 * 4 * 64 * 2  # of each device


def test_a_mesh_of_the_devices_themselves() -> None:
    with tilewright.target_device("NVIDIA H200", count=2) as target:
        mesh = jax.make_mesh((2,), ("data",), devices=target.devices)
        with jax.set_mesh(mesh):
            struct = jax.ShapeDtypeStruct(QUERY.shape, QUERY.dtype, sharding=NamedSharding(mesh, jax.P("data")))
            compiled = jax.jit(causal).lower(struct).compile()
    assert "mosaic_gpu" in compiled.as_text()


def test_an_executor_compiles_for_it() -> None:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 5), (5, 4))]
    with tilewright.target_device("NVIDIA H200"):
        function = Executor(ConfigSelectorChain()).compile(Product("tests.aot.target"), *structs)
    a, b = (jnp.ones(struct.shape, struct.dtype) for struct in structs)
    assert jnp.allclose(function(a, b), a @ b)  # outside, on the device that is here
