"""What selection is told of the device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.ops.kernel.samples import Product, operands
from tilewright.ops import ConfigSelectorChain, Executor, Invocation, device_fingerprint
from tilewright.ops.utils.device import current_device, device_for_platform

A, B = operands((8, 5), (5, 4))


def abstract_mesh(kind, platform):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def test_of_this_process():
    device = current_device()
    assert (device.kind, device.name, device.present) == ("cpu", "cpu", True)
    assert device.fingerprint == device_fingerprint()
    assert device.capability is None
    assert device_for_platform("cpu") == device
    with jax.default_device(jax.devices()[3]):
        assert current_device() == device


def test_of_a_platform_that_is_not_here():
    for platform, kind in (("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")):
        device = device_for_platform(platform)
        assert (device.kind, device.present, device.fingerprint) == (kind, False, f"{kind}:unknown")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_devices_of_this_process_is_this_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    wanted = current_device()
    with jax.set_mesh(mesh):
        assert current_device() == wanted
    seen = []

    def look(x):
        seen.append(current_device())
        return x

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.P("data"))
        jax.jit(jax.shard_map(look, in_specs=jax.P("data"), out_specs=jax.P("data")))(x)
    assert set(seen) == {wanted}


def test_keys_are_those_of_calls_outside_a_mesh():
    keys, kernel = [], Product("tests.device")
    executor = Executor(ConfigSelectorChain(on_event=lambda selection: keys.append(selection.key)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda a: executor(kernel, a, B), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    jax.jit(mapped)(A)
    executor(kernel, A[:1], B)
    assert set(keys) == {Invocation(kernel, (A[:1], B)).key}


@pytest.mark.parametrize(
    ("name", "platform", "kind", "capability", "fingerprint"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "gpu", (9, 0), "gpu:NVIDIA H100 80GB HBM3:9.0"),
        ("NVIDIA A100-SXM4-80GB", "cuda", "gpu", (8, 0), "gpu:NVIDIA A100-SXM4-80GB:8.0"),
        ("TPU v5e", "tpu", "tpu", None, "tpu:TPU v5e"),
    ],
)
def test_of_an_abstract_mesh(name, platform, kind, capability, fingerprint):
    with jax.sharding.use_abstract_mesh(abstract_mesh(name, platform)):
        device = current_device()
    assert (device.kind, device.name, device.capability, device.fingerprint) == (kind, name, capability, fingerprint)
    assert not device.present
