"""Conformance of the Triton backend of attention over a cache, by Triton's interpreter; what selection sees of it."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.paged_attention.conformance import PAGED, PagedConformance, check, inputs_of, structs_of
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.inputs import FAR, PagedInputs
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.page_attention import PageCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.triton import positions
from tilewright.kernels.paged_attention.triton.backend import MAX_SPLITS, TritonPagedAttention
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.utils.datacarrier import FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonPagedAttention()


class TestTriton(PagedConformance):
    backend = BACKEND
    machine = staticmethod(interpret_triton)

    def params(self, inputs: PagedInputs) -> Any:
        several = inputs.longest_q > 1
        # One part, several, and more parts than there are keys take turns.
        splits = (1, 2, 5)[(inputs.head_dim + inputs.capacity + inputs.page_size) % 3]
        return FwdParams(
            q_blocksize=4 if several else 1, kv_blocksize=16, num_key_splits=splits, num_warps=4, num_stages=2
        )


def run(inputs: PagedInputs, **params: int) -> Any:
    given = FwdParams(**{"q_blocksize": 1, "kv_blocksize": 16, "num_key_splits": 2} | params)
    with interpret_triton():
        return jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, given))(inputs))


def test_a_latent_of_512_and_64():
    case = MlaCase("", sequences=2, kv_length=50, heads=70, head_dim=576, value_dim=512, page_size=16, dtype="bfloat16")
    inputs = inputs_of("mla_decode", case)
    check(run(inputs, kv_blocksize=32, num_warps=8, num_stages=2), inputs)


@pytest.mark.parametrize(
    ("kv_dtype", "size"), list(itertools.product(["int8", "float8_e4m3fn", "float8_e5m2"], [2.0**-60, 2.0**20]))
)
def test_one_byte_elements_of_any_scale(kv_dtype: str, size: float):
    """Products in float16 must not show: queries, and scales of keys and of values beyond its exponents."""
    sizes = {"sequences": 3, "kv_length": 50, "heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 8}
    case = PageCase("", **sizes, dtype="bfloat16", kv_dtype=kv_dtype, scale="token", return_lse=True)
    inputs = inputs_of("page_attention", case)
    assert inputs.key_scale is not None
    spread = 2.0 ** np.random.default_rng(0).integers(-12, 13, inputs.value_scale.shape)
    inputs = dataclasses.replace(
        inputs,
        query=inputs.query * size,
        key_scale=inputs.key_scale / size,
        value_scale=inputs.value_scale * size * jnp.asarray(spread, jnp.float32),
    )
    check(run(inputs), inputs)


def test_small_weights_of_many_keys_count():
    """Each is less than float16 can hold beside a weight of 1."""
    keys, bits = 4097, 26
    query = jnp.zeros((1, 1, 32), jnp.bfloat16).at[..., 0].set(1.0)
    key = jnp.zeros((1, keys, 1, 32), jnp.int8).at[0, 0, 0, 0].set(100)
    value = jnp.ones((1, keys, 1, 32), jnp.int8).at[0, 0].set(0)
    op, scales = kernel("decode_attention"), {"key_scale": bits * math.log(2.0) / 100, "value_scale": 1.0}
    inputs = op.prepare(query, key, value, jnp.asarray([keys]), softmax_scale=1.0, **scales)
    out, _ = run(inputs, kv_blocksize=64, num_key_splits=1)
    np.testing.assert_allclose(np.asarray(out, np.float32), 4096 * 2.0**-bits, rtol=2.0**-6)


def test_both_backends_are_cut_to_the_same_lengths():
    assert positions.FAR.value == FAR


def test_vmap_runs_one_after_the_other():
    inputs = inputs_of("decode_attention", DecodeCase("", **PAGED, paged=True))
    params = FwdParams(q_blocksize=1, kv_blocksize=16, num_key_splits=2)
    queries = jnp.stack([inputs.query, 2 * inputs.query])
    with interpret_triton():
        run = lambda query: BACKEND.forward(dataclasses.replace(inputs, query=query), params)
        mapped = jax.block_until_ready(jax.jit(jax.vmap(run))(queries))
        single = jax.block_until_ready(jax.jit(lambda query: run(query))(queries[1]))
    for got, want in zip(mapped, single, strict=True):
        np.testing.assert_array_equal(got[1], want)


SHIPPED = {
    f"{op} {name}": (op, case)
    for op, cases in (
        (op, kernel(op).cases.by_device["gpu"])
        for op in ("page_attention", "mla_decode", "mla_ragged_page_attention", "ragged_page_attention")
    )
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_can_run_and_fills_the_card(name: str):
    op, case = SHIPPED[name]
    inputs = structs_of(op, case)
    assert not BACKEND.not_supported_reasons(inputs, H100, "forward")
    best = BACKEND.heuristic(inputs, H100, "forward")
    assert not BACKEND.config_reasons(inputs, H100, "forward", best)
    assert 1 <= best.num_key_splits <= MAX_SPLITS
    tiles = max(inputs.sequences, inputs.tokens // best.q_blocksize) * best.num_key_splits * inputs.kv_heads
    assert tiles * max(inputs.groups // 64, 1) >= 3 * H100.cores
    candidates = list(BACKEND.candidates(inputs, H100, "forward"))
    assert candidates
    assert best not in candidates
    assert not any(BACKEND.config_reasons(inputs, H100, "forward", each) for each in candidates)


def test_reasons():
    case = RaggedPageCase("", **PAGED)
    sizes = {"head_dim": 600, "value_dim": 600, "dtype": "float16"}
    assert (
        "at most 512"
        in BACKEND.forward_reasons(structs_of("ragged_page_attention", dataclasses.replace(case, **sizes)), H100)[-1]
    )
    fp8 = structs_of("ragged_page_attention", dataclasses.replace(case, dtype="bfloat16", kv_dtype="float8_e4m3fn"))
    assert "8.9" in BACKEND.forward_reasons(fp8, A100)[-1]
    assert not BACKEND.not_supported_reasons(fp8, H100, "forward")
    assert BACKEND.not_supported_reasons(fp8, H100, "backward")
    wrong = FwdParams(q_blocksize=3, kv_blocksize=8, num_warps=4, num_stages=2)
    assert len(BACKEND.config_reasons(fp8, H100, "forward", wrong)) == 2
    large = FwdParams(q_blocksize=1, kv_blocksize=128, num_warps=4, num_stages=4)
    latent = structs_of("mla_decode", kernel("mla_decode").cases.by_device["gpu"]["64x8192"])
    assert len(BACKEND.config_reasons(latent, H100, "forward", large)) == 2
