"""A device that is not here."""

import concurrent.futures
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding

import tilewright
from tests.ops.kernel.samples import Product, operands
from tilewright.errors import TargetDeviceError
from tilewright.modules import flash_attention
from tilewright.ops import (
    ConfigSelectorChain,
    Executor,
    Invocation,
    autotune,
    device_fingerprint,
    device_kind,
    get_device_platform,
    policy_override,
)
from tilewright.ops.utils.device import current_device, device_for_platform, devices_for_platforms
from tilewright.ops.utils.target import active_target

H200, A100, T4, TPU = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4", "TPU v5e"
A, B = operands((8, 5), (5, 4))
Q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)


def causal(query):
    return flash_attention(query, query, query, causal=True)


def custom_calls(lowered) -> list[str]:
    return re.findall(r"custom_call @(\w+)", lowered.as_text())


@pytest.fixture
def product() -> Product:
    return Product("tests.target")


def test_selection_sees_it_and_afterwards_the_device_that_is_here():
    here = current_device()
    with tilewright.target_device(H200) as target:
        assert (target.name, target.count, target.kind) == (H200, 1, "gpu")
        assert current_device() == target.device == device_for_platform("cuda")
        assert (device_fingerprint(), device_kind(), get_device_platform()) == ("gpu:NVIDIA H200:9.0", "gpu", "triton")
        assert device_fingerprint(jax.devices()[0]) != device_fingerprint()
    assert current_device() == here
    assert active_target() is None


@pytest.mark.parametrize(
    ("name", "platform", "call"), [(H200, "cuda", ["mosaic_gpu_v2"]), (TPU, "tpu", ["tpu_custom_call"])]
)
def test_programs_are_lowered_for_its_platform(name: str, platform: str, call: list[str]):
    with tilewright.target_device(name):
        lowered = jax.jit(causal).lower(Q)
    assert lowered._lowering._platforms == (platform,)
    assert custom_calls(lowered) == call
    assert ("flash_attention" in lowered.as_text()) is True


def test_every_argument_that_lower_takes_is_lowered():
    x = jnp.ones(Q.shape, Q.dtype)
    with tilewright.target_device(H200):
        for given in (x, Q, jax.device_put(x, jax.devices()[1])):
            assert custom_calls(jax.jit(causal).lower(given)) == ["mosaic_gpu_v2"]


def test_one_jitted_function_is_traced_for_each_device_and_for_this_one():
    jitted = jax.jit(causal)
    seen = {}
    for _ in range(2):
        for name in (H200, TPU, None):
            if name is None:
                seen.setdefault(name, []).append(custom_calls(jitted.lower(Q)))
                continue
            with tilewright.target_device(name):
                seen.setdefault(name, []).append(custom_calls(jitted.lower(Q)))
    assert seen == {H200: [["mosaic_gpu_v2"]] * 2, TPU: [["tpu_custom_call"]] * 2, None: [[]] * 2}
    x = jnp.ones(Q.shape, Q.dtype)
    assert jitted(x).shape == Q.shape  # on the CPU, as before


def test_it_explains_from_the_shipped_table_of_the_device():
    query = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    steps = {}
    for name in (H200, T4):
        with tilewright.target_device(name):
            steps[name] = [each.step for each in tilewright.explain(causal, query, chooser=ConfigSelectorChain())]
    assert steps == {H200: ["shipped"], T4: ["heuristic"]}


def test_nesting_exceptions_and_other_threads():
    def fails() -> None:
        with tilewright.target_device(A100, count=4):
            assert current_device().name == A100
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                assert pool.submit(lambda: current_device().kind).result() == "cpu"
            raise ZeroDivisionError

    with tilewright.target_device(H200):
        with pytest.raises(ZeroDivisionError):
            fails()
        assert current_device().name == H200
        assert custom_calls(jax.jit(causal).lower(Q)) == ["mosaic_gpu_v2"]
    assert current_device().kind == "cpu"
    assert jax.sharding.get_abstract_mesh().empty


def test_a_mesh_in_force_is_left_and_found_again():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        with tilewright.target_device(H200):
            assert custom_calls(jax.jit(causal).lower(Q)) == ["mosaic_gpu_v2"]
        assert jax.sharding.get_mesh() == mesh
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def test_a_mesh_of_devices_that_are_here_does_not_hide_it(product: Product):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with tilewright.target_device(H200), jax.set_mesh(mesh):
        assert current_device().name == H200
        with pytest.raises(TargetDeviceError, match="lowered for cpu, as if it were to run here or on a mesh"):
            jax.jit(lambda a, b: Executor(ConfigSelectorChain())(product, a, b)).lower(A, B)


def test_nothing_runs(product: Product):
    executor = Executor(ConfigSelectorChain())
    call = lambda a: executor(product, a, B)
    stacked, here = A[None], jax.device_put(A, jax.devices()[0])
    with tilewright.target_device(H200):
        for run in (lambda: call(A), lambda: jax.grad(lambda a: call(a).sum())(A), lambda: jax.vmap(call)(stacked)):
            with pytest.raises(TargetDeviceError, match=r"nothing runs inside of target_device\('NVIDIA H200'\)"):
                run()
        with jax.disable_jit(), pytest.raises(TargetDeviceError):
            call(A)
        with pytest.raises(TargetDeviceError, match="lowered for cpu"):
            jax.jit(call)(here)
        with pytest.raises(ValueError, match=r"'target_device': 1.*NVIDIA H200"):  # JAX's own error
            jax.jit(call)(A)
    assert jnp.allclose(call(A), A @ B)


def test_nothing_is_tuned_or_stored(product: Product, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    chain = ConfigSelectorChain(autotune=True)
    with tilewright.target_device(H200), policy_override(autotune=True):
        assert chain.choose(Invocation(product, (A, B))).step == "heuristic"
        for tune in (lambda: tilewright.tune(causal, Q), lambda: autotune(product, A, B)):
            with pytest.raises(TargetDeviceError, match="nothing runs inside"):
                tune()
        jax.jit(lambda a, b: Executor(chain)(product, a, b)).lower(A, B)
    assert not list(tmp_path.rglob("*.json"))


def test_a_call_here_is_not_served_what_was_chosen_there(product: Product):
    chain = ConfigSelectorChain()
    with tilewright.target_device(H200):
        there = chain.choose(Invocation(product, (A, B))).key
    here = chain.choose(Invocation(product, (A, B))).key
    assert "NVIDIA H200" in there
    assert "NVIDIA H200" not in here


def test_compiling_says_what_is_missing(product: Product):
    struct = jax.ShapeDtypeStruct(A.shape, A.dtype)
    with tilewright.target_device(TPU) as target:
        with pytest.raises(TargetDeviceError, match="TPU v5 lite cannot be compiled here: libtpu is not installed"):
            _ = target.devices
        with pytest.raises(TargetDeviceError, match="cannot be compiled here"):
            Executor(ConfigSelectorChain()).compile(product, struct, jax.ShapeDtypeStruct(B.shape, B.dtype))


def test_inside_of_a_traced_function():
    def inside(x):
        with tilewright.target_device(H200):
            return x

    with pytest.raises(TargetDeviceError, match=r"stands around jax.jit\(f\).lower"):
        jax.jit(inside)(A)
    assert active_target() is None


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_count_that_is_none(count, error: type[Exception]):
    with pytest.raises(error, match="count="):
        tilewright.target_device(H200, count)


class TestSeveral:
    def test_explicit_axes(self):
        with tilewright.target_device(H200, count=4) as target:
            mesh = target.make_mesh((2, 2), ("data", "model"))
            struct = jax.ShapeDtypeStruct(
                (2, 256, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, jax.P("data", None, "model", None))
            )
            with jax.sharding.use_abstract_mesh(mesh):
                lowered = jax.jit(causal).lower(struct)
                explained = tilewright.explain(jax.grad(lambda q: causal(q).astype(jnp.float32).sum()), struct)
        assert [(each.direction, each.config.backend) for each in explained] == [
            ("forward", "hopper"),
            ("backward", "hopper"),
        ]
        assert all("[data=2,model=2](data,-,model)" in each.choice.key for each in explained)
        assert "mhlo.num_partitions = 4" in lowered.as_text()
        assert custom_calls(lowered) == ["mosaic_gpu_v2"]

    def test_shard_map(self):
        with tilewright.target_device(H200, count=2) as target:
            mesh = target.make_mesh((2,), ("data",))
            sharding = NamedSharding(mesh, jax.P("data", None, None, None))
            struct = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16, sharding=sharding)
            mapped = jax.shard_map(causal, in_specs=jax.P("data"), out_specs=jax.P("data"))
            with jax.sharding.use_abstract_mesh(mesh):
                (call,) = tilewright.explain(mapped, struct)
                lowered = jax.jit(mapped).lower(struct)
        assert call.arguments.startswith("bf16[1,256,4,64]")
        assert call.config.backend == "hopper"
        assert "mhlo.num_partitions = 2" in lowered.as_text()

    def test_a_mesh_of_another_size(self):
        said = r"a mesh of 4 NVIDIA H200 needs axes.*target_device\(name, count=8\)"
        with tilewright.target_device(H200, count=4) as target, pytest.raises(ValueError, match=said):
            target.make_mesh((8,), ("data",))

    def test_a_mesh_is_of_its_device_outside_of_the_context_too(self):
        with tilewright.target_device(H200, count=2) as target:
            mesh = target.make_mesh((2,), ("data",))
        with jax.sharding.use_abstract_mesh(mesh):
            assert current_device() == target.device
            assert devices_for_platforms(["cpu"])["cpu"].kind == "cpu"
