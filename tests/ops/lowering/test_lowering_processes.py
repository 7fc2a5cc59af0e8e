"""Real processes, real kernels: what one lowers for a GPU that is not here the next ones take from the disk."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tests.ops.lowering.test_custom_calls import PLUGIN

ROOT = Path(tilewright.__path__[0]).parent

HOPPER = """
import hashlib, json, sys
import jax, jax.numpy as jnp
from tilewright.kernels.op.choice import DECLARED
from tilewright.modules import flash_attention
from tilewright.ops.lowering import lowering, mlir_modules, stages

counts = {"traced": 0, "lowered": 0}
def counting(module, name, what):
    function = getattr(module, name)
    def counted(*args):
        # Types are declared in every process: nothing but their primitive is traced.
        counts[what] += getattr(getattr(args[0], "cfg", None), "value", None) != DECLARED
        return function(*args)
    setattr(module, name, counted)
counting(stages, "_trace", "traced")
counting(mlir_modules, "lower", "lowered")

device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
query, key = (jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
def loss(query, key, value):
    return flash_attention(query, key, value, causal=True, platform="pallas").astype(jnp.float32).sum()
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(query, key, key)
    lowered = gradient.lower(lowering_platforms=("cuda",))
text = lowered.as_text()
assert text.count("mosaic_gpu_v2") >= 3
imported = "jax.experimental.mosaic.gpu" in sys.modules
sha = hashlib.sha256(text.encode()).hexdigest()
print(json.dumps({**counts, "sha": sha, "x64": jax.config.jax_enable_x64, "imported": imported}))
"""

TRITON = """
import hashlib, json, sys
import jax, jax.numpy as jnp
from tests.every_op.matrix import without_builds
from tilewright.modules import page_attention, rms_norm
from tilewright.ops.lowering import mlir_modules

lowered, lower = [], mlir_modules.lower
mlir_modules.lower = lambda *args: lowered.append(args) or lower(*args)

struct = jax.ShapeDtypeStruct
pages, table = struct((8, 16, 2, 64), jnp.bfloat16), struct((4, 2), jnp.int32)
def step(x, weight, pages, table, lengths):
    x = rms_norm(x, weight, platform="triton")
    return page_attention(x.reshape(4, 4, 64), pages, pages, table, lengths, platform="triton")
device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
arrays = struct((4, 256), jnp.bfloat16), struct((256,), jnp.bfloat16), pages, table, struct((4,), jnp.int32)
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)), without_builds():
    text = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
sha = hashlib.sha256(text.encode()).hexdigest()
imported = [name for name in ("triton", "jax.experimental.mosaic.gpu") if name in sys.modules]
print(json.dumps({"lowered": len(lowered), "sha": sha, "calls": text.count("@triton_kernel_call_ffi"),
                  "imported": imported}))
"""

ON_THE_CPU = """
import json, sys
import jax, jax.numpy as jnp
from tilewright.modules import flash_attention

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
arrays = [jnp.ones((1, 64, 2, 16))] * 3
gradient = jax.jit(jax.value_and_grad(lambda *a: flash_attention(*a, causal=True).sum(), (0, 1, 2)))
out, gradients = gradient(*arrays)
flash_attention(*arrays)
jax.block_until_ready(gradients)
counts = {name: sum(event.endswith(name) for event in events) for name in ("cache_hits", "cache_misses")}
print(json.dumps({**counts, "out": float(out)}))
"""


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "MOSAIC_"))}
    own = {"PYTHONPATH": str(ROOT), "TILEWRIGHT_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=inherited | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What processes with one cache say: two at once, and three after them, one after the other.

    There is a library of Mosaic GPU beside a plugin, so no process needs the lowering for its custom call.
    """
    cache, library = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("library")
    (library / "libmosaic_gpu_runtime.so").touch()
    program = PLUGIN.format(file=str(library / "ext.so")) + HOPPER
    both = [start(program, cache) for _ in range(2)]
    found: dict[str, Any] = {"at once": [said(process) for process in both]}
    found["files"] = len(list((cache / "lowered").iterdir()))
    # From another place in another program.
    found["after"] = said(start("\n\ndef elsewhere():\n    exec(compile(program, 'other', 'exec'), {})\n"
                                f"program = {program!r}\nelsewhere()", cache))  # fmt: skip
    found["files after"] = len(list((cache / "lowered").iterdir()))
    for path in (cache / "lowered").glob("*-cuda-*"):
        path.unlink()
    found["late"] = said(start(program, cache))
    found["wide"] = said(start(program, cache, JAX_ENABLE_X64="1"))
    return found


def test_processes_at_once_do_not_disturb_each_other(hopper: dict[str, Any]):
    assert len({each["sha"] for each in hopper["at once"]}) == 1
    assert max((each["traced"], each["lowered"]) for each in hopper["at once"]) == (2, 2)
    assert hopper["files"] == 4


def test_the_second_process_lowers_nothing(hopper: dict[str, Any]):
    assert (hopper["after"]["traced"], hopper["after"]["lowered"]) == (0, 0)
    assert hopper["after"]["sha"] == hopper["at once"][0]["sha"]
    assert hopper["files after"] == 4


def test_what_is_traced_late_is_the_same(hopper: dict[str, Any]):
    """With its results known, a kernel is traced only when the program around it is lowered."""
    assert (hopper["late"]["traced"], hopper["late"]["lowered"]) == (2, 2)
    assert hopper["late"]["sha"] == hopper["at once"][0]["sha"]


def test_another_setting_is_another_program(hopper: dict[str, Any]):
    assert (hopper["late"]["x64"], hopper["wide"]["x64"]) == (False, True)
    assert hopper["wide"]["lowered"] == 2


def test_nothing_of_the_lowering_is_imported_for_kernels_on_disk(hopper: dict[str, Any]):
    assert (hopper["late"]["imported"], hopper["after"]["imported"]) == (True, False)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What processes with one cache say of Triton kernels: two, one with another Triton, and one with other sources."""
    pytest.importorskip("triton")
    cache, other = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("other")
    found = {name: said(start(TRITON, cache)) for name in ("first", "second")}
    # The first on the path is the one that counts, also for Triton, which finds its compilers by its entry points.
    about = other / "triton-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 99.0\n")
    (about / "entry_points.txt").write_text("[triton.backends]\nnvidia = triton.backends.nvidia\n")
    found["version"] = said(start(TRITON, cache, PYTHONPATH=os.pathsep.join([str(other), str(ROOT)])))
    shutil.copytree(ROOT / "tilewright", other / "sources" / "tilewright", ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / "sources" / "tilewright" / "kernels" / "paged_attention" / "triton" / "elements.py"
    changed.write_text(f"{changed.read_text()}\nADDED = 1\n")
    path = os.pathsep.join([str(other / "sources"), str(ROOT)])
    # Without the working directory before the path.
    found["sources"] = said(start(TRITON, cache, PYTHONPATH=path, PYTHONSAFEPATH="1"))
    found["again"] = said(start(TRITON, cache))
    return found


def test_triton_is_not_imported_for_kernels_on_disk(triton: dict[str, Any]):
    assert (triton["first"]["lowered"], triton["first"]["imported"]) == (2, ["triton"])
    assert triton["first"]["calls"] >= 2
    for name in ("second", "again"):
        assert triton[name] == {**triton["first"], "lowered": 0, "imported": []}


@pytest.mark.parametrize("change", ["version", "sources"])
def test_another_triton_and_other_sources_find_nothing(triton: dict[str, Any], change: str):
    assert (triton[change]["lowered"], triton[change]["imported"]) == (2, ["triton"])


def test_with_jaxs_own_cache_the_second_process_compiles_nothing(tmp_path):
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (said(start(ON_THE_CPU, tmp_path, **compiled)) for _ in range(2))
    assert first["cache_misses"] > 0
    assert second["cache_misses"] == 0
    assert second["cache_hits"] >= first["cache_misses"]
    assert first["out"] == second["out"]
