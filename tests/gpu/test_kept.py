"""Triton kernels that one process has lowered for a GPU run in the next one, which does not import Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

SCRIPT = """
import functools, hashlib, json, sys
import jax, jax.numpy as jnp
import numpy as np
from tilewright.modules import linear_sample, page_attention, rms_norm, rope_update_pages, sample

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
keys = iter(jax.random.split(jax.random.key(0), 16))
def normal(*shape):
    return jax.random.normal(next(keys), shape, jnp.float32).astype(jnp.bfloat16)

sequences, heads, kv_heads, dim, pages = 4, 8, 2, 128, 40
table = jnp.arange(sequences * 8, dtype=jnp.int32).reshape(sequences, 8)
lengths = jnp.array([1, 17, 100, 128], jnp.int32)
triton = {"platform": "triton"}

def decode(x, weight, head, key_pages, value_pages, key, value):
    x = rms_norm(x, weight, **triton)
    query = x.reshape(sequences, heads, dim)
    query, key_pages, value_pages = rope_update_pages(
        query, key_pages, value_pages, key, value, table, lengths, **triton)
    out = page_attention(query, key_pages, value_pages, table, lengths, **triton)
    hidden = out.reshape(sequences, heads * dim)
    drawn = linear_sample(hidden, head, jax.random.key(1), **triton)
    return drawn, sample(hidden.astype(jnp.float32), jax.random.key(2), **triton), out, key_pages, value_pages

def loss(x, weight):
    return jnp.sin(rms_norm(x, weight, **triton).astype(jnp.float32)).sum()

x, weight, head = normal(sequences, heads * dim), normal(heads * dim), normal(heads * dim, 1000)
caches = [normal(pages, 16, kv_heads, dim) for _ in range(2)]
new = [normal(sequences, kv_heads, dim) for _ in range(2)]
addresses = [array.unsafe_buffer_pointer() for array in caches]
step = jax.jit(decode, donate_argnums=(3, 4))
results = [step(x, weight, head, *caches, *new)]
in_place = [array.unsafe_buffer_pointer() for array in results[0][-2:]] == addresses
rows = jnp.stack([x, 2 * x])
results.append(jax.jit(jax.grad(loss, (0, 1)))(x, weight))
results.append(jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(rows, weight))
results.append(jax.jit(lambda x: jax.lax.scan(lambda c, _: (rms_norm(c, weight, **triton), c), x, length=3))(x))
sums = [hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for array in jax.tree.leaves(results)]
count = lambda name: sum(event.endswith(name) for event in events)
print(json.dumps({"sums": sums, "in_place": in_place, "imported": "triton" in sys.modules,
                  "hits": count("/cache_hits"), "misses": count("/cache_misses")}))
"""


def run(folder: Path, **variables: str) -> dict[str, Any]:
    environment = os.environ | {"TILEWRIGHT_CACHE_DIR": str(folder), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_next_process_computes_the_same_without_triton(tmp_path: Path):
    plain = run(tmp_path, TILEWRIGHT_LOWERED="0")
    assert not (tmp_path / "lowered").exists()
    assert plain["imported"]
    assert plain["in_place"]
    first, second = run(tmp_path), run(tmp_path)
    assert (first["imported"], second["imported"]) == (True, False)
    assert second["in_place"]
    assert plain["sums"] == first["sums"] == second["sums"]
    # A setting that changes the code is heeded: nothing on disk is used, and the results are the same.
    other = run(tmp_path, TRITON_DISABLE_LINE_INFO="1")
    assert other["imported"]
    assert other["sums"] == plain["sums"]


def test_with_jaxs_cache_the_next_process_compiles_nothing(tmp_path: Path):
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = run(tmp_path, **cache), run(tmp_path, **cache)
    assert first["misses"] > 0
    assert (second["misses"], second["imported"]) == (0, False)
    assert second["hits"] >= first["misses"]
    assert first["sums"] == second["sums"]
