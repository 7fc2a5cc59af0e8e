"""Attention over a cache compiles for every TPU, reads pages where they lie, and computes faster than they are read."""

from typing import Any

import pytest

from tests.aot_tpu.compiler import TPUS, report
from tests.aot_tpu.cycles import recorded
from tilewright.ops.tuning.libtpu import cycle_seconds
from tilewright.ops.utils.known_devices import find_device

PROGRAMS = "tests.aot_tpu.serving"

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("decode_attention", {}),
    "decode, float32": ("decode_attention", {"dtype": "float32", "kv_heads": 2, "heads": 8}),
    "decode, 256": ("decode_attention", {"head_dim": 256}),
    "decode, a key head": ("decode_attention", {"kv_heads": 1, "heads": 8, "kv_length": 16384}),
    "decode, int8": ("decode_attention", {"kv_dtype": "int8", "scale": "head"}),
    "decode, float8_e4m3fn": ("decode_attention", {"kv_dtype": "float8_e4m3fn", "scale": "head"}),
    "latents": ("mla_decode", {"heads": 128, "head_dim": 640, "value_dim": 512, "kv_heads": 1}),
    "mixed": ("ragged_page_attention", {}),
    "mixed, float32, 32 key heads of 256": (
        "ragged_page_attention",
        {"dtype": "float32", "head_dim": 256, "kv_heads": 32},
    ),
    "mixed, a key head": ("ragged_page_attention", {"kv_heads": 1, "heads": 8, "kv_length": 16384}),
}
"""Of which XLA copies no cache."""

DECODE_SHARE = {"TPU v5e": 0.45, "TPU v5p": 0.65, "TPU v6e": 0.8, "TPU7x": 1.4}
"""Of the time in which pages are read, at most, that computing on them takes. On a v7x the simulator gives transposed
pushes of K into the MXU alone 0.67 of it."""

PREFILL_SHARE = {"TPU v5e": 0.4, "TPU v5p": 0.2, "TPU v6e": 0.09, "TPU7x": 0.09}
"""Of the MXU's peak, at least, for a tile of chunks with 128 elements a head; on v5p that is of one of two cores."""


def cache_bytes(op: str, fields: dict[str, Any]) -> int:
    """Bytes of the cache of 32 sequences, of 2048 tokens by default."""
    itemsize = {"int8": 1, "float8_e4m3fn": 1, "float32": 4}.get(fields.get("kv_dtype") or fields.get("dtype", ""), 2)
    arrays = 1 if op == "mla_decode" else 2
    return (
        32 * fields.get("kv_length", 2048) * fields.get("kv_heads", 8) * fields.get("head_dim", 128) * itemsize * arrays
    )


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_compile_and_copy_no_cache(tpu: str, name: str) -> None:
    op, fields = CALLS[name]
    found = report(tpu, f"{PROGRAMS}:call", op, **fields)
    assert not found.error
    # Beside the cache there are queries and results, of chunks several times.
    assert found.peak_bytes < 1.5 * cache_bytes(op, fields) + (64 << 20 if op == "ragged_page_attention" else 4 << 20)
    assert found.spills < 0.35 * found.bundles


@pytest.mark.parametrize("tpu", TPUS)
def test_decoding_computes_faster_than_pages_are_read(tpu: str) -> None:
    chip = find_device(tpu).chip
    reading = 4 * 2048 * 8 * 128 * 2 * 2 / (chip.peak_gbs * 1e9) / cycle_seconds(tpu)
    # A v5p has two cores, which the simulator does not know, and which share the sequences.
    cycles = recorded()[tpu]["decoding, 4 sequences of 2k, without copies"]["cycles"] / find_device(tpu).device.cores
    assert 0.1 < cycles / reading < DECODE_SHARE[tpu]


@pytest.mark.parametrize("tpu", TPUS)
def test_tiles_of_chunks_keep_the_mxu_busy(tpu: str) -> None:
    assert PREFILL_SHARE[tpu] < recorded()[tpu]["prefilling, 128 tokens of 2k"]["share"]
