"""The custom call of Mosaic GPU is registered as importing its lowering registers it, and without that import."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
from tilewright.ops.lowering.mosaic_target import register_mosaic_gpu
{before}
register_mosaic_gpu()
print(json.dumps(["jax.experimental.mosaic.gpu" in sys.modules, os.environ.get("MOSAIC_GPU_RUNTIME_LIB_PATH")]))
"""

PLUGIN = """
import types, jax._src.lib
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
    imported, said = after(PLUGIN.format(file=str(tmp_path / "ext.so")))
    assert imported != has_library
    assert said == (str(library) if has_library else None)


def test_importing_the_lowering_says_the_same(tmp_path):
    (tmp_path / "libmosaic_gpu_runtime.so").touch()
    plugin = PLUGIN.format(file=str(tmp_path / "ext.so"))
    assert after(plugin + "\nimport jax.experimental.mosaic.gpu")[1] == after(plugin)[1]


ATTENTION = """
import sys, jax
from tilewright.modules import flash_attention
{plugin}
query = jax.ShapeDtypeStruct((1, 512, 4, 64), "bfloat16")
device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
loss = lambda *arrays: flash_attention(*arrays, causal=True).astype("float32").sum()
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    text = jax.jit(jax.grad(loss)).trace(query, query, query).lower(lowering_platforms=("cuda",)).as_text()
assert text.count("mosaic_gpu_v2") >= 3
print("jax.experimental.mosaic.gpu" in sys.modules)
"""


def test_nothing_of_the_lowering_is_imported_for_kernels_on_disk(tmp_path):
    (tmp_path / "libmosaic_gpu_runtime.so").touch()
    script = ATTENTION.format(plugin=PLUGIN.format(file=str(tmp_path / "ext.so")))
    environment = os.environ | {"TILEWRIGHT_CACHE_DIR": str(tmp_path / "caches")}
    imported = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        imported.append(done.stdout.splitlines()[-1])
    assert imported == ["True", "False"]
