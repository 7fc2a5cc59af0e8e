"""Packed queries over pages on Hopper, interpreted on the CPU: conformance, races, barriers; what selection sees."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.conftest import H100
from tests.kernels.hopper.schedule import check_schedules
from tests.kernels.paged_attention.conformance import check, inputs_of, structs_of
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels import kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.paged_attention.hopper.packed_backend import HopperChunkParams, PallasGpuPackedAttention
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageAttention, RaggedPageCase
from tilewright.ops import ConfigSelectorChain, Executor
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.serialize import from_json, to_json

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = PallasGpuPackedAttention()

SIZES: dict[str, Any] = {
    "sequences": 3, "kv_length": 300, "heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 64, "dtype": "bfloat16",
    "q_lengths": (1, 0, 9),
}  # fmt: skip

CALLS: dict[str, dict[str, Any]] = {
    "wide": {"head_dim": 128},
    "pages of 16": {"page_size": 16},
    "pages of 16, wide": {"page_size": 16, "head_dim": 128},
    "pages of a tile": {"page_size": 128, "dtype": "float16"},
    "pages of two tiles": {"page_size": 256},
    "a head per key head": {"kv_heads": 4},
    "groups of six": {"heads": 6, "kv_heads": 1},
    "several tiles of queries": {"q_lengths": (150, 1, 70)},
    "not causal": {"causal": False, "q_lengths": (5, 40)},
    "not causal, pages of 16": {"causal": False, "page_size": 16},
    "some keys ahead": {"causal": False, "sliding_window": (None, 2)},
    "a window": {"sliding_window": 40, "q_lengths": (1, 30)},
    "a window on both sides": {"causal": False, "sliding_window": (150, 3), "page_size": 32},
    "large logits": {"softmax_scale": 10.0},
    "negative scale": {"softmax_scale": -0.5},
    "no scale": {"softmax_scale": 0.0},
}


def ragged_inputs(**fields: Any) -> PagedInputs:
    return inputs_of("ragged_page_attention", RaggedPageCase("", **SIZES | fields))


def forward(inputs: PagedInputs, stages: int = 2) -> Any:
    return BACKEND.forward(inputs, HopperChunkParams(stages))


def run(inputs: PagedInputs, stages: int = 2, detect_races: bool = False) -> Any:
    assert not BACKEND.not_supported_reasons(inputs, H100, "forward")
    with interpret_mosaic(detect_races=detect_races):
        return jax.block_until_ready(jax.jit(lambda inputs: forward(inputs, stages))(inputs))


# Numbers of stages take turns.
@pytest.mark.parametrize(
    ("name", "stages"),
    [(name, 2 + index % 3) for index, name in enumerate(CALLS)],
)
def test_calls(name: str, stages: int):
    inputs = ragged_inputs(**CALLS[name])
    check(run(inputs, stages), inputs)


@pytest.mark.parametrize("page_size", [16, 256])
def test_lengths(page_size: int):
    """Around a tile's end, beyond the table, fewer than the new tokens, and none at all."""
    lengths = [0, 1, 127, 128, 129, 300, 1 << 30, 2**31 - 1, -5, -(2**31), 2]
    inputs = ragged_inputs(sequences=len(lengths), q_lengths=(3,), page_size=page_size)
    inputs = dataclasses.replace(inputs, kv_lengths=jnp.asarray(lengths, jnp.int32))
    out, lse = got = run(inputs)
    check(got, inputs)
    for row, length in enumerate(lengths):
        if length <= 0:
            assert not np.any(np.asarray(out[3 * row : 3 * row + 3]))
            assert np.all(np.isneginf(np.asarray(lse[3 * row : 3 * row + 3])))


def hostile_inputs(seed: int, page_size: int, window: Any = None) -> PagedInputs:
    """Any page numbers, lengths and boundaries; what is in no page that a table names, page 0 among it, is NaN."""
    draw = np.random.default_rng(seed)
    inputs = ragged_inputs(page_size=page_size, q_lengths=(3, 1, 40), sliding_window=window)
    pages = inputs.key.shape[0]
    wild = [-1, -(2**31), pages, 2**31 - 1, 3, 3]
    table = np.maximum(np.asarray(inputs.page_table), 1)
    table = np.where(draw.random(table.shape) < 0.4, draw.choice(wild, table.shape), table)
    unused = sorted(set(range(pages)) - set(table[(table >= 0) & (table < pages)].tolist()))
    assert 0 in unused
    key, value = (a.at[jnp.asarray(unused, jnp.int32)].set(jnp.nan) for a in (inputs.key, inputs.value))
    cum = [[2, 1, 60, 9], [0, 3, 3, 44], [-7, 2**31 - 1, -(2**31), 5]][seed]
    return dataclasses.replace(
        inputs,
        key=key,
        value=value,
        page_table=jnp.asarray(table, jnp.int32),
        kv_lengths=jnp.asarray(draw.choice([0, 5, 171, 1000, -3, 2**31 - 1], 3), jnp.int32),
        cum_q_lens=jnp.asarray(cum, jnp.int32),
    )


@pytest.mark.parametrize(("seed", "page_size"), [(0, 16), (1, 64), (2, 128), (1, 256)])
def test_hostile_tables(seed: int, page_size: int):
    inputs = hostile_inputs(seed, page_size, (None, 130)[seed % 2])
    out, _ = got = run(inputs)
    check(got, inputs)
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("page_size", [16, 128])
def test_what_no_query_sees_is_not_looked_at(page_size: int):
    """Neither beyond the lengths nor before the window of the first query."""
    inputs = ragged_inputs(page_size=page_size, q_lengths=(2,), sliding_window=100)
    inputs = dataclasses.replace(inputs, kv_lengths=jnp.asarray([290, 130, 300], jnp.int32))
    position = np.arange(inputs.capacity).reshape(-1, page_size)
    dirty = np.zeros(inputs.key.shape[:2], bool)
    for row, length in enumerate((290, 130, 300)):
        dirty[np.asarray(inputs.page_table)[row]] = (position >= length) | (position < length - 102)
    key, value = (jnp.where(jnp.asarray(dirty)[..., None, None], jnp.nan, a) for a in (inputs.key, inputs.value))
    clean = run(inputs)
    check(clean, inputs)
    for got, want in zip(run(dataclasses.replace(inputs, key=key, value=value)), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("page_size", "stages"), [(16, 2), (128, 3)])
def test_races(page_size: int, stages: int):
    inputs = hostile_inputs(1, page_size, 130)
    check(run(inputs, stages, detect_races=True), inputs)


@pytest.mark.parametrize(("page_size", "stages"), list(itertools.product([32, 128], [2, 3])))
def test_barriers(page_size: int, stages: int):
    """More tiles than stages, tiles of one row and of many; the checker follows known lengths and tables."""
    inputs = ragged_inputs(page_size=page_size, kv_length=900, q_lengths=(1, 70), sequences=2)
    assert check_schedules(lambda inputs: forward(inputs, stages), inputs) > 100


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"sequences": 32, "q_lengths": (1, 1, 1, 300)}, True),
        ({"sequences": 2, "q_lengths": (1, 20)}, False),
        ({"sequences": 80, "q_lengths": (1,)}, False),
    ],
)
@pytest.mark.parametrize("compiler", [True, False])
def test_the_op_takes_chunks_that_fill_the_device_there(
    fields: dict[str, Any], first: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(toolchain, "missing", lambda *_: [] if compiler else ["there is no nvcc"])
    sizes = {"kv_heads": 4, "kv_length": 128} | fields
    positional, keywords = RaggedPageCase("", **SIZES | sizes).arguments()
    with tilewright.target_device(H100.name):
        choose = functools.partial(
            Executor(ConfigSelectorChain()).choose_config, kernel("ragged_page_attention"), *positional, **keywords
        )
        assert choose(platform="pallas").params == HopperChunkParams(2)
        assert choose(platform=("triton", "pallas")).backend == "triton"
        by_chunks = "cuda" if compiler else "hopper"
        inv, _ = prepared(kernel("ragged_page_attention"), positional, keywords, concrete=False)
        assert kernel("ragged_page_attention").preferred_cfg(inv).backend == (by_chunks if first else "triton")
        assert choose().backend == ("hopper" if first else "triton")  # what nvcc has compiled comes before it


def test_what_ships_can_run():
    served = 0
    for case in RaggedPageAttention.cases.by_device["gpu"].values():
        inputs = structs_of("ragged_page_attention", case)
        if BACKEND.not_supported_reasons(inputs, H100, "forward"):
            continue
        served += 1
        candidates = BACKEND.candidates(inputs, H100, "forward")
        assert BACKEND.heuristic(inputs, H100, "forward") == candidates[0]
        assert not any(BACKEND.config_reasons(inputs, H100, "forward", each) for each in candidates)
        (footprint,) = BACKEND.footprints(inputs, H100, "forward", candidates[0])
        assert (footprint.threads, footprint.shared_bytes) < (512, 227 << 10)
    assert served >= 2
    wide = structs_of("ragged_page_attention", RaggedPageCase("", **SIZES | {"head_dim": 128}))
    assert BACKEND.config_reasons(wide, H100, "forward", HopperChunkParams(4))


def test_params():
    assert from_json(to_json(HopperChunkParams(3)), HopperChunkParams) == HopperChunkParams(3)
    for wrong in (1, 9, True, 2.0):
        with pytest.raises(ValueError, match="num_stages"):
            HopperChunkParams(wrong)  # type: ignore[arg-type]
