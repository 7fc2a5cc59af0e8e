"""The plan of a ring: all visible pairs once and no others, equal work, steps that are left out; the reordering."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.distributed.plan import MIN_LOOP, Rectangle, ring_steps, segments
from tilewright.kernels.flash_attention.masking import FAR, Band

CAUSAL = Band(-FAR, 0)


def positions(layout: Layout, length: int) -> np.ndarray:
    """By the definition: ``[shards, length]``, the devices' shares of the reordered positions."""
    whole = np.arange(layout.shards * length)
    order = np.asarray(tilewright.zigzag(whole, 0, layout.shards)) if layout.name == "zigzag" else whole
    return order.reshape(layout.shards, length)


def covered(plan: tuple[Rectangle, ...], q_length: int, kv_length: int) -> np.ndarray:
    """How often a plan computes each pair."""
    times = np.zeros((q_length, kv_length), int)
    for part in plan:
        rows, columns = (np.arange(stop - start) for start, stop in (part.rows, part.columns))
        difference = columns[None] - rows[:, None]
        visible = (difference >= part.band.lowest) & (difference <= part.band.highest)
        assert visible.any()
        assert int(visible.sum()) == part.area
        times[slice(*part.rows), slice(*part.columns)] += visible
    return times


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_every_visible_pair_is_in_one_rectangle(name: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        shards, q_length, kv_length = (int(rng.choice(x)) for x in ([1, 2, 3, 4], [2, 4, 6], [2, 4, 6, 8]))
        band = Band(
            int(rng.choice([-FAR, -rng.integers(0, 20), rng.integers(0, 5)])),
            int(rng.choice([FAR, 0, rng.integers(-5, 20)])),
        )
        layout = Layout(name, shards, q_length, kv_length)  # type: ignore[arg-type]
        steps = {step.shift: step for step in ring_steps(layout, band)}
        q_positions, kv_positions = positions(layout, q_length), positions(layout, kv_length)
        for shift in range(shards):
            for device in range(shards):
                q, k = q_positions[device][:, None], kv_positions[(device - shift) % shards][None]
                wanted = (k - q >= band.lowest) & (k - q <= band.highest)
                if shift not in steps:
                    assert not wanted.any()
                    continue
                plan = steps[shift].plans[steps[shift].choice[device]]
                np.testing.assert_array_equal(covered(plan, q_length, kv_length), wanted)


def test_zigzag_gives_every_device_the_same_causal_work_in_every_step() -> None:
    steps = ring_steps(Layout("zigzag", 8, 64, 64), CAUSAL)
    assert [len(step.plans) for step in steps] == [1] + [2] * 7
    for step in steps:
        assert len(set(step.areas())) == 1
        assert all(len(plan) == 1 for plan in step.plans)
    # The diagonal is one causal call of all rows, as on one device; others need no mask at all.
    assert steps[0].plans == ((Rectangle((0, 64), (0, 64), CAUSAL),),)
    assert {part.band for step in steps[1:] for plan in step.plans for part in plan} == {Band()}


def test_contiguous_steps_are_full_diagonal_or_empty() -> None:
    steps = ring_steps(Layout("contiguous", 4, 8, 8), CAUSAL)
    assert steps[0].areas() == [36] * 4
    assert [step.areas() for step in steps[1:]] == [[0, 64, 64, 64], [0, 0, 64, 64], [0, 0, 0, 64]]


@pytest.mark.parametrize(
    ("window", "shifts"), [(0, [0]), (1, [0, 1]), (8, [0, 1]), (9, [0, 1, 2]), (100, list(range(8)))]
)
def test_a_window_ends_the_ring_early(window: int, shifts: list[int]) -> None:
    steps = ring_steps(Layout("contiguous", 8, 8, 8), Band(-window, 0))
    assert [step.shift for step in steps] == shifts


def test_a_window_to_both_sides_takes_the_neighbours_alone() -> None:
    steps = ring_steps(Layout("contiguous", 8, 8, 8), Band(-3, 3))
    assert [step.shift for step in steps] == [0, 1, 7]


def test_zigzag_is_undone_and_pairs_early_with_late_chunks() -> None:
    order = tilewright.zigzag(np.arange(16), 0, 4)
    assert order.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3)
    np.testing.assert_array_equal(tilewright.unzigzag(tilewright.zigzag(x, -2, 4), 1, 4), x)


def test_a_size_that_has_no_chunks_is_an_error() -> None:
    for reorder in (tilewright.zigzag, tilewright.unzigzag):
        with pytest.raises(ValueError, match=r"size=12 must be a multiple of 8"):
            reorder(np.zeros((2, 12)), 1, 4)
        with pytest.raises(ValueError, match=r"axis=2"):
            reorder(np.zeros((2, 12)), 2, 4)


@pytest.mark.parametrize("band", [CAUSAL, Band(), Band(-70, 5)])
@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_a_loop_has_like_steps_a_hop_apart(name: str, band: Band) -> None:
    steps = ring_steps(Layout(name, 16, 8, 8), band)  # type: ignore[arg-type]
    found = segments(steps)
    assert [step for segment in found for step in segment.steps] == list(steps)
    hops = [after.shift - before.shift for before, after in itertools.pairwise(steps)]
    ends = list(itertools.accumulate(len(segment.steps) for segment in found))
    assert [segment.hop_in for segment in found] == [None, *(hops[end - 1] for end in ends[:-1])]
    assert [segment.hop_out for segment in found] == [*(hops[end - 1] for end in ends[:-1]), None]
    for segment in found:
        assert len({step.plans for step in segment.steps}) == 1
        if len(segment.steps) > 1:
            assert len(segment.steps) >= MIN_LOOP
            assert segment.hop_in == segment.hop_out == 1
            assert all(b.shift - a.shift == 1 for a, b in itertools.pairwise(segment.steps))
    if band == CAUSAL:  # the first, the loop, the last: no more for any number of devices
        assert [len(segment.steps) for segment in found] == [1, 14, 1]
