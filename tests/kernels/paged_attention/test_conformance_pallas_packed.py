"""Packed queries over pages on Hopper, interpreted on the CPU: conformance, races, barriers; what selection sees."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.kernels.conformance import Poisoned
from tests.kernels.conftest import H100
from tests.kernels.hopper.schedule import check_schedules
from tests.kernels.paged_attention.conformance import (
    CacheConformance,
    check,
    check_rows_without_keys,
    hostile,
    inputs_of,
    structs_of,
    with_unseen_keys,
)
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels import kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.paged_attention.hopper import packed_backend
from tilewright.kernels.paged_attention.hopper.packed_backend import HopperChunkParams, PallasGpuPackedAttention
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageAttention, RaggedPageCase
from tilewright.ops import ConfigSelectorChain, Executor
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.serialize import from_json, to_json

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = PallasGpuPackedAttention()


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that each has several items."""
    monkeypatch.setattr(packed_backend, "num_sms", lambda _: 3)


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
    "trees": {"tree": True, "q_lengths": (37, 0, 5), "kv_length": 200},
    "trees, pages of 16, wide": {"tree": True, "q_lengths": (9, 70, 1), "page_size": 16, "head_dim": 128},
    "trees and a window": {"tree": True, "q_lengths": (30, 2), "sliding_window": 40, "heads": 6, "kv_heads": 1},
    "large logits": {"softmax_scale": 10.0},
    "negative scale": {"softmax_scale": -0.5},
    "no scale": {"softmax_scale": 0.0},
}


def ragged_inputs(**fields: Any) -> PagedInputs:
    return inputs_of("ragged_page_attention", RaggedPageCase("", **SIZES | fields))


def forward(inputs: PagedInputs, stages: int = 2) -> Any:
    return BACKEND.forward(inputs, HopperChunkParams(stages, ping_pong=stages != 3, items=2 * stages))


class TestPacked(CacheConformance):
    """Numbers of stages take turns, with and without turns of the consumers, and with one item of a CTA or several."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_mosaic)
    cases = tuple((name, 2 + index % 3) for index, name in enumerate(CALLS))
    repeated = ("pages of two tiles", 2)
    poisons = ("16", "128")
    stages = 2

    @staticmethod
    def describe(case: Any) -> str:
        return f"{case[0]}-{case[1]}"

    def inputs(self, case: tuple[str, int]) -> PagedInputs:
        return ragged_inputs(**CALLS[case[0]])

    def params_of(self, inputs: PagedInputs) -> tuple[Any, Any]:
        assert not self.reasons(inputs, "forward")
        return HopperChunkParams(self.stages, self.stages != 3, (4, 1, 16)[self.stages - 2]), None

    def poisoned(self, poison: str) -> Poisoned:
        """What no query sees is not looked at: neither beyond the lengths nor before the window of the first query."""
        inputs = ragged_inputs(page_size=int(poison), q_lengths=(2,), sliding_window=100)
        inputs = inputs.replace(kv_lengths=jnp.asarray([290, 130, 300], jnp.int32))
        self.run_and_check(inputs)
        return Poisoned((inputs, None), (with_unseen_keys(inputs, 102), None))

    def test_results_and_gradients(self, case: Any):
        self.stages = case[1]
        super().test_results_and_gradients(case)

    @pytest.mark.parametrize("page_size", [16, 256])
    def test_lengths(self, page_size: int):
        """Around a tile's end, beyond the table, fewer than the new tokens, and none at all."""
        lengths = [0, 1, 127, 128, 129, 300, 1 << 30, 2**31 - 1, -5, -(2**31), 2]
        inputs = ragged_inputs(sequences=len(lengths), q_lengths=(3,), page_size=page_size)
        found = self.run_and_check(inputs.replace(kv_lengths=jnp.asarray(lengths, jnp.int32)))
        check_rows_without_keys(found, lengths, 3)

    def test_the_last_tile_has_pages_of_its_own(self):
        """Full ones, where the table of the sequence before ends within a tile."""
        inputs = ragged_inputs(sequences=2, q_lengths=(1,), page_size=16, heads=2, kv_heads=1)
        self.run_and_check(inputs.replace(kv_lengths=jnp.asarray([300, 250], jnp.int32)))

    @pytest.mark.parametrize(("seed", "page_size"), [(0, 16), (1, 64), (2, 128), (1, 256)])
    def test_hostile_tables(self, seed: int, page_size: int):
        self.run_on_hostile(hostile_inputs(seed, page_size, (None, 130)[seed % 2]))


def hostile_inputs(seed: int, page_size: int, window: Any = None) -> PagedInputs:
    """Any page numbers, lengths and boundaries; page 0 is in no table."""
    inputs = ragged_inputs(page_size=page_size, q_lengths=(3, 1, 40), sliding_window=window)
    cum = [[2, 1, 60, 9], [0, 3, 3, 44], [-7, 2**31 - 1, -(2**31), 5]][seed]
    inputs = hostile(inputs, seed, [0, 5, 171, 1000, -3, 2**31 - 1], own=3, first=1)
    return inputs.replace(cum_q_lens=jnp.asarray(cum, jnp.int32))


@pytest.mark.parametrize(("page_size", "stages"), [(16, 2), (128, 3)])
def test_races(page_size: int, stages: int):
    inputs = hostile_inputs(1, page_size, 130)
    with interpret_mosaic(detect_races=True):
        check(jax.block_until_ready(jax.jit(lambda inputs: forward(inputs, stages))(inputs)), inputs)


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
    for fields in ({"items": 0}, {"items": True}, {"ping_pong": 1}):
        with pytest.raises(ValueError, match="at least one item"):
            HopperChunkParams(**fields)  # type: ignore[arg-type]


def test_chunks_of_one_length_are_several_items_of_a_cta():
    long, mixed = ({"sequences": 8, "q_lengths": (300,)}, {"sequences": 8, "q_lengths": (1, 300)})
    for fields, items in ((long, 4), (mixed, 1)):
        inputs = structs_of("ragged_page_attention", RaggedPageCase("", **SIZES | fields))
        listed = BACKEND.candidates(inputs, H100, "forward")
        assert listed[0] == HopperChunkParams(2, True, items)
        assert len(listed) == len(set(listed))
