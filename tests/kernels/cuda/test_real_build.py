"""One group of the RMSNorm example through the real nvcc: compiled, loaded, asked for its facts, and lowered."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_rms_norm.rms_norm import TABLE, RmsNormVariant, cuda_reasons, cuda_rms_norm

from tests.kernels.conftest import A100, H100, nvcc_marks
from tests.support.fake_nvcc import sample_table
from tilewright.errors import BuildError
from tilewright.kernels.cuda import BuildCache, CudaKernel, Group, build
from tilewright.kernels.cuda.toolchain import find_compiler, missing

REASONS = missing(80) + missing(90)
pytestmark = nvcc_marks(REASONS)

DEVICES = {80: A100, 90: H100}


@pytest.mark.parametrize("capability", DEVICES)
def test_a_group_is_compiled_loaded_and_selected_from(capability, real_cache):
    (library,) = build([Group(TABLE, "float32", capability)], cache=real_cache).values()
    functions = ctypes.CDLL(str(library))
    assert functions.tilewright_variant_count() == 6

    kernel, device = CudaKernel(TABLE, real_cache), DEVICES[capability]
    for width, name in ((1024, "float32_1024_pack4"), (1022, "float32_1024_pack1"), (16384, "float32_16384_pack4")):
        problem = {"rows": 5, "width": width, "dtype": 0}
        variant, reasons = kernel.select(problem, device)
        assert variant.name == name
        assert all(reasons.values())
        facts = kernel.facts(variant, device)
        assert facts == {
            "shared_bytes": facts["threads"] // 32 * 4,
            "threads": {1024: 128, 16384: 512}[variant.max_width],
            "alignment": variant.pack,
        }
        assert kernel.workspace(variant, problem, device) == 0


def test_a_call_is_lowered_for_cuda(real_cache, monkeypatch):
    monkeypatch.setattr("cuda_rms_norm.rms_norm.KERNEL", CudaKernel(TABLE, real_cache))
    x, weight = jax.ShapeDtypeStruct((3, 7, 1024), jnp.float32), jax.ShapeDtypeStruct((1024,), jnp.float32)
    assert cuda_reasons(x, DEVICES[90]) == []
    traced = jax.jit(lambda x, weight: cuda_rms_norm(x, weight, 1e-5, DEVICES[90])).trace(x, weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.custom_call @tilewright_rms_norm_float32_sm_90a_" in text
    for attribute in ('variant = "float32_1024_pack4"', "problem = dense<[21, 1024, 0]>", "eps = 9.99999974E-6 : f32"):
        assert attribute in text


def test_xla_accepts_the_handler(real_cache):
    """As far as that goes without a GPU: XLA asks it for its metadata and decodes all but the stream."""
    (library,) = build([Group(TABLE, "float32", 90)], cache=real_cache).values()
    handler = ctypes.CDLL(str(library)).tilewright_call
    jax.ffi.register_ffi_target("tilewright_handler_on_cpu", jax.ffi.pycapsule(handler), platform="cpu")
    call = jax.ffi.ffi_call("tilewright_handler_on_cpu", [jax.ShapeDtypeStruct((4,), np.uint8)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="stream"):
        jax.block_until_ready(call(variant="float32_1024_pack4", problem=np.array([1, 2, 0], np.int64)))


def test_the_compilers_own_message_is_reported(tmp_path):
    table = sample_table(tmp_path)
    (tmp_path / "sample_part.h").write_text("#error this header is broken\n")
    cache = BuildCache(tmp_path / "builds")
    with pytest.raises(BuildError, match="could not compile sample slow sm_90a") as failed:
        build([Group(table, "slow", 90)], cache=cache)
    assert "sample_part.h:1" in failed.value.output
    assert "this header is broken" in failed.value.output
    assert list(cache.path.iterdir()) == []


def test_the_compiler_says_what_it_is():
    compiler = find_compiler()
    assert (compiler.root / "include" / "cuda_runtime.h").is_file()
    assert compiler.version.split(".")[0].isdigit()
    assert RmsNormVariant("float32", 1024, 4) in TABLE.variants
