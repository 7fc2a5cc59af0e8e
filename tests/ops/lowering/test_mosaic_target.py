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
