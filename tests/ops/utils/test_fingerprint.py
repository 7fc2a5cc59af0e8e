"""Fingerprints of device, sharding, toolchain and source."""

import functools
import importlib.metadata
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
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

ROOT = str(Path(tilewright.__path__[0]))


def on_eight_devices(code):
    """Runs code in a process with eight CPU devices and returns what it printed."""
    preamble = f"""
import sys, types
for name, path in {[("tilewright", ROOT), ("tilewright.ops", os.path.join(ROOT, "ops"))]!r}:
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from tilewright.ops.utils.fingerprint import sharding_fingerprint, sharding_from_fingerprint, toolchain_fingerprint
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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


class TestSharding:
    def test_one_device_has_none(self):
        x = jnp.ones((2, 3))
        seen = [sharding_fingerprint(x), sharding_fingerprint(np.ones(3)), sharding_fingerprint(3.0)]
        jax.jit(jax.vmap(lambda x: seen.append(sharding_fingerprint(x))))(x)
        jax.grad(lambda x: seen.append(sharding_fingerprint(x)) or x.sum())(x)
        seen.append(sharding_fingerprint(jax.ShapeDtypeStruct((2,), jnp.float32)))
        seen.append(sharding_fingerprint(jax.random.key(0)))
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        seen.append(sharding_fingerprint(jax.device_put(x, one)))
        assert set(seen) == {""}

    @pytest.mark.parametrize("text", ["[a=4](a)", "[a=4,b=2](a,-,b)", "[x=2,y=2,z=2](-,x+z)"])
    def test_rebuilt_from_its_text(self, text):
        struct = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=sharding_from_fingerprint(text))
        assert sharding_fingerprint(struct) == text

    @pytest.mark.parametrize("text", ["", "nonsense", "[a=4](b)", "[](a)", "[a=4](a)unreduced{b}", "GSPMD[8](1,2)"])
    def test_text_that_tells_too_little(self, text):
        assert sharding_from_fingerprint(text) is None

    def test_eight_devices(self):
        lines = on_eight_devices(
            """
            import jax, jax.numpy as jnp
            from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
            x = jnp.ones((8, 8))
            devices = jax.devices()
            def mesh(kind, order=1):
                return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2, devices=devices[::order])
            def traced(x):
                seen = []
                jax.jit(lambda x: seen.append(sharding_fingerprint(x)))(x)
                return seen[0]
            for kind in (AxisType.Explicit, AxisType.Auto):
                for spec in (P("a"), P(None, "b"), P(("a", "b"), None), P("b", "a"), P(), P(None, None)):
                    y = jax.device_put(x, NamedSharding(mesh(kind), spec))
                    z = jax.device_put(x, NamedSharding(mesh(kind, -1), spec))
                    struct = jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=y.sharding)
                    assert sharding_fingerprint(y) == sharding_fingerprint(z) == sharding_fingerprint(struct)
                    print(sharding_fingerprint(y) or "-", traced(y) or "-")
            seen = []
            def inside(x):
                seen.append(sharding_fingerprint(x))
                return x
            local = jax.shard_map(inside, mesh=mesh(AxisType.Explicit), in_specs=P("a"), out_specs=P("a"))
            jax.jit(local)(jax.device_put(x, NamedSharding(mesh(AxisType.Explicit), P("a"))))
            jax.vmap(inside)(jax.device_put(x, NamedSharding(mesh(AxisType.Explicit), P(None, "b"))))
            print(*[text or "-" for text in seen])
            y = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P("a", "b")))
            other = jax.jit(lambda x: x.T)(y)
            print(sharding_fingerprint(other))
            host = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P("a"), memory_kind="pinned_host"))
            print(sharding_fingerprint(host))
            """
        )
        known = ["[a=4,b=2](a)", "[a=4,b=2](-,b)", "[a=4,b=2](a+b)", "[a=4,b=2](b,a)", "-", "-"]
        assert lines[:6] == [f"{text} {text}" for text in known]
        assert lines[6:12] == [f"{text} -" for text in known]  # automatic axes do not show in a traced type
        assert lines[12] == "- [a=4,b=2](b)"
        assert lines[13] == "[a=4,b=2](b,a)"
        assert lines[14] == "[a=4,b=2](a)@pinned_host"


class TestToolchain:
    def test_versions(self):
        versions = toolchain_fingerprint()
        assert versions["jax"] == importlib.metadata.version("jax") == jax.__version__
        assert versions["jaxlib"] == importlib.metadata.version("jaxlib")
        for name, version in versions.items():
            assert importlib.metadata.version(name) == version
        versions["jax"] = "changed"
        assert toolchain_fingerprint()["jax"] == jax.__version__

    def test_imports_nothing_heavy_and_touches_no_device(self):
        lines = on_eight_devices(
            """
            import tilewright.ops.config.persistent, tilewright.ops.utils.serialize
            toolchain_fingerprint()
            print(sorted({"jax", "jaxlib", "triton", "msgspec", "platformdirs"} & sys.modules.keys()))
            """
        )
        assert lines == ["[]"]


class TestSource:
    def test_class_function_module_instance(self):
        found = [source_fingerprint(thing) for thing in (TestSource, TestDevice, on_eight_devices, functools)]
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
