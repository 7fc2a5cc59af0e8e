"""Attention over a cache on TPUs, interpreted on the CPU: conformance, races; what selection sees."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.kernels.conformance import Poisoned, check_candidates
from tests.kernels.paged_attention.conformance import (
    CacheConformance,
    check,
    check_rows_without_keys,
    hostile,
    inputs_of,
    structs_of,
    with_unseen_keys,
)
from tests.support.tpu_interpret import interpret_tpu
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.page_attention import PageCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.tpu.backend import TpuPagedAttention, TpuPagedParams
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.serialize import from_json, to_json

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TpuPagedAttention()
V6E = find_device("TPU v6e").device

SIZES: dict[str, Any] = {
    "sequences": 3, "kv_length": 150, "heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16,
}  # fmt: skip

DECODING: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, pages of 32": {"dtype": "bfloat16", "page_size": 32},
    "a key head": {"kv_heads": 1, "heads": 6},
    "eight key heads": {"kv_heads": 8, "heads": 8, "page_size": 2},
    "values of another dim": {"value_dim": 128, "head_dim": 64},
    "large pages": {"page_size": 75, "kv_heads": 8, "heads": 8},
    "a dense cache": {"paged": False, "kv_length": 144},
    "sinks and a cap": {"sinks": 2, "logits_soft_cap": 4.0},
    "slopes and a window": {"alibi": True, "sliding_window": 40, "dtype": "bfloat16"},
    "int8, a scale for all": {"dtype": "bfloat16", "kv_dtype": "int8", "scale": "tensor", "page_size": 16},
    "float8_e4m3fn, scales of heads": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "scale": "head"},
    "float8_e5m2": {"dtype": "bfloat16", "kv_dtype": "float8_e5m2", "scale": "head"},
}

LATENTS: dict[str, dict[str, Any]] = {
    "latents": {"dtype": "bfloat16"},
    "latents of several tokens": {"q_lengths": (3,), "sliding_window": 50, "heads": 5},
    "latents of several tokens, not causal": {"q_lengths": (2,), "causal": False, "sliding_window": (70, 1)},
    "int8 latents": {"dtype": "bfloat16", "kv_dtype": "int8", "scale": "tensor", "page_size": 32},
}

CHUNKS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, bfloat16, sinks and a cap": {
        "dtype": "bfloat16", "sinks": 2, "logits_soft_cap": 4.0, "kv_heads": 1, "heads": 6, "q_lengths": (1, 70, 0),
    },
    "packed, slopes and a window": {"alibi": True, "sliding_window": 40, "q_lengths": (90, 1)},
    "packed, fewer keys than lanes": {"kv_length": 48, "q_lengths": (1, 9)},
    "packed, not causal": {"causal": False, "sliding_window": (100, 3), "q_lengths": (5, 40)},
    "packed, float8_e4m3fn": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "scale": "head", "kv_heads": 4},
}  # fmt: skip


def case_of(name: str, **fields: Any) -> tuple[str, Any]:
    if name in LATENTS:
        latent = {"kv_heads": 1, "head_dim": 48, "value_dim": 32}
        return "mla_decode", MlaCase("", **SIZES | latent | LATENTS[name] | fields)
    if name in CHUNKS:
        return "ragged_page_attention", RaggedPageCase("", **SIZES | {"q_lengths": (1, 40, 7)} | CHUNKS[name] | fields)
    return "decode_attention", DecodeCase("", **SIZES | {"paged": True} | DECODING[name] | fields)


def params_of(inputs: PagedInputs) -> TpuPagedParams:
    """Several blocks of a sequence, and several tiles of the longest chunks."""
    return TpuPagedParams(128 * (1 + inputs.kv_heads // 8), tile_rows=128, block_k=128)


class TestTpu(CacheConformance):
    backend = BACKEND
    machine = staticmethod(interpret_tpu)
    cases = (*DECODING, *LATENTS, *CHUNKS)
    repeated = "float32"
    poisons = ("float32", "a dense cache", "packed")

    @staticmethod
    def describe(case: Any) -> str:
        return str(case)

    def inputs(self, case: str) -> PagedInputs:
        return inputs_of(*case_of(case))

    def factor(self, case: str) -> float:
        return float(case_of(case)[1].tolerance_factor)

    def params_of(self, inputs: PagedInputs) -> tuple[Any, Any]:
        assert not self.reasons(inputs, "forward")
        return params_of(inputs), None

    def poisoned(self, poison: str) -> Poisoned:
        """What no query sees is not looked at: neither beyond the lengths nor before the window."""
        inputs = inputs_of(*case_of(poison, sliding_window=60))
        inputs = inputs.replace(kv_lengths=jnp.asarray([143, 90, 17], jnp.int32))
        return Poisoned((inputs, None), (with_unseen_keys(inputs, 100 if poison == "packed" else 61), None))

    def test_lengths(self):
        """Around a page's and a block's end, beyond the table, and none at all."""
        lengths = [0, 1, 15, 16, 17, 63, 64, 65, 150, 1 << 30, 2**31 - 1, -5, -(2**31), 2]
        inputs = inputs_of(*case_of("float32", sequences=len(lengths)))
        found = self.run_and_check(inputs.replace(kv_lengths=jnp.asarray(lengths, jnp.int32)))
        check_rows_without_keys(found, lengths)

    def test_starts(self):
        """A start below 0 is 0, one beyond the length leaves no key."""
        (query, key, value, _), given = case_of("float32")[1].arguments()
        inputs = kernel("page_attention").prepare(
            query, key, value, given["page_table"], jnp.asarray([130, 33, 9]), jnp.asarray([77, -5, 11])
        )
        out = self.run_and_check(inputs)["out"]
        assert not out[2].any()

    @pytest.mark.parametrize("name", ["float32", "packed"])
    @pytest.mark.parametrize("seed", range(2))
    def test_hostile_tables(self, name: str, seed: int):
        inputs = inputs_of(*case_of(name))
        inputs = hostile(inputs, seed, [0, 5, 71, 150, 1000, -3, 2**31 - 1], own=3, first=1)
        if name == "packed":
            cum = [[2, 1, 60, 9], [-7, 2**31 - 1, -(2**31), 5]][seed]
            inputs = inputs.replace(cum_q_lens=jnp.asarray(cum, jnp.int32))
        self.run_on_hostile(inputs)

    def test_tokens_of_a_sequence_that_are_more_than_rows_of_a_matmul(self):
        """All sequences have 40: tiles begin within them."""
        inputs = inputs_of("mla_decode", MlaCase("", **SIZES | {"kv_heads": 1, "value_dim": 16, "q_lengths": (40,)}))
        self.run_and_check(inputs)

    def test_nothing_at_all(self):
        inputs = inputs_of(*case_of("sinks and a cap", sequences=0))
        assert self.run_and_check(inputs)["out"].shape == (0, 4, 32)


def run(inputs: PagedInputs, name: str, **options: Any) -> Any:
    with interpret_tpu(name, **options):
        return jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params_of(inputs)))(inputs))


@pytest.mark.parametrize(
    ("case", "name", "dma"),
    [("float32", "TPU v5p", "eager"), ("float32", "TPU7x", "on_wait"), ("packed", "TPU v5p", "eager")],
)
def test_races(case: str, name: str, dma: Any):
    """Also on the two cores of a v5p, of which each has its own sequences."""
    inputs = inputs_of(*case_of(case, sequences=5 if case == "float32" else 3))
    inputs = hostile(inputs, 1, [0, 5, 101, 150], own=3)
    check(run(inputs, name, detect_races=True, dma=dma, seed=3), inputs)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float16"}, "queries must be bfloat16 or float32"),
        ({"page_size": 3}, "a page, or a part of it, needs 8 tokens × key heads"),
        ({"kv_dtype": "int8", "scale": "token"}, "takes scales of whole arrays or of heads"),
        ({"kv_length": 1 << 22}, "bytes of SMEM"),
        ({"head_dim": 768}, "takes head dims up to 640, got head_dim=768"),
    ],
)
def test_what_is_declined(fields: dict[str, Any], reason: str):
    inputs = structs_of("page_attention", PageCase("", **SIZES | fields))
    assert reason in "; ".join(BACKEND.not_supported_reasons(inputs, V6E, "forward"))


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, "tpu"),
        ({"kv_heads": 1}, "tpu"),
        ({"kv_heads": 2}, "tpu"),
        ({"head_dim": 64}, "xla"),
        ({"kv_heads": 5, "heads": 10}, "xla"),
        ({"kv_heads": 2, "head_dim": 256}, "xla"),
        ({"head_dim": 256}, "tpu"),
    ],
)
def test_caches_that_xla_would_copy_are_its_own(fields: dict[str, Any], chosen: str):
    """As compiled for the four chips, see ``tests/aot_tpu/test_serving.py``."""
    sizes = {"kv_heads": 8, "heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    positional, keywords = PageCase("", **SIZES | sizes | fields).arguments()
    with tilewright.target_device("TPU v6e"):
        (call,) = tilewright.explain(functools.partial(kernel("page_attention"), **keywords), *positional)
    assert call.config.backend == chosen


def test_candidates():
    inputs = structs_of("page_attention", PageCase("", **SIZES))
    assert check_candidates(BACKEND, inputs, V6E, 3)["forward"]
    assert from_json(to_json(TpuPagedParams(256)), TpuPagedParams) == TpuPagedParams(256)
    for wrong in (0, 100, True, 128.0):
        for name in ("block_rows", "tile_rows", "block_k"):
            with pytest.raises(ValueError, match=name):
                TpuPagedParams(**{name: wrong})  # type: ignore[arg-type]
