"""Fingerprints of device, sharding, toolchain and source."""

import functools
import importlib.metadata
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.ops.utils import fingerprint
from tilewright.ops.utils.fingerprint import (
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
    sharding_from_fingerprint,
    source_fingerprint,
    toolchain_fingerprint,
)


class FakeDevice(types.SimpleNamespace):
    __hash__ = object.__hash__


class TestDevice:
    @pytest.mark.parametrize(
        ("platform", "kind", "best"),
        [("cuda", "gpu", "triton"), ("rocm", "gpu", "triton"), ("tpu", "tpu", "pallas"), ("neuron", "cpu", "xla")],
    )
    def test_other_platforms(self, monkeypatch, platform, kind, best):
        monkeypatch.setattr(fingerprint, "default_device", lambda: FakeDevice(platform=platform))
        assert (device_kind(), get_device_platform()) == (kind, best)

    def test_names_what_tuning_depends_on(self):
        h100 = FakeDevice(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0", id=3)
        assert device_fingerprint(h100) == "gpu:NVIDIA H100 80GB HBM3:9.0"
        assert device_fingerprint(FakeDevice(platform="rocm", device_kind="MI300X", compute_capability="gfx942")) == (
            "gpu:MI300X:gfx942"
        )
        assert device_fingerprint(FakeDevice(platform="tpu", device_kind="TPU v5e")) == "tpu:TPU v5e"

    def test_cpu(self):
        cpu = jax.devices("cpu")[0]
        text = device_fingerprint(cpu)
        kind, machine, model, cores = text.split(":")
        assert kind == "cpu"
        assert machine == os.uname().machine
        assert model
        assert int(cores) >= 1
        assert device_fingerprint(jax.devices("cpu")[-1]) == text

    @pytest.mark.parametrize(
        ("cpuinfo", "model"),
        [
            ("processor\t: 0\nmodel name\t:  AMD EPYC  7B13\n", "AMD EPYC 7B13"),
            ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "0x41-0xd0c"),
        ],
    )
    def test_cpu_model(self, monkeypatch, tmp_path, cpuinfo, model):
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(fingerprint, "open", lambda *a, **k: (tmp_path / "cpuinfo").open(), raising=False)
        assert fingerprint._cpu_model() == model

    def test_follows_the_default_device(self):
        with jax.default_device("cpu"):
            assert device_kind() == "cpu"
        with jax.default_device(jax.devices("cpu")[0]):
            assert device_fingerprint() == device_fingerprint(jax.devices("cpu")[0])


def mesh(kind, order=1):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[::order])


class TestSharding:
    def test_one_device_has_none(self):
        x = jnp.ones((2, 3))
        seen = [sharding_fingerprint(x), sharding_fingerprint(np.ones(3)), sharding_fingerprint(3.0)]
        jax.jit(jax.vmap(lambda x: seen.append(sharding_fingerprint(x))))(x)
        jax.grad(lambda x: seen.append(sharding_fingerprint(x)) or x.sum())(x)
        seen.append(sharding_fingerprint(jax.ShapeDtypeStruct((2,), jnp.float32)))
        seen.append(sharding_fingerprint(jax.random.key(0)))
        one = NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), P("data"))
        seen.append(sharding_fingerprint(jax.device_put(x, one)))
        assert set(seen) == {""}

    @pytest.mark.parametrize("text", ["[a=4](a)", "[a=4,b=2](a,-,b)", "[x=2,y=2,z=2](-,x+z)"])
    def test_rebuilt_from_its_text(self, text):
        struct = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=sharding_from_fingerprint(text))
        assert sharding_fingerprint(struct) == text

    @pytest.mark.parametrize("text", ["", "nonsense", "[a=4](b)", "[](a)", "[a=4](a)unreduced{b}", "GSPMD[8](1,2)"])
    def test_text_that_tells_too_little(self, text):
        assert sharding_from_fingerprint(text) is None

    @pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
    @pytest.mark.parametrize(
        ("spec", "text"),
        [
            (P("a"), "[a=4,b=2](a)"),
            (P(None, "b"), "[a=4,b=2](-,b)"),
            (P(("a", "b"), None), "[a=4,b=2](a+b)"),
            (P("b", "a"), "[a=4,b=2](b,a)"),
            (P(), ""),
            (P(None, None), ""),
        ],
    )
    def test_of_several_devices(self, kind, spec, text):
        x, traced = jnp.ones((8, 8)), []
        one, other = (jax.device_put(x, NamedSharding(mesh(kind, order), spec)) for order in (1, -1))
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one.sharding)
        assert sharding_fingerprint(one) == sharding_fingerprint(other) == sharding_fingerprint(struct) == text
        jax.jit(lambda x: traced.append(sharding_fingerprint(x)))(one)
        assert traced == [text if kind is AxisType.Explicit else ""]  # automatic axes do not show in a traced type

    def test_under_transformations_and_in_other_memory(self):
        x, seen = jnp.ones((8, 8)), []

        def inside(x):
            seen.append(sharding_fingerprint(x))
            return x

        explicit, auto = mesh(AxisType.Explicit), mesh(AxisType.Auto)
        local = jax.shard_map(inside, mesh=explicit, in_specs=P("a"), out_specs=P("a"))
        jax.jit(local)(jax.device_put(x, NamedSharding(explicit, P("a"))))
        jax.vmap(inside)(jax.device_put(x, NamedSharding(explicit, P(None, "b"))))
        assert seen == ["", "[a=4,b=2](b)"]
        turned = jax.jit(lambda x: x.T)(jax.device_put(x, NamedSharding(auto, P("a", "b"))))
        assert sharding_fingerprint(turned) == "[a=4,b=2](b,a)"
        host = jax.device_put(x, NamedSharding(auto, P("a"), memory_kind="pinned_host"))
        assert sharding_fingerprint(host) == "[a=4,b=2](a)@pinned_host"


class TestToolchain:
    def test_versions(self):
        versions = toolchain_fingerprint()
        assert versions["jax"] == importlib.metadata.version("jax") == jax.__version__
        assert versions["jaxlib"] == importlib.metadata.version("jaxlib")
        for name, version in versions.items():
            assert importlib.metadata.version(name) == version
        versions["jax"] = "changed"
        assert toolchain_fingerprint()["jax"] == jax.__version__


class TestSource:
    def test_class_function_module_instance(self):
        found = [source_fingerprint(thing) for thing in (TestSource, TestDevice, mesh, functools)]
        assert all(len(text) == 16 for text in found)
        assert len(set(found)) == 4
        assert source_fingerprint(TestSource()) == source_fingerprint(TestSource) == found[0]

    def test_changes_with_the_source(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        texts = set()
        for number in (1, 2):
            (tmp_path / f"written_{number}.py").write_text(f"class Thing:\n    value = {number}\n")
            texts.add(source_fingerprint(__import__(f"written_{number}").Thing))
        assert len(texts) == 2
