"""The protocol of a slot: schedules that keep to it give the right numbers, each way to break it has its error."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ring_protocol import ProtocolError, RingProtocol, SlotState, Warpgroup
from tests.support.ring_reference import ReferenceRing, wgmma
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile

ROWS, COLUMNS = 8, 64


def ring_of(num_stages: int = 2, consumers: int = 1, writers: int = 0) -> ReferenceRing:
    return ReferenceRing(RingPlan(SharedTile((ROWS, COLUMNS), jnp.float32), num_stages, consumers, writers), "keys")


def tiles(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, ROWS, COLUMNS), np.float32)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.integers(0, 2**31))
def test_any_interleaving_that_keeps_to_the_protocol_adds_up(
    num_stages: int, consumers: int, steps: int, transposed: bool, seed: int
):
    rng = np.random.default_rng(seed)
    ring, source = ring_of(num_stages, consumers), tiles(steps, seed)
    warpgroups = [Warpgroup(consumer) for consumer in range(consumers)]
    sides = [ring.seen_by(warpgroup) for warpgroup in warpgroups]
    depth, width = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    left = rng.standard_normal((consumers, 4, depth), np.float32)
    sums = np.zeros((consumers, 4, width), np.float32)
    loaded, done = 0, [0] * consumers
    while min(done) < steps:
        ready = [consumer for consumer in range(consumers) if done[consumer] < loaded]
        may_load = loaded < steps and loaded - min(done) < num_stages
        who = rng.choice([*ready, *([consumers] if may_load else [])])
        if who == consumers:
            ring.load_from_dram(loaded, source[loaded])
            loaded += 1
            continue
        step, side = done[who], sides[who]
        side.load_from_shared(step)
        wgmma(warpgroups[who], sums[who], left[who], side.get_mma_tile(step, transposed))
        warpgroups[who].wgmma_wait(0)
        side.release(step)
        done[who] += 1
    ring.drain(steps)
    total = source.sum(axis=0)
    np.testing.assert_allclose(sums, left @ (total.T if transposed else total), rtol=1e-4, atol=1e-3)


def overlapped_attention(keys: ReferenceRing, values: ReferenceRing, wait: int) -> None:
    """A consumer that has the next scores and the last output in flight at once, as forward kernels do."""
    warpgroup = Warpgroup(0)
    k, v = keys.seen_by(warpgroup), values.seen_by(warpgroup)
    query, probabilities = np.ones((4, COLUMNS), np.float32), np.ones((4, ROWS), np.float32)
    scores, output = np.zeros((4, ROWS), np.float32), np.zeros((4, COLUMNS), np.float32)
    source = tiles(6)
    keys.load_from_dram(0, source[0])
    k.load_from_shared(0)
    wgmma(warpgroup, scores, query, k.get_mma_tile(0, transposed=True))
    warpgroup.wgmma_wait(0)
    k.release(0)
    for step in range(1, 6):
        keys.load_from_dram(step, source[step])
        values.load_from_dram(step - 1, source[step - 1])
        k.load_from_shared(step)
        wgmma(warpgroup, scores, query, k.get_mma_tile(step, transposed=True))
        v.load_from_shared(step - 1)
        wgmma(warpgroup, output, probabilities, v.get_mma_tile(step - 1))
        warpgroup.wgmma_wait(wait)
        k.release(step)
        warpgroup.wgmma_wait(0)
        v.release(step - 1)
    keys.drain(6)
    values.drain(5)
    assert warpgroup.in_flight == 0


def test_the_overlapped_schedule_waits_for_just_what_it_releases():
    overlapped_attention(ring_of(), ring_of(), wait=1)
    with pytest.raises(ProtocolError, match=r"release of step 1: consumer 0 has 1 wgmma in flight.*slot 1 is in use"):
        overlapped_attention(ring_of(), ring_of(), wait=2)


def test_a_release_before_the_wait_is_an_error():
    ring, warpgroup = ring_of(), Warpgroup(0)
    side = ring.seen_by(warpgroup)
    ring.load_from_dram(0, tiles(1)[0])
    side.load_from_shared(0)
    wgmma(warpgroup, np.zeros((4, COLUMNS), np.float32), np.ones((4, ROWS), np.float32), side.get_mma_tile(0))
    with pytest.raises(ProtocolError, match="wait first"):
        side.release(0)
    warpgroup.wgmma_wait(0)
    side.release(0)
    assert ring.protocol.state(0) is SlotState.EMPTY


def test_the_states_of_a_slot():
    protocol = RingProtocol("keys", num_stages=2, consumers=2)
    seen = [protocol.state(0)]
    protocol.begin_fill(0)
    seen.append(protocol.state(0))
    protocol.end_fill(0)
    seen.append(protocol.state(0))
    protocol.acquire(0, 1)
    protocol.release(0, 1)
    seen.append(protocol.state(0))
    protocol.acquire(0, 0)
    protocol.release(0, 0)
    seen.append(protocol.state(0))
    assert seen == [SlotState.EMPTY, SlotState.FILLING, SlotState.FULL, SlotState.IN_USE, SlotState.EMPTY]


def test_a_load_into_a_slot_that_is_not_empty():
    ring = ring_of(num_stages=2, consumers=2)
    ring.load_from_dram(0, tiles(1)[0])
    with pytest.raises(ProtocolError, match=r"keys: load of step 2: consumers \[0, 1\].*slot 0 is filling with step 0"):
        ring.load_from_dram(2, tiles(1)[0])
    side = ring.seen_by(Warpgroup(1))
    side.load_from_shared(0)
    side.release(0)
    with pytest.raises(ProtocolError, match=r"consumers \[0\] have not released"):
        ring.load_from_dram(2, tiles(1)[0])


def test_a_load_out_of_turn():
    with pytest.raises(ProtocolError, match="the slot's turn is step 1"):
        ring_of().load_from_dram(3, tiles(1)[0])


def test_a_tile_is_taken_after_it_was_waited_for_and_before_it_is_released():
    ring = ring_of()
    side = ring.seen_by(Warpgroup(0))
    with pytest.raises(ProtocolError, match=r"load_from_shared of step 0.*not there"):
        side.load_from_shared(0)
    ring.load_from_dram(0, tiles(1)[0])
    with pytest.raises(ProtocolError, match=r"get_mma_tile of step 0.*has not waited"):
        side.get_mma_tile(0)
    with pytest.raises(ProtocolError, match=r"release of step 0.*has not waited"):
        side.release(0)
    side.load_from_shared(0)
    with pytest.raises(ProtocolError, match="waits twice"):
        side.load_from_shared(0)
    side.release(0)
    with pytest.raises(ProtocolError, match="has not waited"):
        side.get_mma_tile(0)


def test_a_double_release():
    ring = ring_of(consumers=2)
    ring.load_from_dram(0, tiles(1)[0])
    side = ring.seen_by(Warpgroup(1))
    side.load_from_shared(0)
    side.release(0)
    with pytest.raises(ProtocolError, match="consumer 1 releases twice"):
        side.release(0)
    with pytest.raises(ProtocolError, match="consumer 1 has released"):
        side.get_mma_tile(0)


def test_drain_wants_everything_released_and_nothing_more():
    ring = ring_of()
    ring.drain(0)
    ring.load_from_dram(0, tiles(1)[0])
    with pytest.raises(ProtocolError, match="although the producer is done after 0 steps"):
        ring.drain(0)
    side = ring.seen_by(Warpgroup(0))
    side.load_from_shared(0)
    with pytest.raises(ProtocolError, match=r"drain of step 0.*not done"):
        ring.drain(1)
    side.release(0)
    ring.drain(1)


def test_writers_fill_a_slot_together():
    ring, source = ring_of(consumers=1, writers=2), tiles(1)[0]
    side = ring.seen_by(Warpgroup(0))
    for first in (0, 4):
        with pytest.raises(ProtocolError, match="not there"):
            side.load_from_shared(0)
        rows = slice(first, first + 4)
        values = ring.load_from_dram(0, source)
        assert values is not None
        ring.copy_to_shared(0, values[rows], rows=rows)
    side.load_from_shared(0)
    np.testing.assert_array_equal(side.get_mma_tile(0).values, source)
    with pytest.raises(ProtocolError, match="load of step 0"):
        ring.copy_to_shared(0, source)
    with pytest.raises(ValueError, match="writers"):
        ring.copy_to_shared(0)


def test_what_lies_beyond_the_end_is_zero():
    ring, source = ring_of(), tiles(1)[0]
    ring.load_from_dram(0, source[:5])
    side = ring.seen_by(Warpgroup(0))
    side.load_from_shared(0)
    np.testing.assert_array_equal(side.get_mma_tile(0).values, np.concatenate([source[:5], np.zeros((3, COLUMNS))]))


def test_completions_and_waits_that_nothing_started():
    protocol = RingProtocol("keys", 2, 1)
    with pytest.raises(ProtocolError, match="nothing is being loaded"):
        protocol.end_fill(0)
    with pytest.raises(ProtocolError, match="reads nothing"):
        protocol.end_read(0, 0)
    with pytest.raises(ValueError, match="n=-1"):
        Warpgroup(0).wgmma_wait(-1)
