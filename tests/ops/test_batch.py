"""Mapping a kernel over a batch or over devices with one selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import FORMS, A, B, Config, Pair, Product, operands, watching
from tilewright.ops import ConfigSelectorChain, Executor, Invocation, Kernel, pmap_with_config, vmap_with_config

AS, BS = operands((3, 6, 5), (3, 5, 4), seed=1)


@pytest.fixture
def keys():
    return []


@pytest.fixture
def executor(keys):
    return Executor(ConfigSelectorChain(on_event=lambda selection: keys.append(selection.key)))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
class TestVmap:
    def test_is_vmap_with_the_config_of_one_element(self, form, executor, keys):
        kernel = form("tests.batch")
        executor.chooser.cache.put(Invocation(kernel, (A, B), {"scale": 2.0}).key, Config(5))
        with watching() as seen:
            got = vmap_with_config(kernel, executor=executor)(AS, BS, scale=2.0)
        close(got, 2 * (AS @ BS))
        assert seen[-1].cfg == Config(5)
        assert set(keys) == {Invocation(kernel, (A, B), {"scale": 2.0}).key}

    def test_axes(self, form, executor):
        mapped = vmap_with_config(form("tests.batch"), in_axes=(1, None), out_axes=2, executor=executor)
        close(mapped(AS.transpose(1, 0, 2), B), (AS @ B).transpose(1, 2, 0))

    def test_under_jit_grad_and_vmap(self, form, executor):
        mapped = vmap_with_config(form("tests.batch"), executor=executor)
        close(jax.jit(mapped)(AS, BS), AS @ BS)
        close(jax.grad(lambda a: mapped(a, BS).sum())(AS), jnp.ones((3, 6, 4)) @ BS.transpose(0, 2, 1))
        close(jax.vmap(mapped)(AS[None], BS[None]), (AS @ BS)[None])

    def test_the_gradient_has_the_config_of_its_own_direction(self, form, executor, keys):
        if form is Product:
            pytest.skip("JAX differentiates what runs")
        kernel = form("tests.batch")
        forward = Invocation(kernel, (A, B))
        executor.chooser.cache.put(forward.key, Config(5))
        executor.chooser.cache.put(forward.backward().key, Config(7))
        mapped = vmap_with_config(kernel, executor=executor)
        with watching() as seen:
            jax.grad(lambda a: mapped(a, BS).sum())(AS)
        assert set(keys) == {forward.key, forward.backward().key}
        assert Config(7) in {s.cfg for s in seen if s.stage == "backward"}
        assert Config(7) not in {s.cfg for s in seen if s.stage != "backward"}

    def test_an_explicit_config(self, form, executor):
        with watching() as seen:
            vmap_with_config(form("tests.batch"), executor=executor, cfg=Config(9))(AS, BS)
        assert {s.cfg for s in seen} == {Config(9)}


@pytest.mark.parametrize("form", FORMS)
class TestPmap:
    def test_runs_each_slice_on_its_device(self, form, executor, keys):
        kernel = form("tests.batch")
        a, b = operands((8, 6, 5), (8, 5, 4))
        got = pmap_with_config(kernel, executor=executor)(a, b, scale=2.0)
        close(got, 2 * (a @ b))
        assert {shard.data.shape for shard in got.addressable_shards} == {(1, 6, 4)}
        assert len(got.sharding.device_set) == 8
        assert set(keys) == {Invocation(kernel, (A, B), {"scale": 2.0}).key}

    def test_has_gradients(self, form, executor):
        a, b = operands((8, 6, 5), (8, 5, 4))
        mapped = pmap_with_config(form("tests.batch"), executor=executor)
        close(jax.grad(lambda a: mapped(a, b).sum())(a), jnp.ones((8, 6, 4)) @ b.transpose(0, 2, 1))


class TestPmapDetails:
    def test_the_axis_is_there_for_collectives(self, executor):
        class Summed(Product):
            def run(self, a, b, *, cfg):
                return jax.lax.psum(a @ b, "ring")

        a, b = operands((8, 6, 5), (8, 5, 4))
        got = pmap_with_config(Summed("tests.batch.summed"), axis_name="ring", executor=executor)(a, b)
        close(got, jnp.broadcast_to((a @ b).sum(0), (8, 6, 4)))

    def test_pytrees_and_static_arguments(self, executor):
        class Tree(Kernel):
            def run(self, params, factor, *, cfg):
                return {"y": params["x"] * factor}

            def heuristic_cfg(self, inv):
                return Config()

        x = jnp.arange(16.0).reshape(8, 2)
        close(pmap_with_config(Tree("tests.batch.tree"), executor=executor)({"x": x}, 3)["y"], 3 * x)

    def test_the_leading_axis_must_be_that_of_the_devices(self, executor):
        mapped = pmap_with_config(Pair("tests.batch"), executor=executor)
        for wrong in (AS, jnp.float32(1)):
            with pytest.raises(ValueError, match=r"array.shape=\(.*len\(devices\)=8"):
                mapped(wrong, BS)

    def test_keyword_arrays_are_shared(self, executor):
        class Shifted(Product):
            def run(self, a, b, *, cfg, shift):
                return a @ b + shift["by"]

        a, b = operands((8, 6, 5), (8, 5, 4))
        mapped = pmap_with_config(Shifted("tests.batch.shifted"), executor=executor)
        for by in (1.0, 2.0):
            close(mapped(a, b, shift={"by": jnp.full(4, by)}), a @ b + by)

    def test_sees_a_changed_choice(self, executor):
        kernel = Product("tests.batch.changed")
        a, b = operands((8, 6, 5), (8, 5, 4))
        mapped = pmap_with_config(kernel, executor=executor)
        mapped(a, b)
        executor.chooser.cache.put(Invocation(kernel, (A, B)).key, Config(5))
        with watching() as seen:
            mapped(a, b)
        assert Config(5) in [s.cfg for s in seen]

    def test_nothing_is_compiled_twice(self, executor):
        a, b = operands((8, 6, 5), (8, 5, 4))
        mapped = pmap_with_config(Pair("tests.batch.once"), executor=executor)
        mapped(a, b)
        with watching() as seen:
            mapped(a, b)
        assert seen == []


@pytest.mark.parametrize("helper", [vmap_with_config, pmap_with_config])
class TestWrongInput:
    def test_kernel(self, helper):
        for wrong in ("flash", Pair, None):
            with pytest.raises(TypeError, match="kernel="):
                helper(wrong)

    def test_executor(self, helper):
        with pytest.raises(TypeError, match="executor=3"):
            helper(Pair("tests.batch"), executor=3)
