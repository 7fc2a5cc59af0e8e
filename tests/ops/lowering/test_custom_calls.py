"""Custom calls on disk: registered without importing what lowers to them, and kept only if others would make them."""

import json
import os
import subprocess
import sys

import pytest
from jax._src.lib import gpu_triton

from tilewright.ops.lowering import custom_calls
from tilewright.ops.utils.triton_settings import triton_settings

SCRIPT = """
import json, os, sys
from tilewright.ops.lowering import custom_calls
{before}
custom_calls.register([custom_calls.MOSAIC_GPU])
print(json.dumps(["jax.experimental.mosaic.gpu" in sys.modules, os.environ.get("MOSAIC_GPU_RUNTIME_LIB_PATH")]))
"""

PLUGIN = """
import sys, types, jax._src.lib
library = types.ModuleType("jax._src.lib.mosaic_gpu")
library._mosaic_gpu_ext = types.SimpleNamespace(__file__={file!r})
sys.modules["jax._src.lib.mosaic_gpu"] = jax._src.lib.mosaic_gpu = library
"""


def after(before: str) -> list:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOSAIC_GPU")}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("has_library", [True, False])
def test_the_lowering_is_imported_only_where_the_library_is_elsewhere(tmp_path, has_library):
    library = tmp_path / "libmosaic_gpu_runtime.so"
    if has_library:
        library.touch()
    plugin = PLUGIN.format(file=str(tmp_path / "ext.so"))
    imported, said = after(plugin)
    assert imported != has_library
    assert said == (str(library) if has_library else None)
    if has_library:  # importing it says the same
        assert after(plugin + "\nimport jax.experimental.mosaic.gpu")[1] == said


def test_an_unknown_call_is_not_kept():
    assert not custom_calls.can_be_kept([custom_calls.MOSAIC_GPU, "xla_ffi_python_gpu_callback"])
    with pytest.raises(KeyError):
        custom_calls.register(["xla_ffi_python_gpu_callback"])


def test_tritons_call_comes_with_the_plugin(monkeypatch):
    monkeypatch.setattr(gpu_triton, "TritonKernelCall", lambda: None, raising=False)
    custom_calls.register([custom_calls.TRITON])
    monkeypatch.delattr(gpu_triton, "TritonKernelCall")
    with pytest.raises(ImportError, match="plugin"):
        custom_calls.register([custom_calls.TRITON])


class TestSettingsOfTriton:
    """They are told from what says where files are, and from what other packages read."""

    # In the order of Triton's own list of those that its cache heeds, and some of those that it forgets.
    @pytest.mark.parametrize(
        "name",
        [
            "DISABLE_FAST_REDUCTION", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5", "DISABLE_PTXAS_OPT",
            "LLVM_IR_ENABLE_DUMP", "LLVM_ENABLE_TIMING", "LLVM_PASS_PLUGIN_PATH", "MLIR_ENABLE_DIAGNOSTICS",
            "MLIR_ENABLE_DUMP", "MLIR_DUMP_PATH", "MLIR_ENABLE_TIMING", "MLIR_DISABLE_MULTITHREADING",
            "TRITON_DEFAULT_FP_FUSION", "TRITON_DISABLE_LINE_INFO", "TRITON_ENABLE_LLVM_DEBUG",
            "TRITON_LLVM_DEBUG_ONLY", "TRITON_ENABLE_ASAN", "TRITON_OVERRIDE_ARCH", "USE_IR_LOC", "NVPTX_ENABLE_DUMP",
            "STORE_TMEM_TO_GLOBAL_BYPASS_SMEM", "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "TRITON_F32_DEFAULT",
            "ENABLE_MMA_V5_ATT_PIPELINE", "WARP_SPECIALIZE_ATTENTION_FLAG", "TRITON_KERNEL_OVERRIDE",
            "TRITON_KERNEL_DUMP", "TRITON_INTERPRET", "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION",
            "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_INSTRUMENTATION_MODE", "TRITON_PLUGIN_PATHS",
            "LLVM_EXTRACT_DI_LOCAL_VARIABLES", "TRITON_OF_A_LATER_VERSION",
        ],
    )  # fmt: skip
    def test_of_the_environment(self, monkeypatch, name):
        before = triton_settings()
        assert custom_calls.can_be_kept([custom_calls.TRITON])
        monkeypatch.setenv(name, "1")
        assert set(triton_settings()) - set(before) == {f"{name}=1"}
        assert not custom_calls.can_be_kept([custom_calls.TRITON])
        assert custom_calls.can_be_kept([custom_calls.MOSAIC_GPU])
        monkeypatch.setenv(name, "")
        assert triton_settings() == before

    @pytest.mark.parametrize(
        "name",
        [
            "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER", "TRITON_PTXAS_PATH",
            "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PRINT_AUTOTUNING", "LLVM_CONFIG",
            "LLVM_SYMBOLIZER_PATH", "DISABLE_TELEMETRY",
        ],
    )  # fmt: skip
    def test_harmless_ones(self, monkeypatch, name):
        monkeypatch.setenv(name, "1")
        assert triton_settings() == ()

    def test_of_the_process(self, monkeypatch):
        knobs = pytest.importorskip("triton.knobs")
        assert triton_settings() == ()
        monkeypatch.setitem(knobs.compilation.__dict__, "use_ir_loc", "ttir")
        assert triton_settings() == ("use_ir_loc=ttir",)
        monkeypatch.setitem(knobs.runtime.__dict__, "add_stages_inspection_hook", print)
        assert len(triton_settings()) == 2
        monkeypatch.undo()
        knobs.refresh_knobs()  # sets attributes to what they are
        assert triton_settings() == ()
        monkeypatch.setattr(type(knobs.compilation), "instrumentation_mode", "fpsan")
        monkeypatch.delitem(knobs.compilation.__dict__, "instrumentation_mode")
        assert triton_settings() == ("instrumentation_mode=fpsan",)
