"""Real processes, real kernels: what one lowers for a GPU that is not here the next ones take from the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tilewright

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
assert text.count("mosaic_gpu") >= 3
print(json.dumps({**counts, "sha": hashlib.sha256(text.encode()).hexdigest(), "x64": jax.config.jax_enable_x64}))
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
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    own = {"PYTHONPATH": str(ROOT), "TILEWRIGHT_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=inherited | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def test_the_second_process_lowers_nothing(tmp_path):
    first = said(start(HOPPER, tmp_path))
    assert (first["traced"], first["lowered"]) == (2, 2)
    # From another place in another program.
    second = said(start("\n\ndef elsewhere():\n    exec(compile(program, 'other', 'exec'), {})\n"
                        f"program = {HOPPER!r}\nelsewhere()", tmp_path))  # fmt: skip
    assert (second["traced"], second["lowered"]) == (0, 0)
    assert second["sha"] == first["sha"]
    assert len(list((tmp_path / "lowered").iterdir())) == 4


def test_what_is_traced_late_is_the_same(tmp_path):
    """With its results known, a kernel is traced only when the program around it is lowered."""
    first = said(start(HOPPER, tmp_path))
    for path in (tmp_path / "lowered").glob("*-cuda-*"):
        path.unlink()
    second = said(start(HOPPER, tmp_path))
    assert (second["traced"], second["lowered"]) == (2, 2)
    assert second["sha"] == first["sha"]


def test_another_setting_is_another_program(tmp_path):
    first = said(start(HOPPER, tmp_path))
    wide = said(start(HOPPER, tmp_path, JAX_ENABLE_X64="1"))
    assert (first["x64"], wide["x64"]) == (False, True)
    assert wide["lowered"] == 2


def test_processes_at_once_do_not_disturb_each_other(tmp_path):
    processes = [start(HOPPER, tmp_path) for _ in range(3)]
    assert len({said(process)["sha"] for process in processes}) == 1
    after = said(start(HOPPER, tmp_path))
    assert (after["traced"], after["lowered"]) == (0, 0)
    assert len(list((tmp_path / "lowered").iterdir())) == 4


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
