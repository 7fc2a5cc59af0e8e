"""The schedule that XLA makes of a ring for two H100: every hop but the last runs beside kernels."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.aot.compiler import H100, missing_packages

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())


def scheduled() -> list[str]:
    """The instructions of both passes in their order."""
    rows = P(None, "s")

    def on_device(query, key, value, cotangent):
        out, pull = jax.vjp(
            lambda *qkv: tilewright.context_parallel_attention(
                *qkv, axis_name="s", strategy="ring", layout="zigzag", causal=True
            ),
            query, key, value,
        )  # fmt: skip
        return out, *pull(cotangent)

    with tilewright.target_device(H100, count=2) as target:
        mesh = Mesh(target.devices, ("s",))
        structs = [
            jax.ShapeDtypeStruct((1, 4096, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
            for heads in (8, 2, 2, 8)
        ]
        with jax.set_mesh(mesh):
            run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(rows,) * 4, out_specs=(rows,) * 4))
            text = run.lower(*structs).compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY ") :]
    kinds = {
        "collective-permute-start": "start", "collective-permute-done": "done", "collective-permute": "hop",
        "conditional": "kernels",
    }  # fmt: skip
    found = []
    for line in entry.splitlines():
        name = re.search(r" = .*? ([a-z-]+)\(", line)
        if "mosaic_gpu" in line:
            found.append("kernels")
        elif name is not None and name[1] in kinds:
            found.append(kinds[name[1]])
    return found


def test_every_hop_but_the_last_runs_beside_kernels():
    events = "".join({"start": "<", "done": ">", "kernels": "k", "hop": "h"}[each] for each in scheduled())
    # Forward: K and V behind the diagonal. Backward: K and V behind the diagonal, dK and dV behind the second step.
    assert re.fullmatch(r"<k+>k+<k+><k+>(h|<>)", events), events
