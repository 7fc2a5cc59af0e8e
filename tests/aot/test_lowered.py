"""What a kernel was lowered to in another process compiles to the same machine code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.aot.compiler import H100, KernelReport, compile_for_h100, compile_lowered, lower_as_there, missing_packages
from tilewright.kernels.triton import compiler
from tilewright.modules import flash_attention, page_attention, rms_norm, sample
from tilewright.ops.lowering import mlir_modules
from tilewright.ops.lowering.ahead import CompiledKernels
from tilewright.ops.lowering.lowered_files import LoweredFiles
from tilewright.ops.utils.memory import clear_all

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")

QUERY = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)


def gradients(query, key, value):
    out = lambda *arrays: flash_attention(*arrays, causal=True, platform="pallas").astype(jnp.float32).sum()
    return jax.value_and_grad(out, (0, 1, 2))(query, key, value)


def facts(reports: list[KernelReport]) -> list[KernelReport]:
    """The reports without what depends on the order of compilation."""
    return sorted((dataclasses.replace(report, shared_bytes=None) for report in reports), key=lambda each: each.name)


def test_kernels_from_the_disk_are_the_same_machine_code(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    in_place = compile_for_h100(gradients, QUERY, KEY, KEY)
    assert not list(tmp_path.iterdir())  # who asks for the compiler's words gets all of its work
    clear_all()
    first = lower_as_there(gradients, QUERY, KEY, KEY)
    assert len(list((tmp_path / "lowered").iterdir())) == 4
    clear_all()

    def never(*_):
        raise AssertionError("it is on disk")

    monkeypatch.setattr(mlir_modules, "lower", never)
    from_disk = lower_as_there(gradients, QUERY, KEY, KEY)
    assert from_disk.as_text() == first.as_text()
    reports = compile_lowered(from_disk)
    assert len(in_place) >= 3
    assert facts(reports) == facts(in_place)


def decoded(x, weight, pages, table, lengths):
    x = rms_norm(x, weight, platform="triton")
    out = page_attention(x.reshape(4, 8, 64), pages, pages, table, lengths, platform="triton")
    return sample(out.reshape(4, -1).astype(jnp.float32), jax.random.key(0), platform="triton")


def test_triton_kernels_from_the_disk_compile_with_the_program(monkeypatch, tmp_path):
    """The plugin's own custom call takes them; the process compiles no Triton."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    struct = jax.ShapeDtypeStruct
    pages, table = struct((16, 16, 2, 64), jnp.bfloat16), struct((4, 3), jnp.int32)
    arrays = struct((4, 512), jnp.bfloat16), struct((512,), jnp.bfloat16), pages, table, struct((4,), jnp.int32)
    first = lower_as_there(decoded, *arrays)
    assert len(list((tmp_path / "lowered").iterdir())) == 6
    clear_all()

    def never(*_):
        raise AssertionError("it is on disk")

    monkeypatch.setattr(mlir_modules, "lower", never)
    monkeypatch.setattr(compiler, "_compiled", never)
    from_disk = lower_as_there(decoded, *arrays)
    assert from_disk.as_text() == first.as_text()
    calls = from_disk.as_text().count("@triton_kernel_call_ffi")
    assert calls >= 4
    assert from_disk.compile().as_text().count('custom_call_target="triton_kernel_call_ffi"') == calls


class CompilesOnly:
    """The client of devices that are not there, as one that could load what it has compiled."""

    def __init__(self, device: jax.Device):
        self._client = device.client
        self._device = device
        self.platform, self.platform_version = self._client.platform, self._client.platform_version

    def local_devices(self):
        return [self._device]

    def compile_and_load(self, module, devices, options):
        return self._client.compile(module, devices, options)

    def serialize_executable(self, executable):
        return executable.serialize()


def test_kernels_are_compiled_one_by_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_LOWERED", "0")
    lowered = lower_as_there(gradients, QUERY, KEY, KEY)
    monkeypatch.delenv("TILEWRIGHT_LOWERED")
    kernels = CompiledKernels(LoweredFiles(tmp_path))
    caplog.set_level("INFO", logger="tilewright")
    with tilewright.target_device(H100) as target:
        client = CompilesOnly(target.devices[0])
    kernels.begin(client, lowered.compiler_ir())
    kernels.wait()
    calls = lowered.as_text().count("@mosaic_gpu_v2")
    assert (kernels.compiled, kernels.loaded) == (calls, 0), caplog.text
    assert calls >= 3
    assert LoweredFiles(tmp_path).usage()[0] == calls
