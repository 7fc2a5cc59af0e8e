"""The bridge to Triton on a machine without a GPU: interpreted, compiled, lowered, and refused."""

import functools
import importlib.metadata
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import gpu_triton
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import A100, H100
from tilewright.kernels.triton import launch, recorded_launches, requirements, unavailable
from tilewright.ops.types import Device

pytest.importorskip("triton")

from tests.kernels.triton import kernels
from tilewright.kernels.triton.compiler import Report, report
from tilewright.kernels.triton.dtypes import type_name
from tilewright.kernels.triton.interpreter import interpret_triton


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def scale(x: Any, block: int = 16, length: int | None = None, out_dtype: Any = None, **options: Any) -> Any:
    size = x.size if length is None else length
    out = struct(*x.shape, dtype=out_dtype or x.dtype)
    constants = {"block": block} | options
    (result,) = launch(
        kernels.scaled, [x], [out], grid=[-(-size // block)], scalars={"length": size}, constants=constants
    )
    return result


def append(values: Any, cache: Any, position: int) -> tuple[Any, Any]:
    before, cache = launch(
        kernels.append,
        [values, cache],
        [struct(*values.shape, dtype=values.dtype), struct(*cache.shape, dtype=cache.dtype)],
        grid=[1],
        scalars={"position": position},
        constants={"width": values.shape[0]},
        in_place={1: 1},
    )
    return before, cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_interpreted_values(dtype: str):
    x = jnp.linspace(-3, 3, 50).astype(dtype)
    with interpret_triton():
        got = jax.jit(functools.partial(scale, out_dtype=jnp.float32))(x)
        narrow = jax.jit(functools.partial(scale, scale=0.3))(x) if dtype != "float8_e4m3fn" else None
    assert np.array_equal(got, x.astype(jnp.float32) * 2.0)
    if narrow is not None:  # rounded as JAX rounds, to the nearest
        assert np.array_equal(narrow, (x.astype(jnp.float32) * np.float32(0.3)).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_interpreted_products(dtype: str):
    left, right = (jax.random.normal(jax.random.key(i), (16, 16)).astype(dtype) for i in range(2))
    with interpret_triton():
        (got,) = launch(kernels.product, [left, right], [struct(16, 16)], grid=[1], constants={"size": 16})
    want = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    assert np.abs(np.asarray(got) - want).max() < 1e-5


def test_interpreted_functions_of_the_language():
    x = jax.random.normal(jax.random.key(0), (5, 32))
    with interpret_triton():
        (got,) = launch(kernels.row_softmax, [x], [struct(5, 32)], grid=[5], constants={"width": 32})
    assert np.abs(got - jax.nn.softmax(x)).max() < 1e-6


def test_what_is_left_unwritten_shows():
    with interpret_triton():
        got = np.asarray(scale(jnp.ones((20,)), length=11))
    assert np.all(got[:11] == 2.0)
    assert np.all(np.isnan(got[11:]))


def test_in_place():
    cache, values = jnp.arange(24.0).reshape(3, 8), jnp.full((8,), -1.0)
    with interpret_triton():
        before, after = jax.jit(lambda *arrays: append(*arrays, 1), donate_argnums=1)(values, cache + 0)
        # A scalar of 1 is a constant, which others are not.
        _, last = jax.jit(lambda *arrays: append(*arrays, 2))(values, cache)
    assert np.array_equal(before, cache[1])
    assert np.array_equal(after, cache.at[1].set(-1.0))
    assert np.array_equal(last, cache.at[2].set(-1.0))


def test_nothing_to_do():
    assert scale(jnp.zeros((0,))).shape == (0,)
    (result,) = launch(
        kernels.scaled, [jnp.ones((4,))], [struct(4)], grid=[0], scalars={"length": 4}, constants={"block": 4}
    )
    assert np.array_equal(result, np.zeros(4))


def test_on_several_devices():
    x = jnp.arange(64.0)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    with interpret_triton():
        run = jax.jit(jax.shard_map(scale, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
        got = run(jax.device_put(x, jax.NamedSharding(mesh, P("x"))))
    assert np.array_equal(got, 2 * x)


def test_a_kernel_compiles_beside_an_interpreted_one():
    with interpret_triton(), recorded_launches() as launches:
        scale(jnp.ones((20,)))
    (found,) = launches
    for capability in ((8, 0), (8, 9), (9, 0)):
        compiled = report(found, capability)
        assert compiled.faults == []
        assert compiled.registers > 0
        assert f".target sm_{10 * capability[0] + capability[1]}" in compiled.texts["ptx"]


def test_faults():
    clean = Report("k", (8, 9), 128, 0, 0, 0, 1 << 16, False, {})
    assert clean.faults == []
    spilling = Report("k", (8, 9), 255, 8, 8, 8, 1 << 17, True, {})
    assert len(spilling.faults) == 3
    assert "self.spill_stores=8" in spilling.faults[0]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, on_an_h100: Device) -> list[Any]:
    """What custom calls get, by a stand-in for the part of jaxlib that is only where CUDA's plugin is."""
    given: list[Any] = []

    class Call:
        def __init__(self, *args: Any):
            given.append(args)

        def to_proto(self, *_: Any) -> bytes:
            return b"proto"

    monkeypatch.setattr(gpu_triton, "TritonKernel", lambda *args: args, raising=False)
    monkeypatch.setattr(gpu_triton, "TritonKernelCall", Call, raising=False)
    monkeypatch.setattr(gpu_triton, "create_array_parameter", lambda *args: args, raising=False)
    monkeypatch.setattr(gpu_triton, "create_scalar_parameter", lambda *args: args, raising=False)
    return given


def test_lowering(given: list[Any]):
    run = jax.jit(lambda values, cache: append(values, cache, 2))
    text = run.trace(jnp.ones((8,)), jnp.ones((3, 8))).lower(lowering_platforms=("cuda",)).as_text()
    assert "@triton_kernel_call_ffi" in text
    assert "output_tuple_indices = [1], operand_index = 1" in text
    ((program, *grid, parameters),) = given
    assert (program[0], program[1], program[6], grid) == ("tilewright_append", 4, 90, [1, 1, 1])
    assert ".target sm_90a" in program[4]
    assert parameters == [(0, 16), (0, 16), (2, "i32"), (0, 16)]


def test_a_scalar_of_one_is_a_constant(given: list[Any]):
    """Triton compiles it into the kernel, which then has no parameter for it."""
    run = jax.jit(lambda values, cache: append(values, cache, 1))
    run.trace(jnp.ones((8,)), jnp.ones((3, 8))).lower(lowering_platforms=("cuda",))
    ((program, *_, parameters),) = given
    assert parameters == [(0, 16), (0, 16), (0, 16)]
    (entry,) = re.findall(r"\.entry tilewright_append\((.*?)\)", program[4], re.DOTALL)
    assert entry.count(".param") >= len(parameters)


def test_scratch_memory_is_a_result(given: list[Any]):
    """What the custom call would allocate by itself cannot be part of a graph."""
    constants = {"block": 32, "width": 64}

    def run(x: Any) -> Any:
        return launch(kernels.copied, [x], [struct(300, 64)], grid=[10], scalars={"rows": 300}, constants=constants)

    text = jax.jit(run).trace(jnp.ones((300, 64))).lower(lowering_platforms=("cuda",)).as_text()
    ((program, *_, parameters),) = given
    assert len(program) == 7  # no scratch memory of its own
    assert parameters == [(0, 16), (300, "i32"), (0, 16), (0, 16)]
    size = re.search(r"-> \(tensor<300x64xf32>, tensor<(\d+)xui8>\)", text)
    assert size is not None
    assert int(size[1]) >= 10 * 128  # a descriptor takes 128 bytes


def test_only_on_gpus():
    with pytest.raises(RuntimeError, match="scaled is a Triton kernel: it runs on CUDA GPUs"):
        scale(jnp.ones((4,)))


def test_has_no_rule_for_vmap():
    with pytest.raises(NotImplementedError, match="scaled has no rule for vmap"):
        jax.vmap(scale)(jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("takes the constants", {"constants": {}}),
        ("takes the constants", {"constants": {"block": 4, "other": 1}}),
        ("got 1 inputs, 0 scalars and 1 outputs", {"scalars": {}}),
        (r"after 1 inputs scaled takes \['length', 'result'\], got the scalars=\['size'\]", {"scalars": {"size": 4}}),
        ("one to three axes", {"grid": []}),
        ("got self.grid=", {"grid": [1, 1 << 16]}),
        ("outputs in place come last", {"in_place": {1: 0}}),
        ("updates input 0 in place", {"in_place": {0: 0}, "outputs": [struct(5)], "kernel": kernels.widen}),
    ],
)
def test_what_a_kernel_does_not_take(said: str, changes: dict[str, Any]):
    options: dict[str, Any] = {
        "kernel": kernels.scaled,
        "inputs": [jnp.ones((4,))],
        "outputs": [struct(4)],
        "grid": [1],
        "scalars": {"length": 4},
        "constants": {"block": 4},
    } | changes
    if "kernel" in changes:
        options |= {"scalars": {}, "constants": {"scale": 1.0}}
    with pytest.raises((TypeError, ValueError), match=said):
        launch(options.pop("kernel"), options.pop("inputs"), options.pop("outputs"), **options)


def test_types():
    names = ["bfloat16", "float16", "float32", "int8", "uint32", "int64", "bool", "float8_e5m2"]
    assert [type_name(name) for name in names] == ["bf16", "fp16", "fp32", "i8", "u32", "i64", "i1", "fp8e5"]
    with pytest.raises(TypeError, match="Triton has no complex64"):
        type_name(np.complex64)


def test_reasons(monkeypatch: pytest.MonkeyPatch):
    assert unavailable(H100) == unavailable(A100) == []
    (why,) = unavailable(Device("gpu", "Tesla T4", (7, 5), 40))
    assert "compute capability 8.0 or up, got Tesla T4" in why
    assert "got cpu" in unavailable(Device("cpu", "cpu"))[0]

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    for version, said in (
        (lambda _: "3.5.1", "needs triton 3.6 or later, got 3.5.1"),
        (missing, "needs the package triton: pip install 'tilewright[triton]'"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", version)
        requirements._version.cache_clear()
        assert said in unavailable(H100)[0]
    monkeypatch.undo()
    requirements._version.cache_clear()
