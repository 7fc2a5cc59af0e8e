"""The conformance suite on the kernels for TPUs, interpreted on the CPU."""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import run_both
from tests.kernels.flash_attention.conformance import Conformance, cotangents, inputs_of, named, run_and_judge
from tests.support.tpu_interpret import interpret_tpu
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.tpu import backend as module
from tilewright.kernels.flash_attention.tpu.backend import TpuFlashAttention
from tilewright.kernels.flash_attention.tpu.params import TpuTiles, balanced_block
from tilewright.kernels.flash_attention.tpu.schedule import plan_schedule
from tilewright.kernels.masks import CausalMask, TileClass, TileGrid, WindowMask
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Direction

BACKEND = TpuFlashAttention()
SMALL = TpuTiles(128, 128, 128, 128)

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_tpu():
        yield


class TestConformance(Conformance):
    backend: ClassVar[Backend] = BACKEND

    def params(self, inputs: AttentionInputs, direction: Direction) -> Any:
        return SMALL


run = functools.partial(run_and_judge, BACKEND)


def case(**options: Any) -> AttentionCase:
    return AttentionCase("", **{"batch": 1, "q_length": 256, "heads": 1, "head_dim": 16, "dtype": "bfloat16"} | options)


BANDS: list[tuple[dict[str, Any], TpuTiles]] = [
    ({"causal": True, "q_length": 400}, TpuTiles(256, 256, 128, 256)),
    ({"causal": True, "q_length": 257, "kv_length": 129, "causal_alignment": "bottom_right"}, SMALL),
    (
        {"causal": True, "kv_length": 383, "causal_alignment": "bottom_right", "head_dim": 64},
        TpuTiles(128, 384, 128, 256),
    ),
    ({"sliding_window": (20, 5), "q_length": 384, "kv_length": 200}, SMALL),
    ({"sliding_window": (128, None), "heads": 2, "kv_heads": 1}, TpuTiles(256, 128, 128, 128)),
    ({"q_length": 128, "kv_length": 256, "head_dim": 72, "value_dim": 128}, TpuTiles(128, 256, 128, 128)),
    ({"q_length": 128, "sinks": 1, "dtype": "float32"}, TpuTiles(sums_by_matmul=False)),
]


@pytest.mark.parametrize(("options", "tiles"), BANDS, ids=str)
def test_bands(options: dict[str, Any], tiles: TpuTiles):
    """Blocks without anything to see, that see all, and between; lengths that are and are not whole blocks."""
    run(case(**options), tiles, tiles)


def test_keys_in_several_calls():
    """More keys than there is VMEM for their gradients: dQ is summed over calls."""
    options = {"q_length": 128, "kv_length": 300, "causal": True, "causal_alignment": "bottom_right", "bias": "hqk"}
    with mock.patch.object(module, "RESIDENT_SHARE", 1 << 12):
        run(case(**options), SMALL, SMALL)


@pytest.mark.parametrize(("dma", "seed"), [("eager", 1), ("on_wait", 2)])
def test_no_races(dma: Any, seed: int):
    """Of the kernels with all kinds of arrays, whatever the order of parallel steps."""
    inputs = inputs_of(case(batch=2, heads=2, kv_heads=1, segments=True, mask="hqk", causal=True, dropout_prob=0.2))
    given = cotangents(inputs)
    both = jax.jit(lambda *call: named(*run_both(BACKEND, *call, (SMALL, SMALL))))
    want = both(inputs, given)
    jax.clear_caches()
    with interpret_tpu("TPU7x", detect_races=True, dma=dma, seed=seed):
        got = both(inputs, given)
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(got[name], np.float32), err_msg=name)


@pytest.mark.parametrize(
    "mask", [CausalMask(), CausalMask(-100), WindowMask(300, 70), WindowMask(None, 3, 500)], ids=str
)
@pytest.mark.parametrize("lengths", [(1024, 1024), (700, 1000), (1000, 300)], ids=str)
def test_schedule_visits_every_visible_block_once(mask: Any, lengths: tuple[int, int]):
    grid = TileGrid(*lengths, *(balanced_block(length, 256) for length in lengths))
    schedule, entries = plan_schedule(mask, grid)
    assert entries is None
    classes = mask.classify(grid)[0, 0]
    for row in range(grid.q_tiles):
        found = [schedule.step(None, 0, 0, jnp.int32(row), jnp.int32(step)) for step in range(schedule.steps)]
        computed = [int(step.block) for step in found if step.full or step.masked]
        assert sorted(computed) == computed == sorted(set(computed))
        assert set(np.nonzero(classes[row] != TileClass.EMPTY)[0]) <= set(computed)
        assert all(classes[row, int(step.block)] == TileClass.FULL for step in found if step.full)
        fetched = [int(schedule.fetched(None, 0, 0, jnp.int32(row), jnp.int32(step))) for step in range(schedule.steps)]
        assert fetched == [int(step.block) for step in found]


@pytest.mark.parametrize(
    "wrong", [{"block_q": 100}, {"unit_k": 4096}, {"block_k": True}, {"sums_by_matmul": 1}], ids=str
)
def test_configs_that_do_not_exist(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TpuTiles(**wrong)
