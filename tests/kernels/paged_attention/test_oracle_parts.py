"""The oracle of some heads of a call: what the whole one says of them, and that errors in them are found."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels import kernel
from tilewright.kernels.paged_attention import reference
from tilewright.ops import ConfigSelectorChain, Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.tuning.workload import Workload

pytestmark = pytest.mark.usefixtures("unoptimised", "small")

SIZES: dict[str, Any] = {"sequences": 3, "kv_length": 48, "heads": 12, "kv_heads": 3, "head_dim": 16}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("decode_attention", {"return_lse": True}),
    "scales of every token": ("page_attention", {"kv_dtype": "int8", "scale": "token"}),
    "one scale for all heads": ("ragged_decode_attention", {"scale": "tensor", "alibi": True}),
    "writing": ("ragged_page_attention", {"write": True, "q_lengths": (1, 9), "scale": "head", "return_lse": True}),
    "sinks": ("ragged_page_attention", {"sinks": 2, "q_lengths": (5,), "sliding_window": 7}),
    "blocks": ("unified_attention", {"q_lengths": (1, 3), "logits_soft_cap": 5.0}),
    "latents": ("mla_decode", {"kv_heads": 1, "heads": 24, "head_dim": 24, "value_dim": 16, "q_lengths": (2,)}),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_DENSE_BYTES", 0)


def call_of(name: str) -> tuple[Invocation[Any, Any], Any]:
    """A call, and its inputs with arrays."""
    op, options = CALLS[name]
    positional, keywords = type(kernel(op).cases.small)("", **SIZES | options).arguments()
    inv, ((inputs,), _) = prepared(kernel(op), positional, keywords)
    return inv, inputs


@pytest.mark.parametrize("name", CALLS)
def test_the_oracle_of_a_part_is_that_of_the_whole(name: str) -> None:
    inv, inputs = call_of(name)
    whole = inv.kernel.reference(inputs)
    parts = inv.kernel.oracle_parts(inv.abstract())
    assert len(parts) == 2
    for part in parts:
        (own,), _ = part.arguments((inputs,), {})
        assert jax.tree.structure(own) == jax.tree.structure(inputs)
        assert (own.heads, own.kv_heads) == (8 if name == "latents" else 4, 1)
        said, wanted = jax.tree.leaves(inv.kernel.reference(own)), jax.tree.leaves(part.results(whole))
        for mine, theirs in zip(said, wanted, strict=True):
            np.testing.assert_allclose(np.float32(mine), np.float32(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_errors_in_the_first_and_the_last_heads_are_found(name: str) -> None:
    inv, _ = call_of(name)
    work = Workload(inv.abstract(), ConfigSelectorChain())
    results = work.compile(inv.kernel.heuristic_cfg(inv))(*work.operands)
    assert work.check(results) == []
    for head in (0, -1):
        assert work.check([results[0].at[..., 0, head, 1].add(0.5), *results[1:]])
    assert work.check([results[0].at[..., 5, 0].set(jnp.nan), *results[1:]])


def test_the_whole_is_checked_where_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    inv, _ = call_of("decode")
    assert inv.kernel.oracle_parts(inv.abstract()) == []
