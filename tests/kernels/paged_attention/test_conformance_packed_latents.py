"""Packed queries over latents on Hopper, interpreted on the CPU, and what selection sees of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.paged_attention.conformance import check, hostile, inputs_of, with_unseen_keys
from tests.kernels.paged_attention.latent_conformance import SIZES
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.paged_attention.hopper.packed_latent_backend import PallasGpuPackedLatents
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase

BACKEND = PallasGpuPackedLatents()

CALLS: dict[str, dict[str, Any]] = {
    "a token a tile": {"heads": 64, "q_lengths": (1, 3)},
    "two tiles a token": {"heads": 128, "q_lengths": (2, 1), "dtype": "float16"},
    "tokens in tiles": {"heads": 16, "q_lengths": (1, 9, 0, 3)},
    "a tile that heads do not fill": {"heads": 20, "q_lengths": (7, 2)},
    "no more tokens in a tile than a sequence has": {"heads": 2, "q_lengths": (2, 1)},
    "not causal": {"heads": 16, "q_lengths": (5, 2), "causal": False},
    "sinks": {"heads": 32, "q_lengths": (3, 1), "sinks": 2},
}


def packed(**fields: Any) -> PagedInputs:
    sizes = SIZES | {"sequences": 4, "kv_length": 192}
    return inputs_of("mla_ragged_page_attention", MlaRaggedPageCase("", **sizes | fields))


def structs(**fields: Any) -> PagedInputs:
    return jax.eval_shape(lambda: packed(**fields))


def run(inputs: PagedInputs) -> Any:
    params = BACKEND.heuristic(inputs.structs, H100, "forward")
    with interpret_mosaic():
        return jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs))


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str):
    """Also where what nobody may see is NaN: a tile must not reach behind the tokens of its sequence."""
    inputs = packed(**CALLS[name])
    check(run(with_unseen_keys(inputs)), inputs)


@pytest.mark.parametrize("heads", [16, 64])
def test_lengths_around_a_page_and_fewer_than_new_tokens(heads: int):
    inputs = packed(heads=heads, q_lengths=(3, 1), sequences=8)
    lengths = jnp.asarray([2, 0, 63, 64, 65, 1, 500, -7], jnp.int32)
    check(run(dataclasses.replace(inputs, kv_lengths=lengths)), dataclasses.replace(inputs, kv_lengths=lengths))


@pytest.mark.parametrize(("seed", "heads"), [(0, 16), (1, 64), (2, 16)])
def test_hostile_tables_and_boundaries(seed: int, heads: int):
    inputs = packed(heads=heads, q_lengths=(3, 1, 4))
    inputs = hostile(inputs, seed, [0, 5, 71, 200, 1000, -3, 2**31 - 1], own=3, first=1)
    cum = [[2, 1, 40, 9, 9], [0, 3, 3, 8, 10], [-7, 2**31 - 1, -(2**31), 5, 8]][seed]
    inputs = dataclasses.replace(inputs, cum_q_lens=jnp.asarray(cum, jnp.int32))
    out, lse = run(inputs)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    check((out, lse), inputs)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": 16}, "multiple of 64"),
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"rows": True}, "row_format"),
        ({"sliding_window": 40}, "left=40"),
        ({"sliding_window": (None, 2), "causal": False}, "right=2"),
        ({"tree": True}, "tree_mask"),
        ({"logits_soft_cap": 20.0}, "logits_soft_cap"),
    ],
)
def test_reasons(fields: dict[str, Any], reason: str):
    assert any(reason in why for why in BACKEND.not_supported_reasons(structs(**fields), H100, "forward"))


def test_reasons_of_devices_and_selection():
    assert not BACKEND.not_supported_reasons(structs(), H100, "forward")
    assert "9.0" in BACKEND.forward_reasons(structs(), A100)[0]
    for heads, q_lengths in ((128, (1, 512)), (16, (2048,)), (5, (1,))):
        inputs = structs(heads=heads, q_lengths=q_lengths, kv_length=4096)
        candidates = BACKEND.candidates(inputs, H100, "forward")
        assert candidates
        for params in candidates:
            assert not BACKEND.config_reasons(inputs, H100, "forward", params)
            assert all(each.blocks > 0 for each in BACKEND.footprints(inputs, H100, "forward", params))
