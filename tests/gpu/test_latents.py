"""Packed queries over latents on a GPU, and rows of latents in float8, made and read there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.test_serving import LATENTS, check_and_repeat, needs_hopper
from tests.kernels.paged_attention.conformance import check, inputs_of, with_unseen_keys
from tests.kernels.paged_attention.test_latent_rows import check_rows, drawn
from tilewright.kernels.paged_attention.hopper.packed_latent_backend import PallasGpuPackedLatents
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase
from tilewright.modules import mla_ragged_page_attention, quantize_latents, update_pages
from tilewright.ops.utils.device import current_device

CALLS: dict[str, dict[str, Any]] = {
    "mixed": {"q_lengths": (1, 1, 1, 300)},
    "a prompt": {"sequences": 1, "q_lengths": (1500,), "kv_length": 1500},
    "decoding": {"sequences": 40, "q_lengths": (1,), "heads": 64},
    "16 heads": {"q_lengths": (1, 300), "heads": 16, "sinks": 1},
    "20 heads, float16": {"q_lengths": (5, 0, 77), "heads": 20, "dtype": "float16"},
    "not causal": {"q_lengths": (9, 40), "heads": 32, "causal": False},
}


def packed(name: str) -> PagedInputs:
    case = MlaRaggedPageCase("", **LATENTS | CALLS[name])
    return with_unseen_keys(inputs_of("mla_ragged_page_attention", case))


@needs_hopper
@pytest.mark.parametrize("name", CALLS)
def test_packed_latents_on_hopper(name: str) -> None:
    """Every candidate; what nobody may see is NaN."""
    check_and_repeat(PallasGpuPackedLatents(), packed(name), 20)


@pytest.mark.parametrize("name", CALLS)
def test_packed_latents_by_selection(name: str) -> None:
    inputs = packed(name)
    queries = inputs.query[..., :512], inputs.query[..., 512:]
    arrays = inputs.key, inputs.page_table, inputs.kv_lengths, inputs.cum_q_lens
    options = {"softmax_aux": inputs.softmax_aux, "causal": inputs.right == 0, "softmax_scale": inputs.softmax_scale}
    call = jax.jit(lambda *x: mla_ragged_page_attention(*x, return_lse=True, **options))
    check(call(*queries, *arrays), inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_made_as_on_a_cpu(dtype: str) -> None:
    latents = jnp.asarray(drawn(40, 7), dtype)
    rows = jax.jit(quantize_latents)(latents)
    check_rows(rows, np.asarray(latents, np.float32))
    np.testing.assert_array_equal(rows, quantize_latents(latents))


@pytest.mark.skipif((current_device().capability or (0, 0)) < (8, 9), reason="Triton needs float8_e4m3fn")
def test_rows_in_triton_are_those_in_xla() -> None:
    """A step of a layer: rows are written, then attended to, by both backends."""
    draw = np.random.default_rng(0)
    q_nope, q_rope = (jnp.asarray(draw.normal(size=(70, 128, n)) / 24, jnp.bfloat16) for n in (512, 64))
    table = jnp.asarray(draw.permutation(40).reshape(4, 10), jnp.int32)
    lengths, cum = jnp.asarray([600, 65, 64, 300]), jnp.asarray([0, 1, 66, 69, 70])
    pages = quantize_latents(drawn(40, 64, seed=1) / 8)

    @jax.jit
    def written(pages: jax.Array) -> jax.Array:
        return update_pages(pages, None, quantize_latents(drawn(70, seed=2) / 8), None, table, lengths, cum)

    pages = written(pages)
    got, want = (
        jax.jit(lambda *x, p=platform: mla_ragged_page_attention(*x, platform=p, return_lse=True))(
            q_nope, q_rope, pages, table, lengths, cum
        )
        for platform in ("triton", "xla")
    )
    scale = float(jnp.abs(want[0].astype(jnp.float32)).max())
    np.testing.assert_allclose(*(np.asarray(x[0], np.float32) for x in (got, want)), atol=0.02 * scale)
    np.testing.assert_allclose(got[1], want[1], atol=0.02)
