"""The Hopper kernels, interpreted, under shard_map and vmap: through the function that users call, beside XLA."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import H100
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import FlashAttention, flash_attention
from tilewright.ops.types import Device

LENGTH, DIM = 40, 64


@pytest.fixture(autouse=True)
def interpreted(on_an_h100: Device) -> Iterator[None]:
    """Kernels are interpreted, and selection takes every CPU for an H100: a shard_map has a mesh of CPUs."""
    with interpret_mosaic():
        yield


@pytest.fixture
def one_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has one memory for all devices, and can run but one cluster in it at a time."""
    turn = threading.Semaphore(1)
    initialize, clean_up, run = (
        gpu_callbacks._initialize_shared_memory,
        gpu_callbacks._clean_up_shared_memory,
        thread_map._run_jaxpr,
    )

    def begin(**arguments: Any) -> Any:
        assert turn.acquire(timeout=60)
        return initialize(**arguments)

    def end(token: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(turn.release)
            return clean_up(token)

    def run_on_a_free_device(jaxpr: Any, consts: Any, *args: Any) -> None:
        with jax.default_device(jax.devices()[-1]):
            run(jaxpr, consts, *map(np.asarray, args))

    monkeypatch.setattr(gpu_callbacks, "_initialize_shared_memory", begin)
    monkeypatch.setattr(gpu_callbacks, "_clean_up_shared_memory", end)
    monkeypatch.setattr(thread_map, "_run_jaxpr", run_on_a_free_device)
    monkeypatch.setattr(jaxpr_interpret.DeviceInfo, "device_id", 0)
    monkeypatch.setattr(jaxpr_interpret.DeviceInfo, "num_devices", 1)


def operands(batch: int = 1, heads: int = 2, kv_heads: int = 1) -> list[jax.Array]:
    """query, key, value and the cotangent of the output."""
    sizes = (heads, kv_heads, kv_heads, heads)
    keys = jax.random.split(jax.random.key(5), 4)
    shapes = [(batch, LENGTH, count, DIM) for count in sizes]
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def backward_kinds() -> list[HopperBackwardParams]:
    """The candidates that differ in more than their tiles: dQ added up in global memory, and not."""
    inputs = FlashAttention().prepare(*operands()[:3], causal=True)
    found = PallasGpuFlashAttention().candidates(inputs.structs, H100, "backward")
    return list({params.deterministic: params for params in reversed(found)}.values())


ADDED, FIXED = sorted(backward_kinds(), key=lambda params: params.deterministic)
KINDS = pytest.mark.parametrize("kind", [ADDED, FIXED], ids=str)


def attention(platform: str, kind: Any = None) -> Any:
    cfg = PerDirection(backward=Choice("hopper", kind)) if platform == "pallas" and kind is not None else None
    return functools.partial(flash_attention, causal=True, platform=platform, cfg=cfg)


def with_gradients(function: Any) -> Any:
    """The function with its gradients: ``(*arguments, cotangent) -> (out, *gradients)``."""

    def both(*args: Any) -> Any:
        out, pull = jax.vjp(function, *args[:-1])
        return out, *pull(args[-1])

    return both


def check(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=2e-2, atol=1e-2 * max(1.0, np.abs(w).max()))


@pytest.mark.usefixtures("one_device_at_a_time")
@pytest.mark.parametrize(("check_vma", "kind"), list(itertools.product([False, True], [ADDED, FIXED])))
def test_each_device_does_its_part_of_a_shard_map(check_vma: bool, kind: Any) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    arrays = operands(batch=2, heads=1)
    part = with_gradients(attention("pallas", kind))
    mapped = jax.shard_map(part, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    check(jax.jit(mapped)(*arrays), with_gradients(attention("xla"))(*arrays))


@KINDS
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_gradients_of_what_the_devices_share_are_summed(where: str, kind: Any) -> None:
    """A collective cannot follow an interpreted kernel on few cores: its place in the program is looked at instead."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    split, whole = P(None, None, "x"), P()

    def program(platform: str) -> Any:
        function = attention(platform, kind)
        map_ = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)
        if where == "outside":
            return with_gradients(map_(function, in_specs=(split, whole, whole), out_specs=split))
        specs = (split, whole, whole, split)
        return map_(with_gradients(function), in_specs=specs, out_specs=(split, split, whole, whole))

    def sums(platform: str) -> int:
        return str(jax.make_jaxpr(program(platform))(*operands())).count("psum")

    assert sums("pallas") == sums("xla") > 0


@pytest.mark.usefixtures("one_device_at_a_time")
@pytest.mark.parametrize("kind", [ADDED, FIXED], ids=str)
def test_arrays_whose_types_are_split(kind: Any) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    arrays = operands(batch=2, heads=1)
    expected = with_gradients(attention("xla"))(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays]
        got = jax.jit(with_gradients(attention("pallas", kind)))(*placed)
        assert [x.sharding.spec[0] for x in got] == ["x"] * 4
        check(got, expected)


@pytest.mark.parametrize(
    ("in_axes", "kind"),
    list(itertools.product([(0, 0, 0), (1, None, None), (None, 2, 0)], [ADDED, FIXED])),
)
def test_vmap(in_axes: Any, kind: Any) -> None:
    *qkv, cotangent = operands(heads=1)
    arrays = [x if axis is None else jnp.stack([x, 1 - x], axis) for x, axis in zip(qkv, in_axes, strict=True)]
    cotangent = jnp.stack([cotangent, cotangent[::-1] * 2])

    def mapped(platform: str) -> Any:
        return jax.jit(with_gradients(jax.vmap(attention(platform, kind), in_axes=in_axes)))

    check(mapped("pallas")(*arrays, cotangent), mapped("xla")(*arrays, cotangent))


def test_vmap_of_what_decides_the_mask() -> None:
    query, key, value, _ = operands(heads=1)
    lengths = jnp.array([[3], [40]], jnp.int32)

    def mapped(platform: str) -> Any:
        one = lambda lengths: attention(platform)(query, key, value, key_value_seq_lengths=lengths)
        return jax.jit(jax.vmap(one))(lengths)

    check([mapped("pallas")], [mapped("xla")])
