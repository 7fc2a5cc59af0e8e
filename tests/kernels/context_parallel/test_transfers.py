"""Transfers of a ring: issued before the kernels that they run beside, and never more memory for more devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.context_parallel.calls import mesh_of
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention

ROWS = P(None, "s")


def both_passes(shards: int, length: int, **options: Any) -> Any:
    """A jitted forward and backward pass over some devices, and its operands."""

    options = {"layout": "zigzag", "causal": True} | options

    def on_device(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(
            lambda *qkv: tilewright.context_parallel_attention(*qkv, axis_name="s", **options),
            query, key, value,
        )  # fmt: skip
        return out, *pull(cotangent)

    x = jax.ShapeDtypeStruct((1, shards * length, 8, 16), jnp.float32)
    run = jax.shard_map(on_device, mesh=mesh_of(shards), in_specs=(ROWS,) * 4, out_specs=(ROWS,) * 4)
    return jax.jit(run), (x,) * 4


def events(jaxpr: Any) -> list[str]:
    """Transfers, calls of kernels and barriers, in order; a choice of a plan counts as a call."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        known = {"ppermute": "hop", "tilewright_call": "kernels", "cond": "kernels", "optimization_barrier": "barrier"}
        if name in known:
            found.append(known[name])
        else:
            for part in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(part, "jaxpr", part)
                found += events(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("shards", [2, 4])
def test_a_hop_is_issued_before_the_kernels_of_its_step(shards: int) -> None:
    run, operands = both_passes(shards, 16, strategy="ring")
    forward = ["hop", "kernels", "barrier"] * (shards - 1) + ["kernels"]
    # The last hop before the end takes dK and dV alone, the one behind it takes them home.
    backward = ["barrier", *["hop", "kernels", "barrier"] * (shards - 1), "hop", "kernels", "hop"]
    assert events(run.trace(*operands).jaxpr.jaxpr) == forward + backward


@pytest.mark.parametrize(
    ("flags", "told"), [("", [True, False]), ("--a=1 --xla_gpu_collective_permute_mode=peer", [False])]
)
def test_forward_kernels_beside_a_hop_are_told_of_it(
    flags: str, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's, and not the last one's; none if copies need no SMs."""
    seen, bind = [], FlashAttention.bind

    def recorded(self: FlashAttention, args: Any, kwargs: Any) -> Any:
        seen.extend(each.beside_transfer for each in args if isinstance(each, AttentionInputs))
        return bind(self, args, kwargs)

    run = jax.shard_map(
        lambda x: tilewright.context_parallel_attention(
            x, x, x, axis_name="s", causal=True, strategy="ring", layout="zigzag"
        ),
        mesh=mesh_of(2), in_specs=ROWS, out_specs=ROWS,
    )  # fmt: skip
    monkeypatch.setattr(FlashAttention, "bind", recorded)
    monkeypatch.setenv("XLA_FLAGS", flags)
    # A length for each case, since a program that was traced before is not traced again.
    jax.jit(run).lower(jax.ShapeDtypeStruct((1, 24 + 4 * len(told), 8, 16), jnp.float32))
    assert list(dict.fromkeys(seen)) == told


def hops(bounds: Any, **options: Any) -> int:
    """Transfers of both passes over four devices with 16 rows each."""
    run, operands = both_passes(4, 16, layout="contiguous", cum_seqlens_q=bounds, cum_seqlens_k=bounds, **options)
    return events(run.trace(*operands).jaxpr.jaxpr).count("hop")


def test_a_ring_ends_early_if_it_is_known_how_short_documents_are() -> None:
    """Forward one hop of three, backward that and two of gradients."""
    documents = np.array([0, 13, 29, 45, 61, 64])
    assert hops(documents, strategy="ring") == hops(documents.tolist(), strategy="ring") == 1 + 3
    assert hops(jnp.asarray(documents), strategy="ring") == 3 + 5
    assert hops(jnp.asarray(documents), strategy="ring", sliding_window=15) == 1 + 3
    assert hops(np.array([0, 64]), strategy="ring") == 3 + 5


def test_documents_that_the_host_knows_on_explicit_axes() -> None:
    mesh = mesh_of(4, AxisType.Explicit)
    query, keys = (
        jax.ShapeDtypeStruct((1, 4 * 8192, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))
        for heads in (32, 2)
    )

    def forward_hops(bounds: Any) -> int:
        attend = lambda *qkv: tilewright.modules.flash_attention(
            *qkv, cum_seqlens_q=bounds, cum_seqlens_k=bounds, causal=True
        )
        with jax.set_mesh(mesh):
            return jax.jit(attend).lower(query, keys, keys).as_text().count("stablehlo.collective_permute")

    documents = np.arange(0, 4 * 8192 + 1, 4096)
    assert (forward_hops(documents), forward_hops(jnp.asarray(documents))) == (1, 3)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_ring_takes_no_more_memory_for_more_devices(layout: str) -> None:
    """Length and devices double together: what a device allocates beside operands and results stays as it is."""
    sizes = []
    for shards in (2, 4, 8):
        run, operands = both_passes(shards, 64, strategy="ring", layout=layout)
        sizes.append(run.lower(*operands).compile().memory_analysis().temp_size_in_bytes)
    assert max(sizes) <= 1.25 * min(sizes), sizes
