"""The kernels that XLA keeps of linear attention over two H100: no pass for states computes what only results need."""

import collections
import re
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.aot.compiler import H100, missing_packages
from tilewright.modules import context_parallel_linear_attention

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())


def kernels(update: str) -> dict[str, int]:
    """The launches of both passes, by kernel."""
    tokens = P(None, "s")

    def on_device(query, key, value, gate, beta, cotangent):
        def attend(query, key, value, gate, beta):
            return context_parallel_linear_attention(
                query, key, value, axis_name="s", log_decay=gate, beta=beta if update == "beta" else None,
                platform="triton",
            )  # fmt: skip

        out, pull = jax.vjp(attend, query, key, value, gate, beta)
        return out, *pull(cotangent)

    with tilewright.target_device(H100, count=2) as target:
        mesh = Mesh(target.devices, ("s",))
        kinds = [*((shape, jnp.bfloat16) for shape in ((4, 128), (4, 128), (8, 128))), *[((8,), jnp.float32)] * 2]
        structs = [
            jax.ShapeDtypeStruct((1, 2048, *shape), dtype, sharding=NamedSharding(mesh, tokens))
            for shape, dtype in (*kinds, kinds[2])
        ]
        with jax.set_mesh(mesh):
            run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(tokens,) * 6, out_specs=(tokens,) * 6))
            text = run.lower(*structs).compile().as_text()
    names = []
    for opaque in re.findall(r'backend_config=\{opaque = "(.*?)"[,}]', text):
        escaped = re.sub(r"\\([0-9A-F]{2})|\\(.)", lambda found: found[2] or chr(int(found[1], 16)), opaque)
        names += re.findall(rb"\.entry (\w+)\(", zlib.decompress(escaped.encode("latin-1")))
    prefix = "tilewright_linear_attention_"
    return dict(collections.Counter(name.decode().removeprefix(prefix) for name in names))


@pytest.mark.parametrize("update", ["beta", "none"])
def test_passes_for_states_have_no_results(update: str):
    """One pass of states more in either direction."""
    found = kernels(update)
    repeated = {name: count for name, count in found.items() if count > 1}
    assert repeated == {"forward_chunk_states": 2, "backward_state_gradients": 2}
    assert {"forward_chunk_outputs", "backward_chunk_states"} <= found.keys()
